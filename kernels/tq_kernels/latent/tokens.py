"""What both forms of packed latent attention share: which tokens a tile has, rotary keys, scales, the softmax step."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..attention.base2 import ptx_inverse, ptx_log2, usable_scale
from ..attention.scores import load_mask
from ..bits.to_float16 import float8_to_float16
from .arguments import EXACT_ROTARY

_EXACT = tl.constexpr(EXACT_ROTARY)
# Probabilities times 2**7.5 use the range of e4m3, and leave float16 room for those of tokens that hardly count.
P_SHIFT = tl.constexpr(7.5)


class Columns(NamedTuple):
    """Of a program: its sequence, query columns, which of them are used; of each the place of its mask, and the first
    token that it does not see."""

    batch: Any
    column: Any
    used: Any
    mask: Any
    limit: Any


class Numbers(NamedTuple):
    """Of each column, see `Queries`."""

    factor: Any
    rotary: Any
    offset: Any


@triton.jit
def program_columns(strides, length, SHAPE: tl.constexpr, CHOSEN: tl.constexpr):
    """Program (tile of columns, sequence); where tokens are chosen, a program has the heads of one query."""
    if CHOSEN:
        batch, query = (tl.program_id(1) // SHAPE.queries).to(tl.int64), tl.program_id(1) % SHAPE.queries
        head = tl.program_id(0) * SHAPE.columns + tl.arange(0, SHAPE.columns)
        used, head = head < SHAPE.heads, tl.where(head < SHAPE.heads, head, 0)
        query += head * 0
    else:
        batch = tl.program_id(1).to(tl.int64)
        column = tl.program_id(0) * SHAPE.columns + tl.arange(0, SHAPE.columns)
        used = column < SHAPE.heads * SHAPE.queries
        column = tl.where(used, column, 0)
        head, query = column // SHAPE.queries, column % SHAPE.queries
    mask = batch * strides.mask.batch + head * strides.mask.head + query * strides.mask.query
    return Columns(batch, head * SHAPE.queries + query, used, mask, length - SHAPE.queries + 1 + query)


@triton.jit
def column_numbers(queries, at, batches, SHAPE: tl.constexpr):
    """`Numbers` of the columns of a program, of so many sequences."""
    COUNT: tl.constexpr = SHAPE.heads * SHAPE.queries
    row = at.batch * COUNT + at.column
    count = batches.to(tl.int64) * COUNT
    numbers = queries.numbers + row
    return Numbers(tl.load(numbers), tl.load(numbers + count), tl.load(numbers + 2 * count))


@triton.jit
def load_positions(base, token, inside, SHAPE: tl.constexpr, ROTARY: tl.constexpr, NATIVE: tl.constexpr):
    """Rotary keys of `token` [T], [T, width]: as they are, or their codes in float16."""
    dim = tl.arange(0, SHAPE.rotary_width)
    pointer = base + token.to(tl.int64)[:, None] * SHAPE.rotary + dim[None, :]
    x = tl.load(pointer, mask=inside[:, None] & (dim < SHAPE.rotary)[None, :], other=0)
    if ROTARY.kind == _EXACT:
        return x
    elif ROTARY.table[0] == 1:  # INT8
        return x.to(tl.int8, bitcast=True).to(tl.float16)
    else:
        return float8_to_float16(x, ROTARY.table[0] == 5, NATIVE)


@triton.jit
def mask_of_places(mask, at, place, inside, step, AXIS: tl.constexpr, MASK: tl.constexpr):
    """The mask of tokens at `place`, which lie along AXIS; see `load_mask`."""
    # One mask for all columns is that of the first one, whose head and query have stride 0, or are 0.
    return load_mask(mask, tl.min(at.mask, 0), at.mask, step, place, inside, AXIS, MASK)


@triton.jit
def weigh(s, scale, peak, AXIS: tl.constexpr, FLOAT32: tl.constexpr, PTX: tl.constexpr):
    """(peak, alpha, p, probability) after scores `s`, whose tokens lie along AXIS: what goes to the dot is p, the
    probability times the scale of its latent (or None), at most 2 ** P_SHIFT."""
    if scale is not None:
        scale = usable_scale(scale)  # where it is NaN, so is the score
    if scale is None:
        peak_now = tl.maximum(peak, tl.max(s, AXIS))
        p = tl.exp2(s - tl.expand_dims(peak_now - P_SHIFT, AXIS))
        return peak_now, tl.exp2(peak - peak_now), p, p
    elif FLOAT32:
        peak_now = tl.maximum(peak, tl.max(s, AXIS))
        probability = tl.exp2(s - tl.expand_dims(peak_now - P_SHIFT, AXIS))
        return peak_now, tl.exp2(peak - peak_now), probability * tl.expand_dims(scale, 1 - AXIS), probability
    else:
        if PTX:
            logarithm, inverse = ptx_log2(scale), ptx_inverse(scale)
        else:
            logarithm, inverse = tl.log2(scale), 1.0 / scale
        s += tl.expand_dims(logarithm, 1 - AXIS)
        peak_now = tl.maximum(peak, tl.max(s, AXIS))
        p = tl.exp2(s - tl.expand_dims(peak_now - P_SHIFT, AXIS))
        return peak_now, tl.exp2(peak - peak_now), p, p * tl.expand_dims(inverse, 1 - AXIS)


@triton.jit
def split_rows(work, at, batches, all_splits, SHAPE: tl.constexpr):
    """Where this program's output and log-sum-exp of each column go, [B, splits, columns, rank] and behind it."""
    COUNT: tl.constexpr = SHAPE.heads * SHAPE.queries
    row = (at.batch * all_splits + tl.program_id(2)) * COUNT + at.column
    return work + row * SHAPE.rank, work + batches.to(tl.int64) * all_splits * (COUNT * SHAPE.rank) + row
