"""What the weight of multi-head latent attention (MLA) does: to queries and means, or to the tokens, a piece at a time.

Attention of expanded keys and values is attention of latents, by queries times the keys' half of the weight, with the
means times the values' half ("absorbed", DeepSeek-V2, 2024).

    B batch, H heads, T tokens, S queries, n + d channels of a key, of which d rotary, v of a value
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..formats.packing import BLOCK_TOKENS
from ..formats.states import KVView
from . import choose_backend
from .reference import merge

# Elements of keys and values that are expanded at a time: 128 MiB in 16 bits.
PIECE_ELEMENTS = 2**26


@dataclass(frozen=True, eq=False)
class KVProjection:
    """The weight that expands latents, [H, n + v, rank] (transformers' kv_b_proj): per head `nope` = n rows of keys."""

    weight: torch.Tensor
    nope: int

    def content(self, query: torch.Tensor) -> torch.Tensor:
        """Queries [B, H, S, n + d] as those of latents, [B, H, S, rank]."""
        return _by_head(query[..., : self.nope], self.weight[:, : self.nope])

    def absorb(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [B, H, S, n + d] as those of latents, [B, H, S, rank], and of rotary keys, [B, H, S, d]."""
        return self.content(query), query[..., self.nope :]

    def values_of(self, means: torch.Tensor) -> torch.Tensor:
        """Means of latents [B, H, S, rank] as means of values, [B, H, S, v]."""
        return _by_head(means, self.weight[:, self.nope :].mT)

    def expand(self, latents: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, H, T, n + d] and values [B, H, T, v] of latents [B, 1, T, rank] and rotary keys [B, 1, T, d]."""
        heads = self.weight.shape[0]
        both = F.linear(latents[:, 0], self.weight.flatten(0, 1)).unflatten(-1, (heads, -1)).transpose(1, 2)
        keys, values = both.split([self.nope, both.shape[-1] - self.nope], dim=-1)
        return torch.cat([keys, rotary.expand(-1, heads, -1, -1)], dim=-1), values

    def absorbs(self, num_queries: int, rotary_dim: int) -> bool:
        """Whether so many queries multiply less, per token, with latents than expanding it does and the keys then."""
        _, rows, rank = self.weight.shape
        return num_queries * (2 * rank + rotary_dim - (rows + rotary_dim)) <= rank * rows


def _by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [B, H, S, i] times weight [H, i, o]: heads are the batch, so that the weight is read once for all sequences."""
    out = torch.bmm(x.transpose(0, 1).flatten(1, 2), weight)
    return out.unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1)


def attend_expanded(
    query: torch.Tensor,
    view: KVView,
    projection: KVProjection,
    mask: torch.Tensor | None,
    scaling: float,
    *,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    is_causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `query` [B, H, S, n + d] over latents that are expanded, PIECE_ELEMENTS at a time.

    For many queries: `KVProjection.absorbs`.  The keys of `view` are latents, its values rotary keys; other arguments
    and results as those of `Backend.attend`.
    """
    num_queries, length = query.shape[2], view.length
    keep_causal = mask is None and is_causal and num_queries > 1
    heads, rows, _ = projection.weight.shape
    tokens = PIECE_ELEMENTS // (query.shape[0] * heads * (rows + query.shape[3] - projection.nope))
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start, end, latents, rotary in _pieces(view, max(tokens // BLOCK_TOKENS, 1) * BLOCK_TOKENS):
        own = None if mask is None else mask[..., start:end]
        aligned = end == length and end - start >= num_queries
        if keep_causal and not aligned and end > length - num_queries + 1:
            own = _causal(num_queries, length, start, end, query.device)
        piece = KVView(*projection.expand(latents, rotary), backend=view.backend)
        # An extra logit counts once; whichever part has it, the merge gives the same.
        out, lse = choose_backend(view.backend, piece.tail_keys, piece.tail_values).attend(
            *(query, piece, own, scaling),
            softcap=softcap,
            sink_logits=sink_logits if end == length else None,
            is_causal=keep_causal and aligned,
        )
        parts.append((out.to(lse.dtype), lse))
        if len(parts) == 2:
            outs, lses = zip(*parts, strict=True)
            parts = [merge(list(outs), list(lses))]
    out, lse = parts[0]
    return out.to(query.dtype), lse


def _causal(num_queries: int, length: int, start: int, end: int, device: torch.device) -> torch.Tensor:
    """Which of tokens start .. end the last of `length` tokens see, bool [1, 1, S, end - start]."""
    last = torch.arange(length - num_queries, length, device=device)[:, None]
    return (torch.arange(start, end, device=device) <= last)[None, None]


def _pieces(view: KVView, tokens: int) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
    """Start, end, latents and rotary keys in the model's dtype, [B, 1, n, ...], whole blocks, at most `tokens`."""
    if view.sink_keys is not None and view.sink_values is not None:
        yield 0, view.sink_length, view.sink_keys, view.sink_values
    if view.key is not None and view.value is not None:
        backend, dtype = choose_backend(view.backend, view.tail_keys, view.tail_values), view.tail_keys.dtype
        for start in range(0, view.packed_length, tokens):
            end = min(start + tokens, view.packed_length)
            latents, rotary = (
                backend.dequantize(x.tokens(start, end), end - start, dtype) for x in (view.key, view.value)
            )
            yield view.sink_length + start, view.sink_length + end, latents, rotary
    before = view.length - view.tail_keys.shape[2]
    for start in range(0, view.tail_keys.shape[2], tokens):
        piece = slice(start, min(start + tokens, view.tail_keys.shape[2]))
        yield before + piece.start, before + piece.stop, view.tail_keys[:, :, piece], view.tail_values[:, :, piece]
