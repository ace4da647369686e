"""The first launch of decode: brings the query into the space of the key codes, and attends to exact tokens.

Exact are those still in the model's dtype, sinks and tail: some more splits beside those of the packed tokens.
"""

import triton
import triton.language as tl

from .hadamard import hadamard, is_power_of_two, log2
from .primitives import part_width, parts
from .scores import NO_MASK, apply_mask, lengths_now, soft_cap

EXACT_TILE = tl.constexpr(64)  # exact tokens of a split at least, and of a step where shared memory is large enough


@triton.jit
def _fine_dot(x, y, PRECISION: tl.constexpr):
    """float32 x @ y; if y is a 16-bit type, x in two terms of it."""
    if y.dtype == tl.float32:
        return tl.dot(x, y, input_precision=PRECISION)
    else:
        first = x.to(y.dtype)
        second = (x - first.to(tl.float32)).to(y.dtype)
        return tl.dot(second, y, tl.dot(first, y))


@triton.jit
def _rotate_part(q, matrix, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """q [16, channels] @ matrix.  16-bit queries: in three products of float16, for the tensor cores."""
    if EXACT:
        return _fine_dot(q, matrix, PRECISION)
    else:
        size = tl.maximum(tl.max(tl.abs(q)), 1e-30) / 256
        first = matrix.to(tl.float16)
        second = (matrix - first.to(tl.float32)).to(tl.float16)
        x = q / size
        return (_fine_dot(x, first, PRECISION) + tl.dot(x.to(tl.float16), second)) * size


@triton.jit
def _prepare_query(
    query, key_scale, rotation, smooth, center, vector, operand, factors, scaling,
    DIM: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr,
    PRECISION: tl.constexpr, used,
):  # fmt: skip
    """Brings the queries [16] of one column tile into the space of the key codes; writes operand and factors.

    The operand is [terms, columns, parts * width], at most 448; factors are that of the scores, and for each column
    the product with the centre of the keys.
    """
    PARTS: tl.constexpr = parts(BITS)
    WIDTH: tl.constexpr = part_width(DIM, BITS)
    MATRIX: tl.constexpr = rotation is not None and not is_power_of_two(DIM)
    # Columns turned at a time: what registers, and the shared memory of sm_75, hold of the matrix.
    CHUNK: tl.constexpr = min(PARTS * WIDTH, 64) if MATRIX else PARTS * WIDTH
    row, narrow = tl.arange(0, 16), tl.arange(0, CHUNK)
    channel = tl.arange(0, max(triton.next_power_of_2(DIM), 16))
    inside = channel < DIM
    q = tl.load(query[:, None] + channel[None, :], mask=used[:, None] & inside[None, :], other=0).to(tl.float32)
    shift = tl.zeros((16,), tl.float32)
    if center is not None:
        shift = tl.sum(q * tl.load(center + vector + channel, mask=inside, other=0)[None, :], 1) * scaling
    tl.store(factors + 1 + row, shift, mask=row < COLUMNS)
    if smooth is not None:
        q *= tl.load(smooth + vector + channel, mask=inside, other=0)[None, :]
    factor = scaling * UNIT
    if BITS == 8:
        factor *= tl.load(key_scale)
    turned = ()
    peak = 1e-30
    for chunk in tl.static_range(PARTS * WIDTH // CHUNK):
        column = chunk * CHUNK + narrow
        source = column // WIDTH * (DIM // PARTS) + column % WIDTH
        inner = column % WIDTH < DIM // PARTS
        if MATRIX:
            matrix = rotation + source[None, :] * DIM + channel[:, None]
            matrix = tl.load(matrix, mask=inner[None, :] & inside[:, None], other=0)
            x = _rotate_part(q, matrix, query.dtype.element_ty == tl.float32, PRECISION)
        else:
            x = tl.load(query[:, None] + source[None, :], mask=used[:, None] & inner[None, :], other=0).to(tl.float32)
            if smooth is not None:
                x *= tl.load(smooth + vector + source, mask=inner, other=0)[None, :]
            if rotation is not None:
                x *= tl.load(rotation + source, mask=inner, other=0)[None, :]
                # Bits of the column within its part, then those of the part; bits of the padding are between.
                x = hadamard(hadamard(x, 0, log2(DIM // PARTS)), log2(WIDTH), log2(WIDTH * PARTS))
        peak = tl.maximum(peak, tl.max(tl.abs(x)))
        turned = turned + (x,)
    COMPUTE: tl.constexpr = operand.dtype.element_ty
    for chunk in tl.static_range(PARTS * WIDTH // CHUNK):
        place = operand + (row * (PARTS * WIDTH))[:, None] + (chunk * CHUNK + narrow)[None, :]
        x = turned[chunk] * (448.0 / peak)
        first = x.to(COMPUTE)
        tl.store(place, first, mask=(row < COLUMNS)[:, None])
        if TERMS == 2:
            second = (x - first.to(tl.float32)).to(COMPUTE)
            tl.store(place + COLUMNS * PARTS * WIDTH, second, mask=(row < COLUMNS)[:, None])
    tl.store(factors, factor * peak / 448.0)


@triton.jit
def _attend_exact(
    query, keys, values, mask, mask_base, mask_columns, limit, out, lse, used, start, end, place, slots, scaling,
    softcap, strides,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Attention of 16 queries to tokens start .. end in the model's dtype; writes its output and log-sum-exp.

    `place` is what to add to a token's index for its place in the mask, `limit` the first place a query may not see.
    Of a ring of so many `slots`, token `place` + i lies in slot (place + i) % slots.
    """
    channel = tl.arange(0, max(triton.next_power_of_2(DIM), 16))
    value_channel = tl.arange(0, max(triton.next_power_of_2(VALUE_DIM), 16))
    q = tl.load(query[:, None] + channel[None, :], mask=used[:, None] & (channel < DIM)[None, :], other=0)
    peak, total = tl.full((16,), -1e30, tl.float32), tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, max(triton.next_power_of_2(VALUE_DIM), 16)), tl.float32)
    for first in tl.range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        inside, row = token < end, token.to(tl.int64)
        if slots is not None:
            row = ((token + place) % slots).to(tl.int64)
        k = keys + row[None, :] * strides[0] + channel[:, None]
        k = tl.load(k, mask=inside[None, :] & (channel < DIM)[:, None], other=0)
        v = values + row[:, None] * strides[1] + value_channel[None, :]
        v = tl.load(v, mask=inside[:, None] & (value_channel < VALUE_DIM)[None, :], other=0)
        s = tl.dot(q, k, input_precision=PRECISION) * scaling
        if SOFTCAP:
            s = soft_cap(s, softcap)
        if MASK == NO_MASK:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & ((token + place)[None, :] < limit[:, None])
            s = tl.where(seen, s, float("-inf"))
        else:
            s = apply_mask(s.T, mask, mask_base, mask_columns, strides[2], token + place, inside, MASK).T
            s = tl.where(inside[None, :], s, float("-inf"))
        highest = tl.maximum(peak, tl.max(s, 1))
        alpha = tl.exp2(peak - highest)
        p = tl.exp2(s - highest[:, None])
        peak, total = highest, total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + _fine_dot(p, v, PRECISION)
    acc /= tl.maximum(total, 1e-30)[:, None]
    tl.store(out[:, None] + value_channel[None, :], acc, mask=used[:, None] & (value_channel < VALUE_DIM)[None, :])
    tl.store(lse, tl.where(total > 0, peak + tl.log2(tl.maximum(total, 1e-30)), float("-inf")), mask=used)


@triton.jit(do_not_specialize=["splits", "length", "packed"])
def decode_prepare_kernel(
    query, key_scale, space, tail, sinks, mask, total, slots, work, sizes, splits, length, packed, scales, strides,
    DIMS: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr,
    FLAGS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Program 0 of a column tile prepares its queries; each other one is a split of the exact tokens.

    space = (rotation, smooth, center) of the keys, tail = (keys, values), sinks likewise or None, work = (operand,
    factors, partial, partial_lse), sizes = (sinks, residual length), splits of `packed` tokens, length of the tail,
    TILE of it at a step, scales = (scaling, soft cap), strides = (query, keys, values, sink keys, sink values, mask),
    FLAGS = (SOFTCAP, CAUSAL, MASK).  With `total`, int64 on the device, it says how long the tail is, which is then a
    ring of `slots`.
    """
    TILES: tl.constexpr = (GROUP * QUERIES + COLUMNS - 1) // COLUMNS
    DIM: tl.constexpr = DIMS[0]
    VALUE_DIM: tl.constexpr = DIMS[1]
    batch, kv_head = tl.program_id(2).to(tl.int64), (tl.program_id(1) // TILES).to(tl.int64)
    tile = tl.program_id(1) % TILES
    pair = batch * (tl.num_programs(1) // TILES) + kv_head
    column = tile * COLUMNS + tl.arange(0, 16)
    used = (tl.arange(0, 16) < COLUMNS) & (column < GROUP * QUERIES)
    column = tl.where(used, column, 0)
    head = kv_head * GROUP + column // QUERIES
    query += batch * strides[0][0] + head * strides[0][1] + column % QUERIES * strides[0][2]
    if tl.program_id(0) == 0:
        index = pair * TILES + tile
        size: tl.constexpr = parts(BITS) * TERMS * COLUMNS * part_width(DIM, BITS)
        _prepare_query(
            query, key_scale + pair, space[0], space[1], space[2], pair * DIM, work[0] + index * size,
            work[1] + index * (1 + COLUMNS), scales[0], DIM, BITS, UNIT, COLUMNS, TERMS, PRECISION, used,
        )  # fmt: skip
    else:
        split = tl.program_id(0) - 1
        tail_splits = tl.num_programs(0) - (1 if sinks is None else 2)
        row = ((pair * (splits + tl.num_programs(0) - 1) + splits + split) * GROUP * QUERIES).to(tl.int64) + column
        mask_columns = batch * strides[5][0] + head * strides[5][1] + column % QUERIES * strides[5][2]
        length, packed = lengths_now(total, length, packed, sizes[1])
        limit = sizes[0] + packed + length - QUERIES + 1 + column % QUERIES
        span = tl.cdiv(tl.cdiv(length, EXACT_TILE), tl.maximum(tail_splits, 1)) * EXACT_TILE
        start = split * span
        end, place = tl.minimum(start + span, length), packed + sizes[0]
        k = tail[0] + batch * strides[1][0] + kv_head * strides[1][1]
        v = tail[1] + batch * strides[2][0] + kv_head * strides[2][1]
        steps = (tl.full((), 0, tl.int64) + strides[1][2], tl.full((), 0, tl.int64) + strides[2][2])
        if sinks is not None:
            if split == tail_splits:  # the last one takes the sinks
                start, end, place = start * 0, end * 0 + sizes[0], place * 0
                k = sinks[0] + batch * strides[3][0] + kv_head * strides[3][1]
                v = sinks[1] + batch * strides[4][0] + kv_head * strides[4][1]
                steps = (tl.full((), 0, tl.int64) + strides[3][2], tl.full((), 0, tl.int64) + strides[4][2])
        _attend_exact(
            query, k, v, mask, batch * strides[5][0], mask_columns, limit, work[2] + row * VALUE_DIM, work[3] + row,
            used, start, end, place, slots, scales[0], scales[1], (steps[0], steps[1], strides[5][3]), DIM, VALUE_DIM,
            FLAGS[0], FLAGS[1], FLAGS[2], PRECISION, TILE,
        )  # fmt: skip
    if PDL:  # at the end: programs of the next launch would take the places of some of this one
        tl.extra.cuda.gdc_launch_dependents()
