"""Decode attention to packed tokens: one split of one sequence and KV head, for a tile of its query columns.

Scores are computed transposed, tokens on M and the queries of one KV head (all heads of its group) on N:

    S^T[tokens, group] = K[tokens, D] . Q^T[D, group]        O^T[D, group] += V^T[D, tokens] . P^T[tokens, group]

so each packed byte is read and decoded once for the whole group, and codes, turned into e4m3 bytes in registers, go to
the fp8 tensor cores in the order in which they lie.  A tile of tokens is one block of values, or two.
"""

import triton
import triton.language as tl

from ..attention.base2 import exp2, ptx_inverse, ptx_log2, rough_log2
from ..attention.scores import apply_mask, lengths_now, load_mask, soft_cap
from ..bits.layout import BLOCK_TOKENS, load_value_planes, side_by_side
from ..bits.to_e4m3 import decode_rows, keep_tables, operand_width, unit
from ..bits.two_terms import gather_terms, spread_terms
from .query import column_places, make_operand, program_place, split_places
from .score_rows import load_key_rows, load_row_scales, to_rows, to_tokens

P_SHIFT = tl.constexpr(7.5)  # probabilities times 2**7.5, at most 2**7.6 with `rough_log2`, to use the range of e4m3
LIFT = tl.constexpr(32.0)  # of the remainder of p: half a step at 2**7.6 is 8, times 32 still in range


