"""Decode attention over a packed cache: up to 16 query tokens per sequence, split along the cached tokens.

Scores are computed transposed, tokens on M and the queries of one KV head (all heads of its group) on N:

    S^T[tokens, group] = K[tokens, D] . Q^T[D, group]        O^T[D, group] += V^T[D, tokens] . P^T[tokens, group]

so each packed byte is read and decoded once for the whole group, and codes, turned into e4m3 bytes in registers, go to
the fp8 tensor cores in the order in which they lie.  A tile of tokens is processed in the parts in which value rows
are packed (`primitives.parts`): the score rows of a part are gathered in the order of its value columns.

Three launches.  The first brings the query into the space of the key codes, and attends to the tokens that are still
in the model's dtype (sinks and tail), which gives some more splits; the second attends to the packed tokens; the third
undoes rotation and centre of the values in the sum of the packed splits, and joins it with the exact ones.

Query columns of a KV head are head after head, `QUERIES` of each, in tiles of `COLUMNS`.  Scores are in base 2.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .primitives import (
    BLOCK_TOKENS,
    decode_part,
    exp2,
    gather_terms,
    keep_tables,
    load_keys,
    load_scales,
    load_values,
    parts,
    rough_log2,
    spread_terms,
    to_places,
    to_rows,
    unit,
)
from .tuning import Config, choose, choose_splits

LOG2E = tl.constexpr(1.4426950408889634)
P_SHIFT = tl.constexpr(7.5)  # probabilities times 2**7.5, at most 2**7.6 with `rough_log2`, to use the range of e4m3
LIFT = tl.constexpr(32.0)  # of the remainder of p: half a step at 2**7.6 is 8, times 32 still in range
EXACT_TILE = tl.constexpr(64)  # exact tokens of a step
MAX_QUERIES = 16
NO_MASK, ROW_MASK, FULL_MASK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # one for all columns, or by column
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DTYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float16: tl.float16, torch.float32: tl.float32}

# --- Scores -----------------------------------------------------------------------------------------------------------


@triton.constexpr_function
def part_width(head_dim, bits):
    """Columns of one part of a key row, padded: 32 is the least contraction of an fp8 dot."""
    return max(triton.next_power_of_2(head_dim // parts(bits)), 32)


@triton.jit
def soft_cap(s, softcap):
    """softcap * tanh(s / softcap) of scores in base 2."""
    x = s / (softcap * LOG2E)
    t = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    tanh = tl.where(x < 0, t - 1, 1 - t) / (1 + t)
    y = x * x  # near 0 the difference above would cancel
    near = x * (1 - y * (0.33333333 - y * (0.13333333 - y * 0.053968254)))
    return tl.where(y < 0.04, near, tanh) * (softcap * LOG2E)


@triton.jit
def _apply_mask(s, mask, base, columns, stride, place, inside, MASK: tl.constexpr):
    """Adds a float mask to scores [tokens, columns] of tokens `place`; a mask of bytes hides where it is 0.

    `base` is where one mask for all columns begins, `columns` where those of each column do.
    """
    if MASK == NO_MASK:
        return s
    else:
        if MASK == ROW_MASK:
            m = tl.load(mask + base + place * stride, mask=inside, other=0)[:, None]
        else:
            m = tl.load(mask + columns[None, :] + (place * stride)[:, None], mask=inside[:, None], other=0)
        if m.dtype == tl.uint8:
            return tl.where(m != 0, s, float("-inf"))
        else:
            return s + m.to(tl.float32) * LOG2E


# --- First launch: the query, and attention to exact tokens ----------------------------------------------------------


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
    DIM: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr, used,
):  # fmt: skip
    """Brings the queries [16] of one column tile into the space of the key codes; writes operand and factors.

    The operand is [parts, terms, columns, width], at most 448; factors are that of the scores, and for each column
    the product with the centre of the keys.
    """
    PARTS: tl.constexpr = parts(BITS)
    WIDTH: tl.constexpr = part_width(DIM, BITS)
    row, narrow = tl.arange(0, 16), tl.arange(0, WIDTH)
    channel = tl.arange(0, max(triton.next_power_of_2(DIM), 16))
    inside = channel < DIM
    q = tl.load(query[:, None] + channel[None, :], mask=used[:, None] & inside[None, :], other=0).to(tl.float32)
    shift = tl.zeros((16,), tl.float32)
    if center is not None:
        shift = tl.sum(q * tl.load(center + vector + channel, mask=inside, other=0)[None, :], 1) * scaling
    tl.store(factors + 1 + row, shift, mask=row < COLUMNS)
    if smooth is not None:
        q *= tl.load(smooth + vector + channel, mask=inside, other=0)[None, :]
    turned = ()
    peak = 1e-30
    for part in tl.static_range(PARTS):
        source = part * (DIM // PARTS) + narrow
        inner = narrow < DIM // PARTS
        if rotation is not None:
            matrix = rotation + source[None, :] * DIM + channel[:, None]
            matrix = tl.load(matrix, mask=inner[None, :] & inside[:, None], other=0)
            x = _rotate_part(q, matrix, query.dtype.element_ty == tl.float32, PRECISION)
        else:
            x = tl.load(query[:, None] + source[None, :], mask=used[:, None] & inner[None, :], other=0).to(tl.float32)
            if smooth is not None:
                x *= tl.load(smooth + vector + source, mask=inner, other=0)[None, :]
        peak = tl.maximum(peak, tl.max(tl.abs(x)))
        turned = turned + (x,)
    COMPUTE: tl.constexpr = operand.dtype.element_ty
    for part in tl.static_range(PARTS):
        place = operand + (part * TERMS * COLUMNS + row)[:, None] * WIDTH + narrow[None, :]
        x = turned[part] * (448.0 / peak)
        first = x.to(COMPUTE)
        tl.store(place, first, mask=(row < COLUMNS)[:, None])
        if TERMS == 2:
            second = (x - first.to(tl.float32)).to(COMPUTE)
            tl.store(place + COLUMNS * WIDTH, second, mask=(row < COLUMNS)[:, None])
    factor = scaling * UNIT * peak / 448.0
    if BITS == 8:
        factor *= tl.load(key_scale)
    tl.store(factors, factor)


@triton.jit
def _attend_exact(
    query, keys, values, mask, mask_base, mask_columns, limit, out, lse, used, start, end, place, scaling, softcap, strides,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of 16 queries to tokens start .. end in the model's dtype; writes its output and log-sum-exp.

    `place` is what to add to a token's index for its place in the mask, `limit` the first place a query may not see.
    """
    channel = tl.arange(0, max(triton.next_power_of_2(DIM), 16))
    value_channel = tl.arange(0, max(triton.next_power_of_2(VALUE_DIM), 16))
    q = tl.load(query[:, None] + channel[None, :], mask=used[:, None] & (channel < DIM)[None, :], other=0)
    peak, total = tl.full((16,), -1e30, tl.float32), tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, max(triton.next_power_of_2(VALUE_DIM), 16)), tl.float32)
    for first in tl.range(start, end, EXACT_TILE, num_stages=1):
        token = first + tl.arange(0, EXACT_TILE)
        inside, row = token < end, token.to(tl.int64)
        k = keys + row[None, :] * strides[0] + channel[:, None]
        k = tl.load(k, mask=inside[None, :] & (channel < DIM)[:, None], other=0)
        s = tl.dot(q, k, input_precision=PRECISION) * scaling
        v = values + row[:, None] * strides[1] + value_channel[None, :]
        v = tl.load(v, mask=inside[:, None] & (value_channel < VALUE_DIM)[None, :], other=0)
        if SOFTCAP:
            s = soft_cap(s, softcap)
        if MASK == NO_MASK:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & ((token + place)[None, :] < limit[:, None])
            s = tl.where(seen, s, float("-inf"))
        else:
            s = _apply_mask(s.T, mask, mask_base, mask_columns, strides[2], token + place, inside, MASK).T
            s = tl.where(inside[None, :], s, float("-inf"))
        highest = tl.maximum(peak, tl.max(s, 1))
        alpha = tl.exp2(peak - highest)
        p = tl.exp2(s - highest[:, None])
        peak, total = highest, total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + _fine_dot(p, v, PRECISION)
    acc /= tl.maximum(total, 1e-30)[:, None]
    tl.store(out[:, None] + value_channel[None, :], acc, mask=used[:, None] & (value_channel < VALUE_DIM)[None, :])
    tl.store(lse, tl.where(total > 0, peak + tl.log2(tl.maximum(total, 1e-30)), float("-inf")), mask=used)


