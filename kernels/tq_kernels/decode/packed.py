"""Decode attention to packed tokens: one split of one sequence and KV head, for a tile of its query columns.

Scores are computed transposed, tokens on M and the queries of one KV head (all heads of its group) on N:

    S^T[tokens, group] = K[tokens, D] . Q^T[D, group]        O^T[D, group] += V^T[D, tokens] . P^T[tokens, group]

so each packed byte is read and decoded once for the whole group, and codes, turned into e4m3 bytes in registers, go to
the fp8 tensor cores in the order in which they lie.  A tile of tokens is one block of values, or two.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..attention.base2 import divisor, exp2, log2_sum, ptx_inverse, ptx_log2, rough_log2, usable_scale
from ..attention.scores import apply_mask, lengths_now, soft_cap
from ..bits.layout import BLOCK_TOKENS, at_head, load_value_planes, side_by_side
from ..bits.to_e4m3 import decode_rows, keep_tables, operand_width, unit
from ..bits.two_terms import gather_terms, spread_terms
from .exact import attend_exact
from .query import MaskPlace, column_places, make_operand, mask_of_tokens, program_place, split_places
from .score_rows import load_key_rows, load_row_scales, to_rows, to_tokens

P_SHIFT = tl.constexpr(7.5)  # probabilities times 2**7.5, at most 2**7.6 with `rough_log2`, to use the range of e4m3
LIFT = tl.constexpr(32.0)  # of the remainder of p: half a step at 2**7.6 is 8, times 32 still in range


class Softmax(NamedTuple):
    """So far: the largest score of each column, and by score row the sums of probabilities, alone and times zeros."""

    peak: Any
    weight: Any
    zeros: Any


@triton.jit
def _tile_start(tile, blocks, TILE: tl.constexpr, MASKED: tl.constexpr):
    """First token of a tile.  The last one is moved back, so that no load passes the last block."""
    return tile * TILE if MASKED else tl.minimum(tile * TILE, blocks * BLOCK_TOKENS - TILE)


@triton.jit
def _token_numbers(base, start, blocks, LAUNCH: tl.constexpr):
    """Scales, or zeros, of the tokens of a tile, by score row."""
    return load_row_scales(base, start, blocks, LAUNCH.tile, LAUNCH.slots, LAUNCH.repeats, LAUNCH.masked)


@triton.jit
def _tile_scores(
    q, factor, offset, key, scale, softcap, start, blocks, DIM: tl.constexpr, CODES: tl.constexpr,
    SOFTCAP: tl.constexpr, ARITHMETIC: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Scores [tokens, columns] of the operand `q` and the keys at `key`, whose scales, if codes have less than 8 bits,
    are at `scale`; `factor` and `offset` as `make_operand` gives them."""
    BITS: tl.constexpr = CODES.key_bits
    TABLE: tl.constexpr = CODES.key_table
    WIDTH: tl.constexpr = operand_width(DIM, BITS)
    keys = load_key_rows(
        key, start, blocks, BITS, DIM, LAUNCH.tile, WIDTH, LAUNCH.slots, LAUNCH.repeats, LAUNCH.masked
    )  # fmt: skip
    if BITS != 8:
        factor = _token_numbers(scale, start, blocks, LAUNCH) * factor
    rows = decode_rows(keys, BITS, TABLE, ARITHMETIC.operand, ARITHMETIC.ptx)
    s = gather_terms(tl.dot(rows, q, input_precision=ARITHMETIC.precision), LAUNCH.terms, LAUNCH.twins, 1)
    s *= factor if factor.numel == 1 else factor[:, None]
    if SOFTCAP:
        s = soft_cap(s + offset[None, :], softcap)
    return s


