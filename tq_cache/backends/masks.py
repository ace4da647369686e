"""Masks of attention as tensors: causal ones, and those of sparse attention."""

import torch


def causal(num_queries: int, length: int, device: torch.device) -> torch.Tensor:
    """Causal mask, bool [1, 1, S, T]: the last query sees every token."""
    full = torch.ones(num_queries, length, dtype=torch.bool, device=device)
    return full.tril(length - num_queries)[None, None]


def with_indices(mask: torch.Tensor | None, indices: torch.Tensor, length: int) -> torch.Tensor:
    """`mask` narrowed to the tokens that an indexer chose, `indices` int [B, S, top_k] (sparse attention, DSA)."""
    batch, num_queries, _ = indices.shape
    chosen = torch.zeros(batch, num_queries, length, dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True)[:, None]
    if mask is None:
        return chosen & causal(num_queries, length, indices.device)
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, -torch.inf)
