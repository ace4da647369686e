"""Decode attention to exact tokens, those still in the model's dtype, sinks and tail: splits beside the packed ones."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import tuning
from ..attention.base2 import divisor, log2_sum
from ..attention.scores import NO_MASK, apply_mask, lengths_now, soft_cap
from ..bits.layout import at_head
from .query import MaskPlace, column_places, fine_dot, mask_of_tokens, program_place, split_places

EXACT_TOKENS, SINK_STEP = tl.constexpr(tuning.EXACT_TOKENS), tl.constexpr(tuning.SINK_STEP)


class Span(NamedTuple):
    """Tokens `start` .. `end` of keys and values of one KV head, [n, D] and [n, D_v] with these strides.

    Token i stands at `place` + i among all of them; of a ring of so many `slots` (or None), it lies in slot
    (first + i) % slots.
    """

    key: Any
    value: Any
    key_step: Any
    value_step: Any
    start: Any
    end: Any
    place: Any
    first: Any
    slots: Any


@triton.jit
def _attend(
    query, span, mask, limit, partial, partial_lse, used, scales, SHAPE: tl.constexpr, FLAGS: tl.constexpr,
    PRECISION: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of 16 queries to a span; writes output and log-sum-exp.  `limit`: the first place each does not see."""
    DIM: tl.constexpr = max(triton.next_power_of_2(SHAPE.dim), 16)
    VALUE_DIM: tl.constexpr = max(triton.next_power_of_2(SHAPE.value_dim), 16)
    channel, value_channel = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    inside_key, inside_value = channel < SHAPE.dim, value_channel < SHAPE.value_dim
    q = tl.load(query[:, None] + channel[None, :], mask=used[:, None] & inside_key[None, :], other=0)
    peak, total = tl.full((16,), -1e30, tl.float32), tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, VALUE_DIM), tl.float32)
    token = span.start + tl.arange(0, STEP)
    m = mask_of_tokens(mask, token + span.place, token < span.end, 1, FLAGS.mask)
    for first in tl.range(span.start, span.end, STEP, num_stages=STAGES):
        token = first + tl.arange(0, STEP)
        inside, row = token < span.end, token.to(tl.int64)
        if span.slots is not None:
            row = ((token + span.first) % span.slots).to(tl.int64)
        coming = token + STEP
        next_m = mask_of_tokens(mask, coming + span.place, coming < span.end, 1, FLAGS.mask)
        k = span.key + row[None, :] * span.key_step + channel[:, None]
        k = tl.load(k, mask=inside[None, :] & inside_key[:, None], other=0)
        v = span.value + row[:, None] * span.value_step + value_channel[None, :]
        v = tl.load(v, mask=inside[:, None] & inside_value[None, :], other=0)
        s = tl.dot(q, k, input_precision=PRECISION) * scales.scaling
        if FLAGS.softcap:
            s = soft_cap(s, scales.softcap)
        if FLAGS.mask == NO_MASK:
            seen = inside[None, :]
            if FLAGS.causal:
                seen = seen & ((token + span.place)[None, :] < limit[:, None])
            s = tl.where(seen, s, float("-inf"))
        else:
            s = tl.where(inside[None, :], apply_mask(s, m, FLAGS.mask), float("-inf"))
            m = next_m
        highest = tl.maximum(peak, tl.max(s, 1))
        alpha = tl.exp2(peak - highest)
        p = tl.exp2(s - highest[:, None])
        peak, total = highest, total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + fine_dot(p, v, PRECISION)
    acc /= divisor(total)[:, None]
    tl.store(partial[:, None] + value_channel[None, :], acc, mask=used[:, None] & inside_value[None, :])
    tl.store(partial_lse, peak + log2_sum(total), mask=used)


@triton.jit
def attend_exact(
    query, exact, mask, counts, work, splits, tail_length, packed_length, sizes, scales, strides,
    SHAPE: tl.constexpr, FLAGS: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program `splits` + i of a column tile: split i of the exact tokens, the last one the sinks, if there are any.

    Arguments as those of `decode_kernel`; STEP tokens at a time.
    """
    batch, kv_head, pair, first_column = program_place(SHAPE)
    split, slot = tl.program_id(2) - splits, tl.arange(0, 16)
    column = first_column + slot
    used = (slot < SHAPE.columns) & (column < SHAPE.group * SHAPE.queries)
    column = tl.where(used, column, 0)
    query = column_places(query, strides.query, column, batch, kv_head, SHAPE.group, SHAPE.queries)
    partial, partial_lse = split_places(work, pair, column, SHAPE)
    mask_columns = column_places(0, strides.mask, column, batch, kv_head, SHAPE.group, SHAPE.queries)
    mask = MaskPlace(mask, batch * strides.mask.batch, mask_columns, strides.mask.token)
    sinks, length, packed = lengths_now(
        counts.num_tokens, sizes.num_sinks, tail_length, packed_length, sizes.residual_length
    )  # fmt: skip
    limit = sinks + packed + length - SHAPE.queries + 1 + column % SHAPE.queries
    tail_splits = tl.num_programs(2) - splits
    if exact.sink_keys is not None:
        tail_splits -= 1
    # Each branch attends by itself: on AMD GPUs Triton 3.6 takes no pointer that was chosen, by a branch or otherwise.
    if split < tail_splits:
        per_split = tl.cdiv(tl.cdiv(length, EXACT_TOKENS), tail_splits) * EXACT_TOKENS
        start = split * per_split
        tail = Span(
            at_head(exact.tail_keys, strides.tail_keys, batch, kv_head),
            at_head(exact.tail_values, strides.tail_values, batch, kv_head),
            strides.tail_keys.token, strides.tail_values.token, start, tl.minimum(start + per_split, length),
            sinks + packed, packed, counts.ring_slots,
        )  # fmt: skip
        _attend(query, tail, mask, limit, partial, partial_lse, used, scales, SHAPE, FLAGS, PRECISION, STEP, STAGES)
    elif exact.sink_keys is not None:
        first = Span(
            at_head(exact.sink_keys, strides.sink_keys, batch, kv_head),
            at_head(exact.sink_values, strides.sink_values, batch, kv_head),
            strides.sink_keys.token, strides.sink_values.token, split * 0, sinks, split * 0, split * 0, None,
        )  # fmt: skip
        _attend(query, first, mask, limit, partial, partial_lse, used, scales, SHAPE, FLAGS, PRECISION, SINK_STEP, 1)


@triton.jit(do_not_specialize=["tail_length"])
def decode_exact_kernel(
    query, exact, mask, counts, work, tail_length, sizes, scales, strides,
    SHAPE: tl.constexpr, FLAGS: tl.constexpr, PRECISION: tl.constexpr, LAUNCH: tl.constexpr,
):  # fmt: skip
    """`decode_kernel` where nothing is packed."""
    attend_exact(
        query, exact, mask, counts, work, 0, tail_length, tail_length * 0, sizes, scales, strides, SHAPE, FLAGS,
        PRECISION, LAUNCH.step, LAUNCH.stages,
    )  # fmt: skip
    if LAUNCH.pdl:
        tl.extra.cuda.gdc_launch_dependents()
