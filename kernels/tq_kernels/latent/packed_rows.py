"""Latent attention to packed tokens by fp8 tensor cores, tokens on M: few query columns, codes of 8 and 4 bits.

    S^T[tokens, columns] = C[tokens, rank] . Q^T[rank, columns]     O^T[rank, columns] += C^T[rank, tokens] . P^T

Packed rows of a tile are brought to shared memory once and read twice, each time straight into the registers that the
tensor core takes its left side from.  That is four codes in a row along the contraction: for the scores four channels
of a token, as a packed word has them.  For the output it is four tokens of a channel: a thread reads the words of four
tokens, decodes them as for the scores, and gathers a byte of each.
"""

import triton
import triton.language as tl

from ..attention.base2 import divisor, log2_sum
from ..attention.scores import NO_MASK, apply_mask, soft_cap
from ..bits.layout import BLOCK_TOKENS, parts
from ..bits.to_e4m3 import as_operand, decode_rows, gather_bytes, keep_tables, unit
from ..bits.two_terms import gather_terms, spread_terms
from .arguments import NO_ROTARY
from .tokens import P_SHIFT, column_numbers, load_positions, mask_of_places, program_columns, split_rows, weigh

_NO_ROTARY = tl.constexpr(NO_ROTARY)
LIFT = tl.constexpr(32.0)  # of the remainder of p: half a step at 2**7.5 is 8, times 32 still in range


