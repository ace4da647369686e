"""The specification of attention over packed keys and values, in plain PyTorch, beside that of the quantisers.

Runs on any device and is the path for CPUs.  Arithmetic is float32, and float64 where the input is.  Kernels are
tested against it on the same codes.

    B batch, H_kv key/value heads, H_q query heads, T tokens, S queries, D head_dim (of keys or of values)
"""

import torch

from ..formats.packing import BLOCK_TOKENS
from ..formats.rotation import rotate, unrotate
from ..formats.states import KVView, PackedStates, PreallocatedStates
from .masks import with_indices
from .quantizers import compute, dequantize, scaled, store

__all__ = [
    "append",
    "attend",
    "attend_latents",
    "attend_latents_preallocated",
    "attend_preallocated",
    "dequantize",
    "merge",
    "store_pair",
    "takes_exact",
    "update_preallocated",
]

# Packed tokens that attention holds unpacked at a time: what bounds its memory.
TILE_TOKENS = 16 * BLOCK_TOKENS


def takes_exact(query: torch.Tensor, view: KVView) -> bool:
    """See `Backend.takes_exact`: never, sdpa is faster."""
    return False


def store_pair(key: PackedStates, value: PackedStates, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
    """See `Backend.store_pair`."""
    store(key, keys, start)
    store(value, values, start)


def append(
    keys: torch.Tensor, values: torch.Tensor, tail_keys: torch.Tensor, tail_values: torch.Tensor, start: int
) -> None:
    """See `Backend.append`."""
    end = start + keys.shape[2]
    tail_keys[:, :, start:end] = keys.detach()
    tail_values[:, :, start:end] = values.detach()


def update_preallocated(states: PreallocatedStates, keys: torch.Tensor, values: torch.Tensor) -> None:
    """See `Backend.update_preallocated`; waits for the device."""
    length = int(states.num_tokens)
    if length >= states.max_length:
        return
    if length < states.sink_tokens and states.sink_keys is not None and states.sink_values is not None:
        append(keys, values, states.sink_keys, states.sink_values, length)
    else:
        slot = (length - states.sink_tokens) % states.ring_slots
        append(keys, values, states.ring_keys, states.ring_values, slot)
    packed = states.packed_length(length)
    if states.packed_length(length + 1) > packed:  # with a residual_length of 0 the new token is one of the block
        start = packed % states.ring_slots
        oldest = slice(start, start + BLOCK_TOKENS)
        ring = states.ring_keys[:, :, oldest], states.ring_values[:, :, oldest]
        store_pair(states.key, states.value, *ring, packed)
    states.num_tokens.add_(1)


def attend_preallocated(
    query: torch.Tensor,
    states: PreallocatedStates,
    mask: torch.Tensor | None,
    scaling: float,
    *,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `Backend.attend_preallocated`; waits for the device."""
    view = states.view()
    mask = None if mask is None else mask[..., : view.length]
    return attend(query, view, mask, scaling, softcap=softcap, sink_logits=sink_logits)[0]


def attend(
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    scaling: float,
    *,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    is_causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Backend.attend`; never holds more than a tile of the packed tokens unpacked."""
    num_kv_heads = view.tail_keys.shape[1]
    scores = _Scores(query, num_kv_heads, view.length, mask, scaling, softcap, is_causal)
    partials = []
    if view.sink_keys is not None and view.sink_values is not None:
        partials.append(_attend_exact(scores, view.sink_keys, view.sink_values, start=0))
    if view.packed_length:
        partials.append(_attend_packed(scores, view))
    if tail_length := view.tail_keys.shape[2]:
        partials.append(_attend_exact(scores, view.tail_keys, view.tail_values, start=view.length - tail_length))
    out, lse = _join(partials, sink_logits)
    return out.to(query.dtype), lse


def attend_latents(
    content: torch.Tensor,
    rotary: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    scaling: float,
    *,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    is_causal: bool = True,
    indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Backend.attend_latents`; never holds more than a tile of the packed tokens unpacked."""
    if indices is not None:
        mask = with_indices(mask, indices, view.length)
    scores = _Scores(content, 1, view.length, mask, scaling, softcap, is_causal)
    positions = (compute(rotary) * scaling).flatten(1, 2)[:, None]  # [B, 1, H * S, d]
    partials = []
    if view.sink_keys is not None and view.sink_values is not None:
        partials.append(_attend_exact_latents(scores, positions, view.sink_keys, view.sink_values, start=0))
    if view.packed_length:
        partials.append(_attend_packed_latents(scores, positions, view))
    if tail_length := view.tail_keys.shape[2]:
        start = view.length - tail_length
        partials.append(_attend_exact_latents(scores, positions, view.tail_keys, view.tail_values, start))
    out, lse = _join(partials, sink_logits)
    return out.to(content.dtype), lse


def attend_latents_preallocated(
    content: torch.Tensor,
    rotary: torch.Tensor,
    states: PreallocatedStates,
    mask: torch.Tensor | None,
    scaling: float,
    *,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `Backend.attend_latents_preallocated`; waits for the device."""
    view = states.view()
    mask = None if mask is None else mask[..., : view.length]
    return attend_latents(content, rotary, view, mask, scaling, softcap=softcap, sink_logits=sink_logits)[0]


def _join(
    partials: list[tuple[torch.Tensor, torch.Tensor]], sink_logits: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, H_q, S, D_v] and log-sum-exp of parts [B, H_kv, G, S, D_v], with an extra logit, if there is one."""
    out, lse = merge([out for out, _ in partials], [lse for _, lse in partials])
    out, lse = out.flatten(1, 2), lse.flatten(1, 2)
    if sink_logits is not None:
        sink_logits = sink_logits.to(lse.dtype)
        out, lse = out * torch.sigmoid(lse - sink_logits)[..., None], torch.logaddexp(lse, sink_logits)
    return out, lse


def merge(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a whole from attention over its parts: outputs [..., S, D] and log-sum-exps [..., S]."""
    lse = torch.stack(lses)
    weights = _softmax(lse, dim=0)
    return (torch.stack(outs) * weights[..., None]).sum(dim=0), torch.logsumexp(lse, dim=0)


class _Scores:
    """Turns products of queries and keys into masked scores, for any span of the tokens."""

    def __init__(
        self,
        query: torch.Tensor,
        num_kv_heads: int,
        length: int,
        mask: torch.Tensor | None,
        scaling: float,
        softcap: float | None,
        is_causal: bool,
    ) -> None:
        self.group, self.num_queries = query.shape[1] // num_kv_heads, query.shape[2]
        # [B, H_kv, G * S, D]: the query heads of a KV head as more queries, so that keys are never repeated
        self.query = (compute(query) * scaling).unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
        self.softcap = softcap
        self.first_limit = length - self.num_queries if mask is None and is_causal and self.num_queries > 1 else None
        self.mask = mask
        if mask is not None:
            if mask.dim() != 4 or mask.shape[-1] < length:
                raise ValueError(f"expected an attention mask [B, H, S, {length} or more], got {list(mask.shape)}")
            split = (num_kv_heads, -1) if mask.shape[1] > 1 else (1, 1)
            self.mask = mask.unflatten(1, split)  # [B, H_kv or 1, G or 1, S, T]

    def masked(self, products: torch.Tensor, start: int) -> torch.Tensor:
        """Scores [B, H_kv, G, S, T] of tokens start .. start + T from products [B, H_kv, G * S, T]."""
        scores = products.unflatten(2, (self.group, self.num_queries))
        end = start + scores.shape[-1]
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.mask is not None:
            part = self.mask[..., start:end]
            if part.dtype == torch.bool:
                return scores.masked_fill(~part, -torch.inf)
            return torch.where(part == -torch.inf, part, scores + part)  # an addition would not hide NaN
        if self.first_limit is not None and end > self.first_limit + 1:
            row = torch.arange(self.num_queries, device=scores.device)[:, None]
            column = torch.arange(start, end, device=scores.device)
            return scores.masked_fill(column > row + self.first_limit, -torch.inf)
        return scores


def _softmax(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax that gives zeros where every score is -inf."""
    none = (scores == -torch.inf).all(dim=dim, keepdim=True)
    return torch.softmax(scores.masked_fill(none, 0.0), dim=dim).masked_fill(none, 0.0)


def _mean(masked: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of values [B, H_kv, T, D] by masked scores [B, H_kv, G, S, T], and the log-sum-exp of these.

    A value with NaN or inf makes NaN of both for queries that see it; others it does not reach, as 0 times NaN would.
    """
    out = _softmax(masked, dim=-1).flatten(2, 3) @ values
    if torch.compiler.is_compiling() or not bool(out.isfinite().all()):  # looking at every value takes longer
        spoiled = ~values.isfinite().all(dim=-1)
        masked = masked.masked_fill(spoiled[:, :, None, None] & (masked != -torch.inf), torch.nan)
        out = _softmax(masked, dim=-1).flatten(2, 3) @ values.masked_fill(spoiled[..., None], 0.0)
    return out.unflatten(2, masked.shape[2:4]), torch.logsumexp(masked, dim=-1)


def _attend_exact(
    scores: _Scores, keys: torch.Tensor, values: torch.Tensor, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = keys.to(scores.query.dtype), values.to(scores.query.dtype)
    masked = scores.masked(scores.query @ keys.mT, start)
    return _mean(masked, values)


def _attend_packed(scores: _Scores, view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the packed tokens, a tile at a time; rotation and centre are undone once, on the merged output."""
    key, value = view.key, view.value
    assert key is not None and value is not None
    query, offset = _into_codes(scores.query, key)
    outs, lses = [], []
    for start in range(0, view.packed_length, TILE_TOKENS):
        end = min(start + TILE_TOKENS, view.packed_length)
        products = query @ scaled(key.tokens(start, end), end - start, query.dtype).mT + offset
        masked = scores.masked(products, view.sink_length + start)
        out, lse = _mean(masked, scaled(value.tokens(start, end), end - start, query.dtype))
        outs.append(out)
        lses.append(lse)
    return _out_of_codes(*merge(outs, lses), value)


def _attend_exact_latents(
    scores: _Scores, positions: torch.Tensor, latents: torch.Tensor, rotary: torch.Tensor, start: int
) -> tuple[torch.Tensor, torch.Tensor]:
    latents, rotary = latents.to(scores.query.dtype), rotary.to(scores.query.dtype)
    masked = scores.masked(scores.query @ latents.mT + positions @ rotary.mT, start)
    return _mean(masked, latents)


def _attend_packed_latents(scores: _Scores, positions: torch.Tensor, view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_attend_packed`; each tile of latents is decoded once, for scores and sums."""
    latent, rotary = view.key, view.value
    assert latent is not None and rotary is not None
    query, offset = _into_codes(scores.query, latent)
    positions, _ = _into_codes(positions, rotary)
    outs, lses = [], []
    for start in range(0, view.packed_length, TILE_TOKENS):
        end = min(start + TILE_TOKENS, view.packed_length)
        codes = scaled(latent.tokens(start, end), end - start, query.dtype)
        products = positions @ scaled(rotary.tokens(start, end), end - start, query.dtype).mT
        masked = scores.masked(query @ codes.mT + products + offset, view.sink_length + start)
        out, lse = _mean(masked, codes)
        outs.append(out)
        lses.append(lse)
    return _out_of_codes(*merge(outs, lses), latent)


def _into_codes(query: torch.Tensor, states: PackedStates) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Queries in the space of the codes, and what the centre adds to each one's scores."""
    held = states.calibration
    offset = 0.0 if held.center is None else query @ held.center.to(query.dtype).mT
    if held.smooth is not None:
        query = query * held.smooth.to(query.dtype)
    return rotate(query) if states.format.rotated else query, offset


def _out_of_codes(out: torch.Tensor, lse: torch.Tensor, states: PackedStates) -> tuple[torch.Tensor, torch.Tensor]:
    """Means of codes [B, H_kv, G, S, D] as those of the vectors that were coded; and their log-sum-exp."""
    held = states.calibration
    if states.format.rotated:
        out = unrotate(out)
    if held.smooth is not None:
        out = out * held.smooth.to(out.dtype)[:, :, None]
    if held.center is not None:
        out = out + held.center.to(out.dtype)[:, :, None] * (lse != -torch.inf)[..., None]
    return out, lse
