"""Decode attention to exact tokens, those still in the model's dtype, sinks and tail: splits beside the packed ones."""

import triton
import triton.language as tl

from ..attention.scores import NO_MASK, apply_mask, lengths_now, load_mask, soft_cap
from .query import column_places, fine_dot, program_place, split_places

EXACT_TILE = tl.constexpr(64)  # exact tokens of a split at least


@triton.jit
def _attend(
    query, keys, values, mask, mask_base, mask_columns, limit, out, lse, used, start, end, place, slots, scales,
    strides,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SOFTCAP: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
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
    token = start + tl.arange(0, STEP)
    m = load_mask(mask, mask_base, mask_columns, strides[2], token + place, token < end, 1, MASK)
    for first in tl.range(start, end, STEP, num_stages=STAGES):
        token = first + tl.arange(0, STEP)
        inside, row = token < end, token.to(tl.int64)
        if slots is not None:
            row = ((token + place) % slots).to(tl.int64)
        coming = token + STEP
        next_m = load_mask(mask, mask_base, mask_columns, strides[2], coming + place, coming < end, 1, MASK)
        k = keys + row[None, :] * strides[0] + channel[:, None]
        k = tl.load(k, mask=inside[None, :] & (channel < DIM)[:, None], other=0)
        v = values + row[:, None] * strides[1] + value_channel[None, :]
        v = tl.load(v, mask=inside[:, None] & (value_channel < VALUE_DIM)[None, :], other=0)
        s = tl.dot(q, k, input_precision=PRECISION) * scales[0]
        if SOFTCAP:
            s = soft_cap(s, scales[1])
        if MASK == NO_MASK:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & ((token + place)[None, :] < limit[:, None])
            s = tl.where(seen, s, float("-inf"))
        else:
            s = tl.where(inside[None, :], apply_mask(s, m, MASK), float("-inf"))
            m = next_m
        highest = tl.maximum(peak, tl.max(s, 1))
        alpha = tl.exp2(peak - highest)
        p = tl.exp2(s - highest[:, None])
        peak, total = highest, total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + fine_dot(p, v, PRECISION)
    acc /= tl.maximum(total, 1e-30)[:, None]
    tl.store(out[:, None] + value_channel[None, :], acc, mask=used[:, None] & (value_channel < VALUE_DIM)[None, :])
    tl.store(lse, tl.where(total > 0, peak + tl.log2(tl.maximum(total, 1e-30)), float("-inf")), mask=used)


@triton.jit
def attend_exact(
    query, tail, sinks, mask, total, slots, work, splits, length, packed, sizes, scales, strides,
    DIMS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, FLAGS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program `splits` + i of a column tile: split i of the exact tokens, the last one the sinks, if there are any.

    Arguments as those of `decode_kernel`; STEP tokens at a time.
    """
    batch, kv_head, pair, first_column = program_place(GROUP, QUERIES, COLUMNS)
    split, slot = tl.program_id(2) - splits, tl.arange(0, 16)
    column = first_column + slot
    used = (slot < COLUMNS) & (column < GROUP * QUERIES)
    column = tl.where(used, column, 0)
    query = column_places(query, strides[0], column, batch, kv_head, GROUP, QUERIES)
    partial, partial_lse = split_places(work, pair, column, GROUP, QUERIES, COLUMNS, DIMS[1])
    masks = strides[7]
    mask_columns = column_places(0, masks, column, batch, kv_head, GROUP, QUERIES)
    length, packed = lengths_now(total, length, packed, sizes[1])
    limit = sizes[0] + packed + length - QUERIES + 1 + column % QUERIES
    tail_splits = tl.num_programs(2) - splits - (0 if sinks is None else 1)
    span = tl.cdiv(tl.cdiv(length, EXACT_TILE), tl.maximum(tail_splits, 1)) * EXACT_TILE
    start = split * span
    end, place = tl.minimum(start + span, length), packed + sizes[0]
    k = tail[0] + batch * strides[3][0] + kv_head * strides[3][1]
    v = tail[1] + batch * strides[4][0] + kv_head * strides[4][1]
    steps = (tl.full((), 0, tl.int64) + strides[3][2], tl.full((), 0, tl.int64) + strides[4][2])
    if sinks is not None:
        if split == tail_splits:
            start, end, place = start * 0, end * 0 + sizes[0], place * 0
            k = sinks[0] + batch * strides[5][0] + kv_head * strides[5][1]
            v = sinks[1] + batch * strides[6][0] + kv_head * strides[6][1]
            steps = (tl.full((), 0, tl.int64) + strides[5][2], tl.full((), 0, tl.int64) + strides[6][2])
    _attend(
        query, k, v, mask, batch * masks[0], mask_columns, limit, partial, partial_lse, used, start, end, place, slots,
        scales, (steps[0], steps[1], masks[3]), DIMS[0], DIMS[1], FLAGS[0], FLAGS[1], FLAGS[2], PRECISION, STEP, STAGES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["length"])
def decode_exact_kernel(
    query, tail, sinks, mask, total, slots, work, length, sizes, scales, strides,
    DIMS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, FLAGS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """`decode_kernel` where nothing is packed; LAUNCH = (tokens of a step, stages)."""
    attend_exact(
        query, tail, sinks, mask, total, slots, work, 0, length, length * 0, sizes, scales, strides, DIMS, GROUP,
        QUERIES, FLAGS, COLUMNS, PRECISION, LAUNCH[0], LAUNCH[1],
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