@triton.jit
def _decode_prepare_kernel(
    query, key_scale, rotation, smooth, center, keys, values, sinks, mask, operand, factors, partial, partial_lse,
    sizes, scales, strides,
    DIMS: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr,
    FLAGS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program 0 of a column tile prepares its queries; each other one is a split of the exact tokens.

    sizes = (packed splits, all splits, sinks, tail, packed tokens, tokens of a split), scales = (scaling, soft cap),
    strides = (query, keys, values, sink keys, sink values, mask), FLAGS = (SOFTCAP, CAUSAL, MASK).
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
            query, key_scale + pair, rotation, smooth, center, pair * DIM, operand + index * size, factors + index * (1 + COLUMNS),
            scales[0], DIM, BITS, UNIT, COLUMNS, TERMS, PRECISION, used,
        )  # fmt: skip
    else:
        split = tl.program_id(0) - 1
        row = ((pair * sizes[1] + sizes[0] + split) * GROUP * QUERIES).to(tl.int64) + column
        mask_columns = batch * strides[5][0] + head * strides[5][1] + column % QUERIES * strides[5][2]
        limit = sizes[2] + sizes[4] + sizes[3] - QUERIES + 1 + column % QUERIES
        start = split * sizes[5]
        end, shift = tl.minimum(start + sizes[5], sizes[3]), sizes[4] + sizes[2]
        k = keys + batch * strides[1][0] + kv_head * strides[1][1]
        v = values + batch * strides[2][0] + kv_head * strides[2][1]
        steps = (tl.full((), 0, tl.int64) + strides[1][2], tl.full((), 0, tl.int64) + strides[2][2])
        if sinks is not None:
            if split == tl.num_programs(0) - 2:  # the last one takes the sinks
                start, end, shift = start * 0, end * 0 + sizes[2], shift * 0
                k = sinks[0] + batch * strides[3][0] + kv_head * strides[3][1]
                v = sinks[1] + batch * strides[4][0] + kv_head * strides[4][1]
                steps = (tl.full((), 0, tl.int64) + strides[3][2], tl.full((), 0, tl.int64) + strides[4][2])
        _attend_exact(
            query, k, v, mask, batch * strides[5][0], mask_columns, limit, partial + row * VALUE_DIM, partial_lse + row, used, start, end, shift,
            scales[0], scales[1], (steps[0], steps[1], strides[5][3]), DIM, VALUE_DIM, FLAGS[0], FLAGS[1], FLAGS[2],
            PRECISION,
        )  # fmt: skip