@triton.jit
def _sum_repeats(x, REPEATS: tl.constexpr):
    """[R, N] by score row, summed over the rows that a thread has of different repeats."""
    return tl.sum(x.reshape(REPEATS, x.shape[0] // REPEATS, x.shape[1]), 0)


@triton.jit
def _with_value_scales(s, scale, start, blocks, BITS: tl.constexpr, PTX: tl.constexpr, LAUNCH: tl.constexpr):
    """Scores before any mask, and the scales of values, `BITS` each, by score row; of 8 bits there are none.

    With PTX scores have the scale in the exponent: fewer instructions, but for float32 too coarse.  A scale that is NaN
    makes NaN of the score, and so of each output that sees its token; as a factor it is finite, since 0 times NaN is
    NaN: a mask that hides the score hides the value with it.
    """
    if BITS == 8:
        return s, s  # which nobody reads
    elif PTX:
        scale = _token_numbers(scale, start, blocks, LAUNCH)
        shift = ptx_log2(tl.maximum(scale, 1e-7, propagate_nan=tl.PropagateNan.ALL))
        return s + shift[:, None], tl.maximum(scale, 1e-7)
    else:
        scale = _token_numbers(scale, start, blocks, LAUNCH)
        return s + (scale * 0.0)[:, None], usable_scale(scale)


@triton.jit
def _softmax_step(
    s, state, factor, zero, start, blocks, BITS: tl.constexpr, PTX: tl.constexpr, LAUNCH: tl.constexpr
):  # fmt: skip
    """The next state, its factor for all sums before, and p: probabilities times the scales of their values.

    s: scores, -inf where a token does not count; factor: scales of values, see `_with_value_scales`; zero: where those
    of values are.
    """
    # What goes to the dot is the probability times the scale of its value: the largest is to suit e4m3.
    highest = s
    if BITS != 8 and not PTX:
        highest = s + rough_log2(factor)[:, None]
    peak = tl.maximum(state.peak, tl.max(highest, 0))
    alpha = exp2(state.peak - peak, PTX)
    p = exp2(s - (peak - P_SHIFT)[None, :], PTX)
    probability = p
    if BITS != 8:
        if PTX:
            probability = p * ptx_inverse(factor)[:, None]
        else:
            p *= factor[:, None]
    weight, zeros = state.weight * alpha[None, :] + _sum_repeats(probability, LAUNCH.repeats), state.zeros
    if zero is not None:
        zero = _token_numbers(zero, start, blocks, LAUNCH)
        # Where it is NaN, so is the scale.
        zero = tl.maximum(zero, -65504.0) if PTX else tl.where(tl.abs(zero) < float("inf"), zero, 0.0)
        zeros = zeros * alpha[None, :] + _sum_repeats(probability * zero[:, None], LAUNCH.repeats)
    return Softmax(peak, weight, zeros), alpha, p


@triton.jit
def _decode_values(
    base, start, tokens, blocks, CODES: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr,
    STALE: tl.constexpr, ARITHMETIC: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Values of a tile of tokens, [CHANNELS, tokens]: of two blocks, block by block, each lying in one piece.

    STALE: with zeros behind the last of `tokens`, where bytes may be NaN, which times a probability of 0 is NaN.
    """
    BITS: tl.constexpr = CODES.value_bits
    TABLE: tl.constexpr = CODES.value_table
    BY_ROW: tl.constexpr = BITS == 3  # 3 % faster at 8 x 32,768, others no different [H200]
    planes = load_value_planes(
        base, start, blocks, BLOCK_TOKENS, HEAD_DIM, CHANNELS, BITS, False, BY_ROW, LAUNCH.masked
    )  # fmt: skip
    if STALE:
        tl.static_assert(LAUNCH.tile == BLOCK_TOKENS)
        planes = (tl.where((start + tl.arange(0, BLOCK_TOKENS) < tokens)[None, :], planes[0], 0),)
    channels = decode_rows(planes, BITS, TABLE, ARITHMETIC.operand, ARITHMETIC.ptx)
    if LAUNCH.tile == 2 * BLOCK_TOKENS:
        start += BLOCK_TOKENS
        planes = load_value_planes(
            base, start, blocks, BLOCK_TOKENS, HEAD_DIM, CHANNELS, BITS, False, BY_ROW, LAUNCH.masked
        )  # fmt: skip
        second = decode_rows(planes, BITS, TABLE, ARITHMETIC.operand, ARITHMETIC.ptx)
        channels = side_by_side(channels, second)
    return channels


@triton.jit
def _store_split(out, state, shift, scale, partial, partial_lse, used, VALUE_DIM: tl.constexpr, CHANNELS: tl.constexpr):
    """Divides by the sum; writes output and log-sum-exp of a split."""
    total = tl.sum(state.weight, 0)
    out = (out * scale + tl.sum(state.zeros, 0)[None, :]) / divisor(total)[None, :]
    lse = state.peak + shift - P_SHIFT + log2_sum(total)
    channel = tl.arange(0, CHANNELS)
    tl.store(partial[None, :] + channel[:, None], out, mask=used[None, :] & (channel < VALUE_DIM)[:, None])
    tl.store(partial_lse, lse, mask=used)


@triton.jit
def attend_packed(
    query, rotated_query, keys, values, mask, counts, work, splits, packed_length, blocks, tail_length, sizes,
    scales, strides,
    SHAPE: tl.constexpr, CODES: tl.constexpr, FLAGS: tl.constexpr, ARITHMETIC: tl.constexpr,
    LAUNCH: tl.constexpr,
):  # fmt: skip
    """Program i of a column tile: split i of the packed tokens.  Arguments as those of `decode_kernel`."""
    COLUMNS: tl.constexpr = SHAPE.columns
    TILE: tl.constexpr = LAUNCH.tile
    ROWS: tl.constexpr = TILE // LAUNCH.repeats
    MASK: tl.constexpr = FLAGS.mask
    KEY_TABLE: tl.constexpr = CODES.key_table
    VALUE_TABLE: tl.constexpr = CODES.value_table
    CHANNELS: tl.constexpr = max(triton.next_power_of_2(SHAPE.value_dim), 64)

    batch, kv_head, pair, first_column = program_place(SHAPE)
    column = first_column + tl.arange(0, COLUMNS)
    limit = packed_length + tail_length - SHAPE.queries + 1 + column % SHAPE.queries  # tokens that a column may see
    tokens = lengths_now(counts.num_tokens, sizes.num_sinks, 0, packed_length, sizes.residual_length)[2]
    if counts.lengths is not None:
        tokens = tl.minimum(tl.load(counts.lengths + batch), tokens)
    if ARITHMETIC.ptx:
        keep_tables(tokens, KEY_TABLE, VALUE_TABLE)
    used = column < SHAPE.group * SHAPE.queries
    existing = tl.where(used, column, 0)
    query = column_places(query, strides.query, existing, batch, kv_head, SHAPE.group, SHAPE.queries)
    if rotated_query is not None:
        rotated_query += (pair * SHAPE.group * SHAPE.queries + existing) * SHAPE.dim
    q, factor, offset = make_operand(
        query, rotated_query, keys.transform, keys.scale + pair, pair * SHAPE.dim, scales.scaling, used, SHAPE.dim,
        CODES.key_bits, unit(CODES.key_bits, KEY_TABLE, ARITHMETIC.operand), LAUNCH.terms, LAUNCH.twins, ARITHMETIC,
    )  # fmt: skip
    key = at_head(keys.packed, strides.key.packed, batch, kv_head)
    key_scale = at_head(keys.scale, strides.key.scale, batch, kv_head)
    value = at_head(values.packed, strides.value.packed, batch, kv_head)
    value_scale = at_head(values.scale, strides.value.scale, batch, kv_head)
    mask_base = batch * strides.mask.batch
    mask_columns = column_places(0, strides.mask, existing, batch, kv_head, SHAPE.group, SHAPE.queries)
    mask = MaskPlace(mask, mask_base, mask_columns, strides.mask.token)

    row = to_rows(tl.arange(0, TILE), LAUNCH.slots, LAUNCH.repeats)  # the token of a score row
    # The peak is finite: exp2(-inf - peak) is 0 even where all is masked.  Sums are summed over their rows at the end.
    peak, sums = tl.full((COLUMNS,), -1e30, tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
    state, out = Softmax(peak, sums, sums), tl.zeros((CHANNELS, COLUMNS), tl.float32)
    tiles = tl.cdiv(tokens, TILE)
    per_split = tl.cdiv(tiles, splits)
    end = tl.minimum((tl.program_id(2) + 1) * per_split, tiles)
    # Of the mask, the tile to come is loaded by hand: bytes are not prefetched.
    token = _tile_start(tl.program_id(2) * per_split, blocks, TILE, LAUNCH.masked) + row
    m = mask_of_tokens(mask, sizes.num_sinks + token, token < tokens, 0, MASK)
    # Stages given here: else Triton prefetches only what goes to a dot, and not the zeros.
    for tile in tl.range(tl.program_id(2) * per_split, end, num_stages=LAUNCH.stages):
        first, start = tile * TILE, _tile_start(tile, blocks, TILE, LAUNCH.masked)
        # What a tile moved back repeats is masked out.
        new = (start - first + row).to(tl.uint32, bitcast=True) < (tokens - first).to(tl.uint32, bitcast=True)
        token = _tile_start(tile + 1, blocks, TILE, LAUNCH.masked) + row
        next_m = mask_of_tokens(mask, sizes.num_sinks + token, token < tokens, 0, MASK)
        s = _tile_scores(
            q, factor, offset, key, key_scale, scales.softcap, start, blocks, SHAPE.dim, CODES, FLAGS.softcap,
            ARITHMETIC, LAUNCH,
        )  # fmt: skip
        s, factors = _with_value_scales(
            s, value_scale, start, blocks, CODES.value_bits, ARITHMETIC.ptx, LAUNCH
        )  # fmt: skip
        s, m = apply_mask(s, m, MASK), next_m
        if FLAGS.causal_packed:
            s = tl.where((start + row)[:, None] < limit[None, :], s, float("-inf"))
        s = tl.where(new[:, None], s, float("-inf"))  # never by an addition: what does not count may be NaN
        zero = values.zero
        if zero is not None:
            zero = at_head(zero, strides.value.scale, batch, kv_head)
        state, alpha, p = _softmax_step(
            s, state, factors, zero, start, blocks, CODES.value_bits, ARITHMETIC.ptx, LAUNCH
        )  # fmt: skip
        p = to_tokens(p, LAUNCH.slots, LAUNCH.repeats)
        p = spread_terms(p, LAUNCH.terms, LAUNCH.twins, LIFT, ARITHMETIC.operand, ARITHMETIC.ptx)
        channels = _decode_values(
            value, start, tokens, blocks, CODES, SHAPE.value_dim, CHANNELS, FLAGS.stale, ARITHMETIC, LAUNCH
        )  # fmt: skip
        product = tl.dot(channels, p, input_precision=ARITHMETIC.precision)
        # An ordinary add: the tensor core's own sum keeps 14 bits.
        out = out * alpha[None, :] + gather_terms(product, LAUNCH.terms, LAUNCH.twins, LIFT)

    if FLAGS.softcap:
        offset = tl.zeros((COLUMNS,), tl.float32)  # is in the scores
    value_factor = unit(CODES.value_bits, VALUE_TABLE, ARITHMETIC.operand)
    if CODES.value_bits == 8:
        value_factor *= tl.load(value_scale)
    partial, partial_lse = split_places(work, pair, column, SHAPE)
    _store_split(out, state, offset, value_factor, partial, partial_lse, used, SHAPE.value_dim, CHANNELS)


@triton.jit(do_not_specialize=["splits", "packed_length", "blocks", "tail_length"])
def decode_kernel(
    query, rotated_query, keys, values, exact, mask, counts, work, splits, packed_length, blocks, tail_length, sizes,
    scales, strides,
    SHAPE: tl.constexpr, CODES: tl.constexpr, FLAGS: tl.constexpr, ARITHMETIC: tl.constexpr,
    LAUNCH: tl.constexpr,
):  # fmt: skip
    """One program = one split of the tokens of one sequence and KV head, for a tile of its query columns.

    The first `splits` programs of a column tile attend to the packed tokens, in `blocks`, the others to the tail, or to
    the sinks.  keys: `PackedKeys`; values: `Packed`; all else: see `arguments`.  rotated_query: the query already
    rotated, see `by_matrix`, or None.

    Writes to `work`, float32, the output of each split [B * H_kv, splits, columns, D_v], and behind those, likewise,
    the log-sum-exps.
    """
    PRECISION: tl.constexpr = ARITHMETIC.precision
    if tl.program_id(2) < splits:
        attend_packed(
            query, rotated_query, keys, values, mask, counts, work, splits, packed_length, blocks, tail_length, sizes,
            scales, strides, SHAPE, CODES, FLAGS, ARITHMETIC, LAUNCH,
        )  # fmt: skip
    else:
        attend_exact(
            query, exact, mask, counts, work, splits, tail_length, packed_length, sizes, scales, strides, SHAPE, FLAGS,
            PRECISION, LAUNCH.exact_step, 1,
        )  # fmt: skip
    if LAUNCH.pdl:  # not before: programs of the next launch would take the places of some of this one
        tl.extra.cuda.gdc_launch_dependents()
