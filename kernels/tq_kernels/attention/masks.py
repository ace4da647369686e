"""An attention mask and its tiles: most are all True or all False, and their elements need not be read again.

In kernels a mask is (mask, tiles), the tiles of one tile of queries being bytes NONE, SOME or ALL.
"""

import torch
import triton
import triton.language as tl

from ..device import Device
from ..launch import Launch, Program
from .scores import LOG2E

NONE, SOME, ALL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


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
    mask += tl.program_id(2).to(tl.int64) * strides[0] + tl.program_id(1).to(tl.int64) * strides[1]
    place = token + tl.where(token < boundary, 0, shift)
    m = tl.load(mask + row[:, None].to(tl.int64) * strides[2] + place[None, :] * strides[3], mask=inside, other=0)
    if m.dtype == tl.uint8:
        seen, neutral = m != 0, m != 0
    else:
        seen, neutral = m > float("-inf"), m == 0
    some = tl.max(tl.max((seen & inside).to(tl.int32), 1), 0)
    every = tl.min(tl.min((neutral | (inside == 0)).to(tl.int32), 1), 0)
    pair = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    place = pair.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(tiles + place, tl.where(every != 0, ALL, tl.where(some != 0, SOME, NONE)).to(tl.uint8))


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
def add_mask(s, mask, row, token, inside, strides):
    """Scores with mask = (mask, its tiles): added if a float, and -inf where False if a bool (as bytes)."""
    place = mask[0] + row[:, None].to(tl.int64) * strides[0][2] + token[None, :] * strides[0][3]
    m = tl.load(place, mask=inside, other=0)
    if m.dtype == tl.uint8:
        s = tl.where(m != 0, s, float("-inf"))
    else:
        s += m.to(tl.float32) * LOG2E
    return s


@triton.jit
def mask_of(mask, strides, batch, head, tile):
    """The mask of a query head, and its tiles of a tile of queries."""
    tiles = mask[1] + batch * strides[1][0] + head * strides[1][1] + tile * strides[1][2]
    return mask[0] + batch * strides[0][0] + head * strides[0][1], tiles


def classify(
    mask: torch.Tensor, length: int, boundary: int, shift: int, queries: int, tokens: int, device: Device
) -> torch.Tensor:  # fmt: skip
    """What each tile of `queries` by `tokens` of `length` tokens is: nothing seen, some, or all and nothing added.

    mask: [B, H, S, T], bytes (0 is False) or float, maybe expanded; where its tokens stand: see the kernel

    Returns uint8 [B, H, tiles of S, tiles of `length`], expanded as the mask is.
    """
    batch, heads = (1 if mask.stride(i) == 0 else mask.shape[i] for i in range(2))
    rows, columns = triton.cdiv(mask.shape[2], queries), triton.cdiv(length, tokens)
    tiles = torch.empty(batch, heads, rows, columns, dtype=torch.uint8, device=mask.device)
    if tiles.numel():
        program = Program(_mask_tiles_kernel, device, dict(M=queries, N=tokens), dict(num_warps=4))
        arguments = (mask, tiles, mask.shape[2], length, boundary, shift, mask.stride())
        Launch(program, (rows * columns, heads, batch), arguments).run()
    return tiles.expand(mask.shape[0], mask.shape[1], -1, -1)