@triton.jit
def _pair_scales(base, start, TILE: tl.constexpr):
    """float16 scales of tokens in a row, float32 [TILE]: two at a time, since Triton prefetches 4 bytes or more."""
    word = tl.load((base + start).to(tl.pointer_type(tl.int32)) + tl.arange(0, TILE // 2))
    x = tl.join(word.to(tl.int16), (word >> 16).to(tl.int16))
    return x.reshape(TILE).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _quads(x, TILE: tl.constexpr, ROW: tl.constexpr):
    """Rows [TILE, ROW] of the tokens that are together four in a row of the contraction: four times [TILE / 4, ROW].

    Token 16 s + 8 b + 2 a + c is number 2 c + b of four: threads that read side by side then have rows 2 apart, which
    the swizzle of shared memory keeps in different banks, and a thread's two score rows, 8 apart, end up side by side.
    """
    x = x.reshape(TILE // 16, 2, 4, 2, ROW).permute(0, 2, 4, 3, 1).reshape(TILE // 4, ROW, 2, 2)
    even, odd = tl.split(x)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _to_quads(p, TILE: tl.constexpr):
    """[TILE, N] by token to the order of `_quads`."""
    return p.reshape(TILE // 16, 2, 4, 2, p.shape[1]).permute(0, 2, 3, 1, 4).reshape(p.shape)


@triton.jit
def _channel(quads, CODE: tl.constexpr, PART: tl.constexpr, INDEX: tl.constexpr, PTX: tl.constexpr):
    """Code INDEX of each word of part PART as bytes [words, TILE], tokens as `_quads` orders them."""
    TABLE: tl.constexpr = CODE.table
    x = gather_bytes(quads, CODE.bits, TABLE, PART, INDEX, PTX)
    WORDS: tl.constexpr = x.shape[1] // 4
    return x.reshape(x.shape[0], WORDS, 4).permute(1, 0, 2).reshape(WORDS, 4 * x.shape[0])


@triton.jit
def _channels(quads, CODE: tl.constexpr, PART: tl.constexpr, FIRST: tl.constexpr, TWO: tl.constexpr, PTX: tl.constexpr):
    """As `_channel`; TWO of them, by eight words in turn, so that one dot takes both: a thread has rows 8 apart."""
    x = _channel(quads, CODE, PART, FIRST, PTX)
    if TWO:
        y = _channel(quads, CODE, PART, FIRST + 1, PTX)
        x = tl.join(x, y).reshape(x.shape[0] // 8, 8, x.shape[1], 2)
        x = x.permute(0, 3, 1, 2).reshape(2 * y.shape[0], y.shape[1])
    return x


@triton.jit
def _load_operand(queries, at, SHAPE: tl.constexpr, TERMS: tl.constexpr):
    """Queries [terms * columns, rank]."""
    channel, row = tl.arange(0, SHAPE.rank), tl.arange(0, TERMS * SHAPE.columns)
    if TERMS == 2:
        row += (at.batch * tl.num_programs(0) + tl.program_id(0)) * (2 * SHAPE.columns)
        q = tl.load(queries.content + row[:, None] * SHAPE.rank + channel[None, :])
        return q.to(tl.float8e4nv, bitcast=True)
    else:
        row = at.batch * (SHAPE.heads * SHAPE.queries) + at.column
        return tl.load(queries.content + row[:, None] * SHAPE.rank + channel[None, :])


@triton.jit
def attend_packed_rows(
    rows, queries, packed, mask, work, splits, tokens, length, blocks, num_sinks, softcap, strides,
    SHAPE: tl.constexpr, CODE: tl.constexpr, ROTARY: tl.constexpr, FLAGS: tl.constexpr, ARITHMETIC: tl.constexpr,
    MODE: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Split program_id(2) of `splits` of the packed tokens; `rows`: descriptor of packed rows.  See `latent_kernel`."""
    TILE: tl.constexpr = LAUNCH.tile
    COLUMNS: tl.constexpr = SHAPE.columns
    TABLE: tl.constexpr = CODE.table
    ROW: tl.constexpr = SHAPE.rank * CODE.bits // 8
    TERMS: tl.constexpr = 2 if ARITHMETIC.operand == tl.float8e4nv else 1
    TWO: tl.constexpr = CODE.bits < 8  # of 8-bit codes a dot has rows enough
    STEP: tl.constexpr = 2 if TWO else 1
    if ARITHMETIC.ptx:
        keep_tables(tokens, TABLE, TABLE)
    at = program_columns(strides, length, SHAPE, False)
    batches, dim = tl.num_programs(1), tl.arange(0, SHAPE.rotary_width)
    numbers = column_numbers(queries, at, batches, SHAPE)
    factor = numbers.factor * unit(CODE.bits, TABLE, ARITHMETIC.operand)
    q = _load_operand(queries, at, SHAPE, TERMS)
    if ROTARY.kind != _NO_ROTARY:
        r = queries.rotary + (at.batch * (SHAPE.heads * SHAPE.queries) + at.column)[:, None] * SHAPE.rotary
        r = tl.load(r + dim[None, :], mask=(dim < SHAPE.rotary)[None, :], other=0)
        position = packed.positions + at.batch * strides.positions.batch
        if ROTARY.scaled:
            position_scale = packed.position_scale + at.batch * strides.positions.head
    scales = packed.scale + at.batch * strides.latents.head
    first_row = (at.batch * (strides.latents.batch // ROW)).to(tl.int32)
    per_split = tl.cdiv(tl.cdiv(tokens, TILE), splits) * TILE
    begin = tl.program_id(2) * per_split
    peak, sums = tl.full((COLUMNS,), -1e30, tl.float32), tl.zeros((TILE, COLUMNS), tl.float32)
    acc = ()
    for _ in tl.static_range(4 * parts(CODE.bits) // STEP):
        acc = acc + (tl.zeros((STEP * ROW // 4, COLUMNS), tl.float32),)  # type: ignore[assignment]
    # The last tile is moved back, so that it holds nothing of the next sequence, nor a block that does not count, whose
    # bytes may be NaN; what it repeats does not count either.
    BLOCKS: tl.constexpr = TILE // BLOCK_TOKENS
    last = (tl.maximum(tl.cdiv(tokens, BLOCK_TOKENS), BLOCKS) - BLOCKS) * BLOCK_TOKENS
    for first in tl.range(begin, tl.minimum(begin + per_split, tokens), TILE, num_stages=LAUNCH.stages):
        start = tl.minimum(first, last)
        token = start + tl.arange(0, TILE)
        inside = (token >= first) & (token < tokens)
        words = rows.load([first_row + start, 0])
        operand = decode_rows((words,), CODE.bits, TABLE, ARITHMETIC.operand, ARITHMETIC.ptx)
        s = gather_terms(tl.dot(operand, q.T), TERMS, 1, 1) * factor[None, :]
        scale = None
        if CODE.bits != 8:
            scale = _pair_scales(scales, start, TILE)
            s *= scale[:, None]
        if ROTARY.kind != _NO_ROTARY:
            x = load_positions(position, token, inside, SHAPE, ROTARY, MODE.native).to(r.dtype)
            turn = tl.dot(x, r.T) * numbers.rotary[None, :]
            if ROTARY.scaled:
                turn *= tl.load(position_scale + token, mask=inside, other=0).to(tl.float32)[:, None]
            s += turn
        s += numbers.offset[None, :]
        if FLAGS.softcap:
            s = soft_cap(s, softcap)
        if FLAGS.mask != NO_MASK:
            m = mask_of_places(mask, at, token + num_sinks, inside, strides.mask.token, 0, FLAGS.mask)
            s = apply_mask(s, m, FLAGS.mask)
        if FLAGS.causal:
            s = tl.where((token + num_sinks)[:, None] < at.limit[None, :], s, float("-inf"))
        s = tl.where(inside[:, None], s, float("-inf"))
        peak, alpha, p, probability = weigh(s, scale, peak, 0, False, ARITHMETIC.ptx)
        sums = sums * alpha[None, :] + probability
        p = spread_terms(_to_quads(p, TILE), TERMS, 1, LIFT, ARITHMETIC.operand, ARITHMETIC.ptx)
        quads = _quads(words, TILE, ROW)
        new = ()
        for part in tl.static_range(parts(CODE.bits)):
            for index in tl.static_range(0, 4, STEP):
                x = _channels(quads, CODE, part, index, TWO, ARITHMETIC.ptx)
                x = as_operand(x, CODE.bits, TABLE, ARITHMETIC.operand)
                # An ordinary add: the tensor core's own sum keeps 14 bits.
                product = gather_terms(tl.dot(x, p), TERMS, 1, LIFT)
                one = acc[part * (4 // STEP) + index // STEP] * alpha[None, :] + product
                new = new + (one,)  # type: ignore[assignment]
        acc = new
    _store(acc, sums, peak, packed, at, work, batches, SHAPE, CODE, STEP, unit(CODE.bits, TABLE, ARITHMETIC.operand))


@triton.jit
def _store(
    acc, sums, peak, packed, at, work, batches, SHAPE: tl.constexpr, CODE: tl.constexpr, STEP: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Divides by the sum; writes output and log-sum-exp of a split."""
    WORDS: tl.constexpr = SHAPE.rank * CODE.bits // 32
    total = tl.sum(sums, 0)
    factor = UNIT / divisor(total)
    if CODE.bits == 8:
        factor *= tl.load(packed.scale + at.batch)
    out, lse = split_rows(work, at, batches, tl.num_programs(2), SHAPE)
    row = tl.arange(0, STEP * WORDS)
    word, second = row, row * 0
    if STEP == 2:  # see `_channels`
        word, second = row // 16 * 8 + row % 8, row // 8 % 2
    for part in tl.static_range(parts(CODE.bits)):
        for index in tl.static_range(0, 4, STEP):
            channel = part * (SHAPE.rank // parts(CODE.bits)) + 4 * word + index + second
            x = acc[part * (4 // STEP) + index // STEP] * factor[None, :]
            tl.store(out[None, :] + channel[:, None], x, mask=at.used[None, :])
    tl.store(lse, peak - P_SHIFT + log2_sum(total), mask=at.used)
