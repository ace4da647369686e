"""New tokens into the cache, and packed ones back: append, quantise, update, dequantise."""
