"""What transformers or torch can break: the attention function, masks, cache layers, handles, graph operations."""