# --- Second launch: attention to packed tokens ------------------------------------------------------------------------


@triton.jit
def _load_operand(operand, WIDTH: tl.constexpr, PARTS: tl.constexpr, N: tl.constexpr):
    """The query, [WIDTH, N] for each part of a key row."""
    parts_ = ()
    for part in tl.static_range(PARTS):
        parts_ = parts_ + (
            tl.load(operand + (part * N + tl.arange(0, N)[None, :]) * WIDTH + tl.arange(0, WIDTH)[:, None]),
        )
    return parts_


@triton.jit
def _packed_scores(
    q, keys, scale, shift, softcap,
    KEY: tl.constexpr, SOFTCAP: tl.constexpr, TERMS: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scores [ROWS, COLUMNS] of decoded key rows; `scale` [ROWS] is their factor."""
    BITS: tl.constexpr = KEY[0]
    TABLE: tl.constexpr = KEY[1]
    s = tl.zeros((ROWS, COLUMNS * TERMS), tl.float32)
    for k in tl.static_range(parts(BITS)):
        rows = decode_part(keys, k, BITS, TABLE, COMPUTE, PTX)
        s = tl.dot(rows, q[k], s, input_precision=PRECISION)
    s = gather_terms(s, TERMS, 1) * scale[:, None]
    if SOFTCAP:
        s = soft_cap(s + shift[None, :], softcap)
    return s


@triton.jit
def _store_split(
    out, total, zeros, peak, shift, scale, partial, partial_lse, used,
    VALUE_DIM: tl.constexpr, TERMS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Divides by the sum; writes output and log-sum-exp of a split."""
    total = tl.sum(total, 0)
    out = gather_terms(out, TERMS, LIFT) * scale
    out = (out + tl.sum(zeros, 0)[None, :]) / tl.maximum(total, 1e-30)[None, :]
    lse = tl.where(total > 0, peak + shift - P_SHIFT + tl.log2(tl.maximum(total, 1e-30)), float("-inf"))
    channel = tl.arange(0, CHANNELS)
    tl.store(partial[None, :] + channel[:, None], out, mask=used[None, :] & (channel < VALUE_DIM)[:, None])
    tl.store(partial_lse, lse, mask=used)


@triton.jit
def _decode_split_kernel(
    operand, factors, key, value, mask, lengths, partial, partial_lse, sizes, softcap, strides,
    DIMS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr,
    FLAGS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr,
    PRECISION: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """One program = one split of the packed tokens of one sequence and KV head, for a tile of its query columns.

    key = (packed, scale), value = (packed, scale[, zero]), sizes = (packed tokens, blocks, sinks, all tokens, all
    splits), strides = (key, key scale, value, value scale, mask), KEY and VALUE = (bits, table), FLAGS = (SOFTCAP,
    CAUSAL, MASK), LAUNCH = (tokens of a tile, warps, loads need a mask).
    """
    SOFTCAP: tl.constexpr = FLAGS[0]
    CAUSAL: tl.constexpr = FLAGS[1]
    MASK: tl.constexpr = FLAGS[2]
    TILE: tl.constexpr = LAUNCH[0]
    MASKED: tl.constexpr = LAUNCH[2]
    KEY_BITS: tl.constexpr = KEY[0]
    VALUE_BITS: tl.constexpr = VALUE[0]
    KEY_TABLE: tl.constexpr = KEY[1]
    VALUE_TABLE: tl.constexpr = VALUE[1]
    VALUE_PARTS: tl.constexpr = parts(VALUE_BITS)
    DIM: tl.constexpr = DIMS[0]
    WIDTH: tl.constexpr = part_width(DIM, KEY_BITS)
    CHANNELS: tl.constexpr = max(triton.next_power_of_2(DIMS[1]), 64)
    ROWS: tl.constexpr = TILE // VALUE_PARTS  # score rows of a part
    SPAN: tl.constexpr = BLOCK_TOKENS // VALUE_PARTS  # of them, those of one block
    REPEATS: tl.constexpr = max(ROWS // 16 // LAUNCH[1], 1)
    SLOTS: tl.constexpr = ROWS // (16 * REPEATS)
    N: tl.constexpr = COLUMNS * TERMS
    TILES: tl.constexpr = (GROUP * QUERIES + COLUMNS - 1) // COLUMNS

    batch, kv_head = tl.program_id(2).to(tl.int64), (tl.program_id(1) // TILES).to(tl.int64)
    pair, first_column = batch * (tl.num_programs(1) // TILES) + kv_head, tl.program_id(1) % TILES * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    tokens, blocks = sizes[0], sizes[1]
    if lengths is not None:
        tokens = tl.minimum(tl.load(lengths + batch), tokens)
    if PTX:
        keep_tables(tokens, KEY_TABLE, VALUE_TABLE)
    index = batch * tl.num_programs(1) + tl.program_id(1)
    q = _load_operand(operand + index * (parts(KEY_BITS) * N * WIDTH), WIDTH, parts(KEY_BITS), N)
    factor = tl.load(factors + index * (1 + COLUMNS))
    offset = tl.load(factors + index * (1 + COLUMNS) + 1 + tl.arange(0, COLUMNS))
    limit = sizes[3] - sizes[2] - QUERIES + 1 + column % QUERIES  # packed tokens that a column may see
    key_packed = key[0] + batch * strides[0][0] + kv_head * strides[0][1]
    key_scale = key[1] + batch * strides[1][0] + kv_head * strides[1][1]
    value_packed = value[0] + batch * strides[2][0] + kv_head * strides[2][1]
    value_scale = value[1] + batch * strides[3][0] + kv_head * strides[3][1]
    mask_base = batch * strides[4][0]
    mask_columns = tl.where(column < GROUP * QUERIES, column, 0)
    mask_head = kv_head * GROUP + mask_columns // QUERIES
    mask_columns = mask_base + mask_head * strides[4][1] + mask_columns % QUERIES * strides[4][2]

    place = tl.arange(0, ROWS)  # along a value row; `to_rows` gives the score row
    place = place // SPAN * BLOCK_TOKENS + place % SPAN
    peak = tl.full((COLUMNS,), -1e30, tl.float32)  # finite: exp2(-inf - peak) is 0 even where all is masked
    total = tl.zeros((ROWS, COLUMNS), tl.float32)  # summed over its rows at the end, like `zeros`
    zeros = tl.zeros((ROWS, COLUMNS), tl.float32)
    out = tl.zeros((CHANNELS, N), tl.float32)
    tiles = tl.cdiv(tokens, TILE)
    per_split = tl.cdiv(tiles, tl.num_programs(0))
    for tile in range(tl.program_id(0) * per_split, tl.minimum((tl.program_id(0) + 1) * per_split, tiles)):
        # The last tile is moved back so that no load passes the last block; what it repeats is masked out.
        first = tile * TILE
        start = first if MASKED else tl.minimum(first, blocks * BLOCK_TOKENS - TILE)
        values = load_values(value_packed, start, blocks, VALUE_BITS, DIMS[1], TILE, CHANNELS, MASKED)
        scores, scales, shifts = (), (), ()
        highest = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
        for part in tl.static_range(VALUE_PARTS):
            along = place + part * SPAN
            row = to_rows(along, SLOTS, REPEATS)
            if len(value) == 3:
                zero = value[2] + batch * strides[3][0] + kv_head * strides[3][1]
                shifts = shifts + (load_scales(zero, start, along, blocks, SLOTS, REPEATS, MASKED),)
            keys = load_keys(key_packed, start, row, blocks, KEY_BITS, DIM, WIDTH, MASKED)
            scale = tl.full((ROWS,), 1.0, tl.float32)
            if KEY_BITS != 8:
                scale = load_scales(key_scale, start, along, blocks, SLOTS, REPEATS, MASKED)
            s = _packed_scores(
                q, keys, scale * factor, offset, softcap, KEY, SOFTCAP, TERMS, COMPUTE, PTX, PRECISION, ROWS, COLUMNS
            )
            new = (start - first + row).to(tl.uint32, bitcast=True) < (tokens - first).to(tl.uint32, bitcast=True)
            s = _apply_mask(s, mask, mask_base, mask_columns, strides[4][3], sizes[2] + start + row, new, MASK)
            s += tl.where(new, 0.0, float("-inf"))[:, None]
            if CAUSAL:
                s = tl.where((start + row)[:, None] < limit[None, :], s, float("-inf"))
            scores = scores + (s,)
            if VALUE_BITS != 8:
                # The reference is the largest p * scale, not the largest p, so that p * scale suits e4m3.
                scale = tl.maximum(load_scales(value_scale, start, along, blocks, SLOTS, REPEATS, MASKED), 1e-7)
                scales = scales + (scale,)
                s += rough_log2(scale)[:, None]
            highest = tl.maximum(highest, s)
        previous = peak
        peak = tl.maximum(peak, tl.max(highest, 0))
        alpha = exp2(previous - peak, PTX)
        total *= alpha[None, :]
        zeros *= alpha[None, :]
        operands = ()
        for part in tl.static_range(VALUE_PARTS):
            p = exp2(scores[part] - (peak - P_SHIFT)[None, :], PTX)
            total += p
            if len(value) == 3:
                zeros += p * shifts[part][:, None]
            if VALUE_BITS != 8:
                p = p * scales[part][:, None]
            operands = operands + (spread_terms(to_places(p, SLOTS, REPEATS), TERMS, LIFT, COMPUTE),)
        tile_out = tl.zeros((CHANNELS, N), tl.float32)
        for part in tl.static_range(VALUE_PARTS):
            channels = decode_part(values, part, VALUE_BITS, VALUE_TABLE, COMPUTE, PTX)
            tile_out = tl.dot(channels, operands[part], tile_out, input_precision=PRECISION)
        if TERMS == 2:
            alpha = tl.join(alpha, alpha).permute(1, 0).reshape(N)
        out = out * alpha[None, :] + tile_out  # an ordinary add: the tensor core's own sum keeps 14 bits

    if SOFTCAP:
        offset = tl.zeros((COLUMNS,), tl.float32)  # is in the scores
    value_factor = unit(VALUE_BITS, VALUE_TABLE, COMPUTE)
    if VALUE_BITS == 8:
        value_factor *= tl.load(value_scale)
    index = ((pair * sizes[4] + tl.program_id(0)) * GROUP * QUERIES) + column
    _store_split(
        out, total, zeros, peak, offset, value_factor, partial + index * DIMS[1], partial_lse + index,
        column < GROUP * QUERIES, DIMS[1], TERMS, CHANNELS,
    )  # fmt: skip


# --- Third launch: the splits together --------------------------------------------------------------------------------


@triton.jit
def _decode_merge_kernel(
    partial, partial_lse, rotation, center, s_aux, out, lse, sizes, strides,
    DIM: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program = one query of one head of one sequence.  sizes = (packed splits, all splits, H_q)."""
    index = tl.program_id(0).to(tl.int64)  # over B, H_q, S
    COLUMNS: tl.constexpr = GROUP * QUERIES
    CHANNELS: tl.constexpr = triton.next_power_of_2(DIM)
    pair = index // COLUMNS
    split, channel = tl.arange(0, SPLITS), tl.arange(0, CHANNELS)
    row = (pair * sizes[1] + split) * COLUMNS + index % COLUMNS
    used, inside = split < sizes[1], channel < DIM
    part = tl.load(partial_lse + row, mask=used, other=float("-inf"))
    peak = tl.maximum(tl.max(part), -1e30)
    weight = tl.exp2(part - peak)
    total = tl.sum(weight)
    x = tl.load(partial + row[:, None] * DIM + channel[None, :], mask=used[:, None] & inside[None, :], other=0)
    packed = tl.where(split < sizes[0], weight, 0.0)
    sum_packed = tl.sum(x * packed[:, None], 0)
    exact = tl.sum(x * (weight - packed)[:, None], 0)
    if rotation is not None:  # x @ rotation, which undoes x @ rotation.T
        matrix = rotation + channel[:, None] * DIM + channel[None, :]
        matrix = tl.load(matrix, mask=inside[:, None] & inside[None, :], other=0)
        sum_packed = tl.sum(sum_packed[:, None] * matrix, 0)
    if center is not None:
        sum_packed += tl.load(center + pair * DIM + channel, mask=inside, other=0) * tl.sum(packed)
    result = sum_packed + exact
    if s_aux is not None:  # one more logit, which gives nothing
        head = index // QUERIES
        logit = s_aux + head // sizes[2] * strides[0] + head % sizes[2] * strides[1] + index % QUERIES * strides[2]
        logit = tl.load(logit).to(tl.float32) * LOG2E
        highest = tl.maximum(peak, logit)
        alpha = tl.exp2(peak - highest)
        peak, total, result = highest, total * alpha + tl.exp2(logit - highest), result * alpha
    result /= tl.maximum(total, 1e-30)
    tl.store(out + index * DIM + channel, result.to(out.dtype.element_ty), mask=inside)
    natural = (peak + tl.log2(tl.maximum(total, 1e-30))) / LOG2E
    tl.store(lse + index, tl.where(total > 0, natural, float("-inf")))


# --- Launchers --------------------------------------------------------------------------------------------------------


class Path(NamedTuple):
    """How a device computes: the type that goes to the dots, inline assembly or not, and how float32 is multiplied."""

    compute: torch.dtype
    ptx: bool = False
    precision: str = "ieee"


def choose_path(query: torch.Tensor) -> Path:
    """fp8 tensor cores where e4m3 is native (float16 else); float32 for float32 queries.

    The inline assembly decodes four neighbouring bytes, which only the operands of fp8 dots keep together.
    """
    nvidia = query.is_cuda and torch.version.hip is None
    capability = torch.cuda.get_device_capability(query.device) if nvidia else (0, 0)
    precision = "tf32x3" if capability >= (8, 0) else "ieee"
    if query.dtype == torch.float32:
        return Path(torch.float32, False, precision)
    native = capability >= (8, 9)
    return Path(torch.float8_e4m3fn if native else torch.float16, native, precision)


def code_table(magnitudes: tuple[float, ...]) -> tuple[int, int]:
    """The eight table bytes of a symmetric codebook whose magnitudes are exact in e4m3, as two 32-bit words.

    Eight magnitudes (4 bits) keep their sign apart; four or two (3 or 2 bits) are followed by their negatives.
    """
    values = magnitudes if len(magnitudes) == 8 else (*magnitudes, *(-m for m in magnitudes))
    codes = torch.tensor(values, dtype=torch.float8_e4m3fn).view(torch.uint8).tolist()
    codes += [0] * (8 - len(codes))
    return int.from_bytes(codes[:4], "little"), int.from_bytes(codes[4:], "little")


class _Shape(NamedTuple):
    """What the launches share: sizes, splits and flags."""

    batch: int
    heads: int
    queries: int
    kv_heads: int
    dims: tuple[int, int]  # of keys and values
    sinks: int
    packed: int
    tail: int
    columns: int  # of a tile
    terms: int
    splits: int  # of the packed tokens
    exact_tokens: int  # of one split of the tail
    exact: int  # splits of tail and sinks

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def pairs(self) -> int:
        return self.batch * self.kv_heads

    @property
    def tiles(self) -> int:
        return triton.cdiv(self.group * self.queries, self.columns)

    @property
    def all_splits(self) -> int:
        return self.splits + self.exact

    @property
    def grid(self) -> tuple[int, int]:
        return self.kv_heads * self.tiles, self.batch

    @property
    def options(self) -> dict:
        return dict(
            DIMS=self.dims, GROUP=self.group, QUERIES=self.queries, COLUMNS=self.columns, TERMS=self.terms
        )  # fmt: skip


class _Mask(NamedTuple):
    tensor: torch.Tensor | None
    strides: tuple[int, ...]
    kind: int


def decode(
    query: torch.Tensor, key: tuple[torch.Tensor, torch.Tensor], value: tuple[torch.Tensor, ...],
    keys: torch.Tensor, values: torch.Tensor, *, packed_length: int, scaling: float,
    key_code: tuple[int, tuple[int, int]], value_code: tuple[int, tuple[int, int]],
    sinks: tuple[torch.Tensor, torch.Tensor] | None = None,
    rotations: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None), smooth: torch.Tensor | None = None,
    centers: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None), mask: torch.Tensor | None = None,
    softcap: float | None = None, s_aux: torch.Tensor | None = None, causal: bool = True,
    lengths: torch.Tensor | None = None, path: Path | None = None, config: Config | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of up to 16 query tokens per sequence to sinks, packed tokens and a tail, in this order.

    query [B, H_q, S, D]; key = (packed, scale) and value = (packed, scale[, zero]) as in kernels/README.md; keys and
    values [B, H_kv, n, D], the tail, and sinks likewise, in the query's dtype, n >= 0.  A code is (bits, table):
    `code_table` of the codebook, (0, 0) for e4m3, (5, 0) for e5m2.  rotations float32 [D, D], smooth and centers
    float32 [B, H_kv, 1, D], of keys and values.  mask, softcap and s_aux ([1 or B, H_q, 1 or S]) as in
    `reference.attend`; causal counts without a mask.  lengths int32 [B]: packed tokens of each row, if fewer.

    Returns out [B, H_q, S, D_v] in the query's dtype, and the natural log-sum-exp, float32 [B, H_q, S].
    """
    _check(query, key, value, keys, values, packed_length, mask)
    path = path or choose_path(query)
    config = config or choose(value_code[0], path.compute == torch.float8_e4m3fn)
    shape = _shape(query, keys, values, 0 if sinks is None else sinks[0].shape[2], packed_length, path, config, splits)
    masked = _describe(mask, shape)
    flags = (softcap is not None, causal and mask is None and shape.queries > 1, masked.kind)
    new = query.new_empty
    width = parts(key_code[0]) * shape.terms * shape.columns * part_width(shape.dims[0], key_code[0])
    operand = new(shape.pairs * shape.tiles, width, dtype=path.compute)
    factors = new(shape.pairs * shape.tiles, 1 + shape.columns, dtype=torch.float32)
    columns = shape.group * shape.queries
    partial = new(shape.pairs, shape.all_splits, columns, shape.dims[1], dtype=torch.float32)
    partial_lse = new(shape.pairs, shape.all_splits, columns, dtype=torch.float32)
    work = (operand, factors, partial, partial_lse)
    scales = (scaling * LOG2E.value, softcap or 0.0)
    space = (key[1], rotations[0], smooth, centers[0])
    _launch_prepare(shape, work, query, space, (keys, values), sinks, masked, scales, flags, key_code, path)
    _launch_split(shape, work, key, value, masked, lengths, softcap or 0.0, flags, (key_code, value_code), path, config)
    return _launch_merge(shape, work, query, (rotations[1], centers[1]), s_aux)


def _launch_prepare(shape, work, query, space, tail, sinks, masked, scales, flags, key_code, path):
    operand, factors, partial, partial_lse = work
    sinks = sinks if shape.sinks else None
    strides = tuple(x.stride()[:3] for x in (query, *tail, *(sinks or tail))) + (masked.strides,)
    sizes = (shape.splits, shape.all_splits, shape.sinks, shape.tail, shape.packed, shape.exact_tokens)
    _decode_prepare_kernel[(1 + shape.exact, *shape.grid)](
        query, *space, *tail, sinks, masked.tensor, operand, factors, partial, partial_lse, sizes, scales, strides,
        BITS=key_code[0], UNIT=unit(*key_code, DTYPES[operand.dtype]), FLAGS=flags, PRECISION=path.precision,
        num_warps=8 if shape.dims[0] > 128 else 4, **shape.options,
    )  # fmt: skip


def _launch_split(shape, work, key, value, masked, lengths, softcap, flags, codes, path, config):
    # Where the tail holds all tokens that some query may not see, the packed ones need no causal mask.
    flags = (flags[0], flags[1] and shape.tail < shape.queries - 1, flags[2])
    blocks = key[0].shape[2]
    sizes = (shape.packed, blocks, shape.sinks, shape.sinks + shape.packed + shape.tail, shape.all_splits)
    strides = tuple(x.stride()[:2] for x in (key[0], key[1], value[0], value[1])) + (masked.strides,)
    registers = {} if config.registers is None or not path.ptx else {"maxnreg": config.registers}
    _decode_split_kernel[(shape.splits, *shape.grid)](
        *work[:2], key, value, masked.tensor, lengths, *work[2:], sizes, softcap, strides, KEY=codes[0],
        VALUE=codes[1], FLAGS=flags, COMPUTE=DTYPES[path.compute], PTX=path.ptx,
        PRECISION=path.precision,
        LAUNCH=(config.tile, config.warps, blocks * BLOCK_TOKENS.value < config.tile), num_warps=config.warps,
        num_stages=config.stages, **registers, **shape.options,
    )  # fmt: skip


def _launch_merge(shape, work, query, space, s_aux):
    out = query.new_empty(shape.batch, shape.heads, shape.queries, shape.dims[1])
    lse = query.new_empty(shape.batch, shape.heads, shape.queries, dtype=torch.float32)
    if s_aux is not None:
        s_aux = s_aux.expand(*lse.shape)
    _decode_merge_kernel[(lse.numel(),)](
        *work[2:], *space, s_aux, out, lse, (shape.splits, shape.all_splits, shape.heads),
        (0, 0, 0) if s_aux is None else s_aux.stride(), DIM=shape.dims[1], GROUP=shape.group, QUERIES=shape.queries,
        SPLITS=triton.next_power_of_2(shape.all_splits), num_warps=4,
    )  # fmt: skip
    return out, lse


def _shape(query, keys, values, sinks, packed, path, config, splits):
    batch, heads, queries, dim = query.shape
    kv_heads, tail = keys.shape[1:3]
    fp8 = path.compute == torch.float8_e4m3fn
    columns = 8 if heads // kv_heads * queries <= 8 and fp8 else 16
    steps = triton.cdiv(tail, EXACT_TILE.value)
    per_split = triton.cdiv(steps, 8)  # at most 8 splits
    if splits is None:
        programs = batch * kv_heads * triton.cdiv(heads // kv_heads * queries, columns)
        splits = choose_splits(config, programs, packed, _multiprocessors(query.device))
    exact = (triton.cdiv(steps, per_split) if steps else 0) + (sinks > 0)
    return _Shape(
        batch, heads, queries, kv_heads, (dim, values.shape[3]), sinks, packed, tail, columns, 2 if fp8 else 1,
        splits, per_split * EXACT_TILE.value, exact,
    )  # fmt: skip


def _describe(mask, shape):
    if mask is None:
        return _Mask(None, (0, 0, 0, 0), NO_MASK.value)
    kind = ROW_MASK if mask.shape[1] == 1 and shape.queries == 1 else FULL_MASK
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    mask = mask.expand(shape.batch, shape.heads, shape.queries, mask.shape[3])
    return _Mask(mask, mask.stride(), kind.value)


def _check(query, key, value, keys, values, packed_length, mask):
    """Raise ValueError, with what was given, on what the kernels would read wrongly."""
    batch, heads, queries, dim = query.shape
    kv_heads, blocks = key[0].shape[1:3]
    length = blocks * BLOCK_TOKENS.value
    if not 0 < queries <= MAX_QUERIES:
        raise ValueError(f"expected 1 to {MAX_QUERIES} queries, got {queries}; prefill takes more")
    if heads % kv_heads or keys.shape[:2] != (batch, kv_heads) or keys.shape[3] != dim:
        raise ValueError(f"expected keys [{batch}, a divisor of {heads}, n, {dim}], got {list(keys.shape)}")
    if not 0 < packed_length <= length:
        raise ValueError(f"expected 1 to {length} packed tokens, got {packed_length}")
    if keys.dtype != query.dtype or values.dtype != query.dtype or query.dtype not in QUERY_DTYPES:
        raise ValueError(f"expected one of {QUERY_DTYPES} throughout, got {query.dtype}, {keys.dtype}, {values.dtype}")
    if any(x.stride(-1) != 1 for x in (query, keys, values, *key, *value) if x.dim() > 2):
        raise ValueError("expected tensors whose last dimension is contiguous")
    total = packed_length + keys.shape[2]
    if mask is not None and (mask.dim() != 4 or mask.shape[2] != queries or mask.shape[3] < total):
        raise ValueError(f"expected a mask [B, H, {queries}, {total} or more], got {list(mask.shape)}")


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
