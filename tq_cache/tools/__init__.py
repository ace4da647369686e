"""What people look at: the command line, evaluation, tables, the embedded model.  Nothing of the cache needs it."""
