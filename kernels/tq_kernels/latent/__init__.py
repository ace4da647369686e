"""Attention of up to 16 queries per sequence to latents (MLA), which are keys and values at once."""
