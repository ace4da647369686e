"""A problem of latent attention: what a call is given, all that its plan depends on, and what is refused."""

from typing import NamedTuple

import torch

from ..decode.problem import MAX_QUERIES, QUERY_DTYPES, check_counts_and_mask
from ..device import Device
from ..launch import Signature, check_devices
from ..states import BLOCK_TOKENS, Layout, States
from ..store.latents import LATENT_RANKS, ROTARY_DIMS


class LatentProblem(NamedTuple):
    """What one call of `decode_latents` is given (see there), and on which device."""

    device: Device
    content: torch.Tensor
    rotary: torch.Tensor
    latents: States | None
    positions: States | None
    tail_latents: torch.Tensor
    tail_rotary: torch.Tensor
    packed_length: int
    scaling: float
    sink_tokens: tuple[torch.Tensor, torch.Tensor] | None = None
    mask: torch.Tensor | None = None
    softcap: float | None = None
    sink_logits: torch.Tensor | None = None
    causal: bool = True
    indices: torch.Tensor | None = None
    num_tokens: torch.Tensor | None = None
    residual_length: int = 0
    max_length: int | None = None
    rows: bool | None = None
    splits: int | None = None


class LatentKey(NamedTuple):
    """All that the plan for a problem depends on: signatures, layouts and flags.

    exact: latents and rotary keys of the tail and of the sinks; chosen: of `indices`; counted: of `num_tokens`
    """

    device: Device
    content: Signature
    rotary: Signature
    latents: Layout | None
    positions: Layout | None
    exact: tuple[Signature | None, ...]
    packed_length: int
    mask: Signature | None
    mask_kind: int
    capped: bool
    causal: bool
    sink_logits: Signature | None
    chosen: Signature | None
    counted: Signature | None
    residual_length: int
    max_length: int | None
    rows: bool | None
    splits: int | None


def has_whole_tiles(given: LatentKey) -> bool:
    """Whether `packed_rows` reads only tokens that count, in tiles of two blocks, or of the only one there is.  It
    cannot leave out any, so 8-bit codes of others must not be NaN."""
    assert given.latents is not None
    whole = given.packed_length % BLOCK_TOKENS == 0
    return given.counted is not None or (whole and given.packed_length >= min(2, given.latents.blocks) * BLOCK_TOKENS)


def check_latents(given: LatentKey) -> None:
    """Raise ValueError, with what was given, on what the kernels would read wrongly."""
    content, rotary = given.content, given.rotary
    batch, heads, queries, rank = content.shape
    width = rotary.shape[3]
    if not 0 < queries <= MAX_QUERIES:
        raise ValueError(f"expected 1 to {MAX_QUERIES} queries, got {queries}; expand the latents for more")
    if rank not in LATENT_RANKS or width not in ROTARY_DIMS or rotary.shape[:3] != content.shape[:3]:
        raise ValueError(
            f"expected queries of latents of {LATENT_RANKS} channels and of rotary keys of {ROTARY_DIMS}, "
            f"got {list(content.shape)} and {list(rotary.shape)}"
        )
    if given.rows and content.dtype == torch.float32:
        raise ValueError("expected 16-bit queries with rows=True, got float32: fp8 dots are too coarse for it")
    eight = given.latents is not None and given.packed_length and given.latents.coding.bits == 8
    if given.rows and eight and not has_whole_tiles(given):
        raise ValueError(
            f"expected two whole blocks of 8-bit latents or more with rows=True, got {given.packed_length} tokens"
        )
    _check_exact(given, batch, (rank, width))
    if given.packed_length and (given.latents is None or given.positions is None):
        raise ValueError(f"expected packed latents and rotary keys of {given.packed_length} tokens, got None")
    if given.latents is not None and given.positions is not None:
        for layout, size in ((given.latents, rank), (given.positions, width)):
            layout.check(given.packed_length)
            if (*layout.shape[:2], layout.head_dim) != (batch, 1, size):
                raise ValueError(
                    f"expected packed states of {batch} sequences, one head, {size} channels, "
                    f"got {[*layout.shape[:2], layout.head_dim]}"
                )
        if given.positions.coding.exact and width and given.positions.dtype != content.dtype:
            raise ValueError(f"expected exact rotary keys in {content.dtype}, got {given.positions.dtype}")
    chosen = given.chosen
    if chosen is not None and tuple(chosen.shape[:2]) != (batch, queries):
        raise ValueError(f"expected indices [{batch}, {queries}, k], got {list(chosen.shape)}")
    tail, _, sinks, _ = given.exact
    assert tail is not None
    counted = given.counted, given.max_length, given.residual_length
    num_sinks = 0 if sinks is None else sinks.shape[2]
    check_counts_and_mask(counted, queries, num_sinks, given.packed_length, tail.shape[2], given.mask)
    check_devices(
        content, rotary, given.latents, given.positions, *given.exact, given.mask, given.sink_logits, chosen,
        given.counted,
    )  # fmt: skip


def _check_exact(given: LatentKey, batch: int, widths: tuple[int, int]) -> None:
    """Tail and sinks: in the dtype of the queries, one head, contiguous along channels."""
    dtype = given.content.dtype
    if dtype not in QUERY_DTYPES or given.rotary.dtype != dtype:
        raise ValueError(f"expected queries in one of {QUERY_DTYPES}, got {dtype} and {given.rotary.dtype}")
    tensors = [given.content, given.rotary, *(x for x in given.exact if x is not None)]
    if any(x.shape[3] > 1 and x.strides[3] != 1 for x in tensors):
        raise ValueError("expected queries, latents and rotary keys whose last dimension is contiguous")
    for latents, rotary in (given.exact[:2], given.exact[2:]):
        if latents is None or rotary is None:
            continue
        wanted = [(batch, 1, latents.shape[2], width) for width in widths]
        if [tuple(latents.shape), tuple(rotary.shape)] != wanted or {latents.dtype, rotary.dtype} != {dtype}:
            raise ValueError(
                f"expected exact latents and rotary keys {wanted} in {dtype}, "
                f"got {list(latents.shape)} in {latents.dtype} and {list(rotary.shape)} in {rotary.dtype}"
            )
