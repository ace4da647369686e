"""What a checkpoint says about float8 keys and values."""
