"""Attention of many queries over a packed past."""
