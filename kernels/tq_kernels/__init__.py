"""Triton kernels for `tq_cache`: they know torch and triton, and nothing of transformers or of the cache."""
