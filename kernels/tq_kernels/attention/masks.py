"""An attention mask and its tiles: most are all True or all False, and their elements need not be read again."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..device import Device
from ..launch import Launch, Program
from .scores import FULL_MASK, NO_MASK, ROW_MASK, apply_mask

NONE, SOME, ALL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class TiledMask(NamedTuple):
    """mask: [B, H, S, T]; tiles: bytes NONE, SOME or ALL, [B, H, tiles of S, tiles of tokens]."""

    mask: Any
    tiles: Any


class MaskSteps(NamedTuple):
    """Strides of a mask to the next sequence, head, query and token."""

    batch: int
    head: int
    query: int
    token: int


class TileSteps(NamedTuple):
    """Strides of the tiles to the next sequence, head and tile of queries."""

    batch: int
    head: int
    query: int


class MaskStrides(NamedTuple):
    """Of a `TiledMask`."""

    mask: MaskSteps
    tiles: TileSteps


@triton.jit(do_not_specialize=["count", "length", "boundary", "shift"])
def _mask_tiles_kernel(
    mask, tiles, count, length, boundary, shift, strides, M: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """One program = one tile, M queries by N tokens.

    Token t stands in column t of the mask, but from token `boundary` on in column t + shift.
    """
    columns = tl.cdiv(length, N)
    row = tl.program_id(0) // columns * M + tl.arange(0, M)
    token = tl.program_id(0) % columns * N + tl.arange(0, N)
    inside = (row < count)[:, None] & (token < length)[None, :]
    mask += tl.program_id(2).to(tl.int64) * strides.batch + tl.program_id(1).to(tl.int64) * strides.head
    column = token + tl.where(token < boundary, 0, shift)
    pointer = mask + row[:, None].to(tl.int64) * strides.query + column[None, :] * strides.token
    m = tl.load(pointer, mask=inside, other=0)
    if m.dtype == tl.uint8:
        seen, neutral = m != 0, m != 0
    else:
        seen, neutral = m > float("-inf"), m == 0
    some = tl.max(tl.max((seen & inside).to(tl.int32), 1), 0)
    every = tl.min(tl.min((neutral | (inside == 0)).to(tl.int32), 1), 0)
    pair = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    index = pair.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(tiles + index, tl.where(every != 0, ALL, tl.where(some != 0, SOME, NONE)).to(tl.uint8))


@triton.jit
def visible_span(tiles, first, end):
    """(low, high, head, tail) of the tiles `first` .. `end`: none outside low .. high is seen, and all of those before
    `head` and from `tail` on are ALL."""
    STEP: tl.constexpr = 256
    low, high, head, tail = end, first, end, first
    for start in tl.range(first, end, STEP):
        tile = start + tl.arange(0, STEP)
        kind = tl.load(tiles + tile, mask=tile < end, other=0)
        seen, other = kind != NONE, (kind != ALL) & (tile < end)
        low = tl.minimum(low, tl.min(tl.where(seen, tile, end), 0))
        high = tl.maximum(high, tl.max(tl.where(seen, tile + 1, first), 0))
        head = tl.minimum(head, tl.min(tl.where(other, tile, end), 0))
        tail = tl.maximum(tail, tl.max(tl.where(other, tile + 1, first), 0))
    return low, high, head, tail


@triton.jit
def add_mask(s, mask, row, column, inside, strides):
    """Scores [rows, columns] with a mask of one head, `TiledMask`."""
    pointer = mask.mask + row[:, None].to(tl.int64) * strides.mask.query + column[None, :] * strides.mask.token
    return apply_mask(s, tl.load(pointer, mask=inside, other=0), FULL_MASK)


@triton.jit
def mask_of(mask, strides, batch, head, tile):
    """The mask of a query head, and its tiles of a tile of queries."""
    tiles = mask.tiles + batch * strides.tiles.batch + head * strides.tiles.head + tile * strides.tiles.query
    return TiledMask(mask.mask + batch * strides.mask.batch + head * strides.mask.head, tiles)


def describe_mask(mask: torch.Tensor | None, query: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """The mask as decode takes it, [B, H_q, S, all tokens or more], and what kind it is; query: [B, H_q, S, ...]."""
    if mask is None:
        return None, NO_MASK.value
    kind = ROW_MASK if mask.dim() == 4 and mask.shape[1] == 1 and query.shape[2] == 1 else FULL_MASK
    return expand_mask(mask, query, 0), kind.value


def expand_mask(mask: torch.Tensor, query: torch.Tensor, tokens: int) -> torch.Tensor:
    """The mask as kernels take it: [B, H_q, S, `tokens` or more], a bool one as bytes; query: [B, H_q, S, ...].

    Raises ValueError unless it is one for such queries.
    """
    batch, heads, count = query.shape[:3]
    fits = mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
    if not fits or mask.shape[2] != count or mask.shape[3] < tokens:
        raise ValueError(
            f"expected a mask [1 or {batch}, 1 or {heads}, {count}, {tokens or 'all tokens'} or more], "
            f"got {list(mask.shape)}"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"expected a mask that is bool, or float and added, got {mask.dtype}")
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    return mask.expand(batch, heads, -1, -1)


def expand_logits(sink_logits: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Extra logits, [1 or B, 1 or H_q, 1 or S], of each query [B, H_q, S, ...]; raises ValueError unless they are."""
    if sink_logits is None:
        return None
    shape = query.shape[:3]
    fits = sink_logits.dim() == 3 and all(n in (1, m) for n, m in zip(sink_logits.shape, shape, strict=True))
    if not fits or not sink_logits.is_floating_point():
        raise ValueError(
            f"expected sink_logits [1 or {shape[0]}, {shape[1]}, 1 or {shape[2]}] of floats, "
            f"got {list(sink_logits.shape)} in {sink_logits.dtype}"
        )
    return sink_logits.expand(shape)


def classify(
    mask: torch.Tensor, length: int, boundary: int, shift: int, queries: int, tokens: int, device: Device
) -> tuple[TiledMask, MaskStrides]:  # fmt: skip
    """What each tile of `queries` by `tokens` of `length` tokens is: nothing seen, some, or all and nothing added.

    mask: [B, H, S, T], bytes (0 is False) or float, maybe expanded; where its tokens stand: see the kernel

    The tiles, uint8 [B, H, tiles of S, tiles of `length`], are expanded as the mask is.
    """
    batch, heads = (1 if mask.stride(i) == 0 else mask.shape[i] for i in range(2))
    rows, columns = triton.cdiv(mask.shape[2], queries), triton.cdiv(length, tokens)
    tiles = torch.empty(batch, heads, rows, columns, dtype=torch.uint8, device=mask.device)
    steps = MaskSteps(*mask.stride())
    if tiles.numel():
        program = Program(_mask_tiles_kernel, device, dict(M=queries, N=tokens), dict(num_warps=4))
        arguments = (mask, tiles, mask.shape[2], length, boundary, shift, steps)
        Launch(program, (rows * columns, heads, batch), arguments).run()
    tiles = tiles.expand(mask.shape[0], mask.shape[1], -1, -1)
    return TiledMask(mask, tiles), MaskStrides(steps, TileSteps(*tiles.stride()[:3]))
