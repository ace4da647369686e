"""The ground: what a key or value vector is stored as.  Data and arithmetic on it, no decisions."""