@triton.jit
def _packed_scores(
    q, rows, scale, shift, softcap, SOFTCAP: tl.constexpr, TERMS: tl.constexpr, TWINS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores [tokens, columns] of decoded key rows; `scale` [tokens], or a number, is their factor."""
    s = gather_terms(tl.dot(rows, q, input_precision=PRECISION), TERMS, TWINS, 1)
    s *= scale if scale.numel == 1 else scale[:, None]
    if SOFTCAP:
        s = soft_cap(s + shift[None, :], softcap)
    return s


@triton.jit
def _decode_values(
    base, start, blocks,
    VALUE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr, COMPUTE: tl.constexpr,
    PTX: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Values of `TILE` tokens, [CHANNELS, TILE]: of two blocks, block by block, each lying in one piece."""
    BITS: tl.constexpr = VALUE[0]
    TABLE: tl.constexpr = VALUE[1]
    planes = load_value_planes(base, start, blocks, BLOCK_TOKENS, HEAD_DIM, CHANNELS, BITS, False, MASKED)
    channels = decode_rows(planes, BITS, TABLE, COMPUTE, PTX)
    if TILE == 2 * BLOCK_TOKENS:
        start += BLOCK_TOKENS
        planes = load_value_planes(base, start, blocks, BLOCK_TOKENS, HEAD_DIM, CHANNELS, BITS, False, MASKED)
        channels = side_by_side(channels, decode_rows(planes, BITS, TABLE, COMPUTE, PTX))
    return channels


@triton.jit
def _tile_start(tile, blocks, TILE: tl.constexpr, MASKED: tl.constexpr):
    """First token of a tile.  The last one is moved back, so that no load passes the last block."""
    return tile * TILE if MASKED else tl.minimum(tile * TILE, blocks * BLOCK_TOKENS - TILE)


@triton.jit
def _sum_repeats(x, REPEATS: tl.constexpr):
    """[R, N] by score row, summed over the rows that a thread has of different repeats."""
    return tl.sum(x.reshape(REPEATS, x.shape[0] // REPEATS, x.shape[1]), 0)


@triton.jit
def _store_split(
    out, total, zeros, peak, shift, scale, partial, partial_lse, used,
    VALUE_DIM: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Divides by the sum; writes output and log-sum-exp of a split."""
    total = tl.sum(total, 0)
    out = (out * scale + tl.sum(zeros, 0)[None, :]) / tl.maximum(total, 1e-30)[None, :]
    lse = tl.where(total > 0, peak + shift - P_SHIFT + tl.log2(tl.maximum(total, 1e-30)), float("-inf"))
    channel = tl.arange(0, CHANNELS)
    tl.store(partial[None, :] + channel[:, None], out, mask=used[None, :] & (channel < VALUE_DIM)[:, None])
    tl.store(partial_lse, lse, mask=used)


@triton.jit
def attend_packed(
    query, turned, space, key, value, mask, lengths, total, work, splits, tokens, blocks, behind, sizes, scales,
    strides,
    DIMS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr,
    FLAGS: tl.constexpr, COLUMNS: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr,
    LAUNCH: tl.constexpr,
):  # fmt: skip
    """Program i of a column tile: split i of the packed tokens.  Arguments as those of `decode_kernel`."""
    SOFTCAP: tl.constexpr = FLAGS[0]
    CAUSAL: tl.constexpr = FLAGS[3]
    MASK: tl.constexpr = FLAGS[2]
    TILE: tl.constexpr = LAUNCH[0]
    MASKED: tl.constexpr = LAUNCH[2]
    KEY_BITS: tl.constexpr = KEY[0]
    VALUE_BITS: tl.constexpr = VALUE[0]
    KEY_TABLE: tl.constexpr = KEY[1]
    VALUE_TABLE: tl.constexpr = VALUE[1]
    DIM: tl.constexpr = DIMS[0]
    WIDTH: tl.constexpr = operand_width(DIM, KEY_BITS)
    CHANNELS: tl.constexpr = max(triton.next_power_of_2(DIMS[1]), 64)
    REPEATS: tl.constexpr = max(TILE // 16 // LAUNCH[1], 1)
    SLOTS: tl.constexpr = TILE // (16 * REPEATS)
    TERMS: tl.constexpr = 2 if COMPUTE == tl.float8e4nv else 1
    TWINS: tl.constexpr = max(16 // (COLUMNS * TERMS), 1)

    batch, kv_head, pair, first_column = program_place(GROUP, QUERIES, COLUMNS)
    column = first_column + tl.arange(0, COLUMNS)
    limit = tokens + behind - QUERIES + 1 + column % QUERIES  # packed tokens that a column may see
    tokens = lengths_now(total, 0, tokens, sizes[1])[1]
    if lengths is not None:
        tokens = tl.minimum(tl.load(lengths + batch), tokens)
    if PTX:
        keep_tables(tokens, KEY_TABLE, VALUE_TABLE)
    used = column < GROUP * QUERIES
    existing = tl.where(used, column, 0)
    query = column_places(query, strides[0], existing, batch, kv_head, GROUP, QUERIES)
    if turned is not None:
        turned += (pair * GROUP * QUERIES + existing) * DIM
    q, factor, offset = make_operand(
        query, turned, space, key[1] + pair, pair * DIM, scales[0], used, DIM, KEY_BITS,
        unit(KEY_BITS, KEY_TABLE, COMPUTE), TERMS, TWINS, COMPUTE, PTX,
    )  # fmt: skip
    key_packed = key[0] + batch * strides[1][0] + kv_head * strides[1][1]
    key_scale = key[1] + batch * strides[1][2] + kv_head * strides[1][3]
    value_packed = value[0] + batch * strides[2][0] + kv_head * strides[2][1]
    value_scale = value[1] + batch * strides[2][2] + kv_head * strides[2][3]
    masks = strides[7]
    mask_base, mask_columns = batch * masks[0], column_places(0, masks, existing, batch, kv_head, GROUP, QUERIES)

    row = to_rows(tl.arange(0, TILE), SLOTS, REPEATS)  # the token of a score row
    peak = tl.full((COLUMNS,), -1e30, tl.float32)  # finite: exp2(-inf - peak) is 0 even where all is masked
    weight = tl.zeros((TILE // REPEATS, COLUMNS), tl.float32)  # summed over its rows at the end, like `zeros`
    zeros = tl.zeros((TILE // REPEATS, COLUMNS), tl.float32)
    out = tl.zeros((CHANNELS, COLUMNS), tl.float32)
    tiles = tl.cdiv(tokens, TILE)
    per_split = tl.cdiv(tiles, splits)
    end = tl.minimum((tl.program_id(2) + 1) * per_split, tiles)
    # Of the mask, the tile to come is loaded by hand: bytes are not prefetched.
    token = _tile_start(tl.program_id(2) * per_split, blocks, TILE, MASKED) + row
    m = load_mask(mask, mask_base, mask_columns, masks[3], sizes[0] + token, token < tokens, 0, MASK)
    # Stages given here: else Triton prefetches only what goes to a dot, and not the zeros.
    for tile in tl.range(tl.program_id(2) * per_split, end, num_stages=LAUNCH[3]):
        first, start = tile * TILE, _tile_start(tile, blocks, TILE, MASKED)
        # What a tile moved back repeats is masked out.
        new = (start - first + row).to(tl.uint32, bitcast=True) < (tokens - first).to(tl.uint32, bitcast=True)
        token = _tile_start(tile + 1, blocks, TILE, MASKED) + row
        next_m = load_mask(mask, mask_base, mask_columns, masks[3], sizes[0] + token, token < tokens, 0, MASK)
        keys = load_key_rows(key_packed, start, blocks, KEY_BITS, DIM, TILE, WIDTH, SLOTS, REPEATS, MASKED)
        scale = factor
        if KEY_BITS != 8:
            scale = load_row_scales(key_scale, start, blocks, TILE, SLOTS, REPEATS, MASKED) * factor
        rows = decode_rows(keys, KEY_BITS, KEY_TABLE, COMPUTE, PTX)
        s = _packed_scores(q, rows, scale, offset, scales[1], SOFTCAP, TERMS, TWINS, PRECISION)
        s, m = apply_mask(s, m, MASK), next_m
        if CAUSAL:
            s = tl.where((start + row)[:, None] < limit[None, :], s, float("-inf"))
        # What goes to the dot is the probability times the scale of its value: the largest is to suit e4m3.
        shift = tl.zeros((TILE,), tl.float32)
        if VALUE_BITS != 8:
            scale = tl.maximum(load_row_scales(value_scale, start, blocks, TILE, SLOTS, REPEATS, MASKED), 1e-7)
            if PTX:  # the scale in the exponent: fewer instructions, but for float32 too coarse
                shift = ptx_log2(scale)
        s += tl.where(new, shift, float("-inf"))[:, None]
        highest = s
        if VALUE_BITS != 8 and not PTX:
            highest = s + rough_log2(scale)[:, None]
        previous = peak
        peak = tl.maximum(peak, tl.max(highest, 0))
        alpha = exp2(previous - peak, PTX)
        p = exp2(s - (peak - P_SHIFT)[None, :], PTX)
        probability = p
        if VALUE_BITS != 8:
            if PTX:
                probability = p * ptx_inverse(scale)[:, None]
            else:
                p *= scale[:, None]
        weight = weight * alpha[None, :] + _sum_repeats(probability, REPEATS)
        if len(value) == 3:
            zero = value[2] + batch * strides[2][2] + kv_head * strides[2][3]
            zero = load_row_scales(zero, start, blocks, TILE, SLOTS, REPEATS, MASKED)
            zeros = zeros * alpha[None, :] + _sum_repeats(probability * zero[:, None], REPEATS)
        p = spread_terms(to_tokens(p, SLOTS, REPEATS), TERMS, TWINS, LIFT, COMPUTE, PTX)
        channels = _decode_values(value_packed, start, blocks, VALUE, DIMS[1], TILE, CHANNELS, COMPUTE, PTX, MASKED)
        tile_out = gather_terms(tl.dot(channels, p, input_precision=PRECISION), TERMS, TWINS, LIFT)
        out = out * alpha[None, :] + tile_out  # an ordinary add: the tensor core's own sum keeps 14 bits

    if SOFTCAP:
        offset = tl.zeros((COLUMNS,), tl.float32)  # is in the scores
    value_factor = unit(VALUE_BITS, VALUE_TABLE, COMPUTE)
    if VALUE_BITS == 8:
        value_factor *= tl.load(value_scale)
    partial, partial_lse = split_places(work, pair, column, GROUP, QUERIES, COLUMNS, DIMS[1])
    _store_split(out, weight, zeros, peak, offset, value_factor, partial, partial_lse, used, DIMS[1], CHANNELS)
