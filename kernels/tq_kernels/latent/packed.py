"""Latent attention to packed tokens, heads on M: any number of columns, every code and device.

    S[columns, tokens] = Q[columns, rank] . C^T[rank, tokens]   O[columns, rank] += P[columns, tokens] . C[tokens, rank]

A tile of latents is decoded to float16 once and goes to both dots: from registers to the first, from shared memory to
the second.
"""

import triton
import triton.language as tl

from ..attention.base2 import divisor, log2_sum
from ..attention.scores import NO_MASK, apply_mask, soft_cap
from ..bits.layout import BLOCK_TOKENS
from ..bits.to_float16 import load_keys
from .arguments import NO_ROTARY
from .tokens import (
    P_SHIFT,
    column_numbers,
    load_positions,
    mask_of_places,
    program_columns,
    split_rows,
    weigh,
)

_NO_ROTARY = tl.constexpr(NO_ROTARY)


@triton.jit
def tile_tokens(chosen, first, end, tokens, num_sinks, TILE: tl.constexpr, CHOSEN: tl.constexpr):
    """Packed tokens of the tile from `first`, and which of them count: in a row, or as chosen."""
    row = first + tl.arange(0, TILE)
    if CHOSEN:
        index = tl.load(chosen.indices + tl.program_id(1).to(tl.int64) * chosen.top_k + row, mask=row < end, other=-1)
        token = index - num_sinks
        inside = (token >= 0) & (token < tokens)
        return tl.where(inside, token, 0), inside
    else:
        return row, row < end


@triton.jit
def load_latents(
    base, first, token, blocks, SHAPE: tl.constexpr, CODE: tl.constexpr, MODE: tl.constexpr, CHOSEN: tl.constexpr
):
    """Code values of packed tokens, float16 [T, rank]; `first`: the first one of tokens in a row, all of one block."""
    if CHOSEN:
        return load_keys(base, first * 0, token, blocks, SHAPE.rank, CODE, MODE, False)
    else:
        start = first // BLOCK_TOKENS * BLOCK_TOKENS
        order = first - start + tl.arange(0, token.shape[0])
        return load_keys(base, start, order, blocks, SHAPE.rank, CODE, MODE, False)


@triton.jit
def attend_packed_latents(
    queries, packed, mask, chosen, work, splits, tokens, length, blocks, num_sinks, softcap, strides,
    SHAPE: tl.constexpr, CODE: tl.constexpr, ROTARY: tl.constexpr, FLAGS: tl.constexpr, ARITHMETIC: tl.constexpr,
    MODE: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Split program_id(2) of `splits` of the packed tokens; `length`: tokens in all.  See `latent_kernel`."""
    TILE: tl.constexpr = LAUNCH.tile
    DTYPE: tl.constexpr = ARITHMETIC.operand
    COLUMNS: tl.constexpr = SHAPE.columns
    RANK: tl.constexpr = SHAPE.rank
    FLOAT32: tl.constexpr = ARITHMETIC.operand == tl.float32
    at = program_columns(strides, length, SHAPE, FLAGS.chosen)
    batches = tl.num_programs(1)
    if FLAGS.chosen:
        batches = batches // SHAPE.queries
    numbers = column_numbers(queries, at, batches, SHAPE)
    row = at.batch * (SHAPE.heads * SHAPE.queries) + at.column
    channel, dim = tl.arange(0, SHAPE.rank), tl.arange(0, SHAPE.rotary_width)
    q = tl.load(queries.content + row[:, None] * SHAPE.rank + channel[None, :])
    if ROTARY.kind != _NO_ROTARY:
        r = tl.load(
            queries.rotary + row[:, None] * SHAPE.rotary + dim[None, :], mask=(dim < SHAPE.rotary)[None, :], other=0
        )
        position = packed.positions + at.batch * strides.positions.batch
        if ROTARY.scaled:
            position_scale = packed.position_scale + at.batch * strides.positions.head
    base = packed.latents + at.batch * strides.latents.batch
    scales = packed.scale + at.batch * strides.latents.head
    end = tokens
    if FLAGS.chosen:
        end = chosen.top_k
    per_split = tl.cdiv(tl.cdiv(end, TILE), splits) * TILE
    begin = tl.program_id(2) * per_split
    peak, total = tl.full((COLUMNS,), -1e30, tl.float32), tl.zeros((COLUMNS,), tl.float32)
    acc = tl.zeros((COLUMNS, RANK), tl.float32)
    for first in tl.range(begin, tl.minimum(begin + per_split, end), TILE, num_stages=LAUNCH.stages):
        token, inside = tile_tokens(chosen, first, end, tokens, num_sinks, TILE, FLAGS.chosen)
        codes = load_latents(base, first, token, blocks, SHAPE, CODE, MODE, FLAGS.chosen).to(DTYPE)
        s = tl.dot(q, codes.T, input_precision=ARITHMETIC.precision) * numbers.factor[:, None]
        if FLAGS.stale:  # a probability of 0 times NaN is NaN
            codes = tl.where(inside[:, None], codes, 0.0)
        scale = None
        if CODE.bits != 8:
            scale = tl.load(scales + token, mask=inside, other=1).to(tl.float32)
            s *= scale[None, :]
        if ROTARY.kind != _NO_ROTARY:
            x = load_positions(position, token, inside, SHAPE, ROTARY, MODE.native).to(r.dtype)
            turn = tl.dot(r, x.T, input_precision=ARITHMETIC.precision) * numbers.rotary[:, None]
            if ROTARY.scaled:
                turn *= tl.load(position_scale + token, mask=inside, other=0).to(tl.float32)[None, :]
            s += turn
        s += numbers.offset[:, None]
        if FLAGS.softcap:
            s = soft_cap(s, softcap)
        if FLAGS.mask != NO_MASK:
            m = mask_of_places(mask, at, token + num_sinks, inside, strides.mask.token, 1, FLAGS.mask)
            s = apply_mask(s, m, FLAGS.mask)
        if FLAGS.causal:
            s = tl.where((token + num_sinks)[None, :] < at.limit[:, None], s, float("-inf"))
        s = tl.where(inside[None, :], s, float("-inf"))
        peak, alpha, p, probability = weigh(s, scale, peak, 1, FLOAT32, ARITHMETIC.ptx)
        total = total * alpha + tl.sum(probability, 1)
        acc = tl.dot(p.to(DTYPE), codes, acc * alpha[:, None], input_precision=ARITHMETIC.precision)
    acc /= divisor(total)[:, None]
    if CODE.bits == 8:
        acc *= tl.load(packed.scale + at.batch)
    out, lse = split_rows(work, at, batches, tl.num_programs(2), SHAPE)
    tl.store(out[:, None] + channel[None, :], acc, mask=at.used[:, None])
    tl.store(lse, peak - P_SHIFT + log2_sum(total), mask=at.used)
