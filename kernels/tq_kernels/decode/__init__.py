"""Attention of up to 16 queries per sequence, split along the cached tokens."""
