"""The command `tq-cache`: arguments in, results out.  Outside `tq_cache`, whose import takes seconds, so that help and
shell completion need neither torch nor transformers; each command imports what it runs."""
