"""Latent attention to exact tokens, those still in the model's dtype, sinks and tail: splits beside the packed ones."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import tuning
from ..attention.base2 import divisor, log2_sum
from ..attention.scores import NO_MASK, apply_mask, soft_cap
from .tokens import mask_of_places, program_columns, split_rows

EXACT_TOKENS = tl.constexpr(tuning.EXACT_TOKENS)


class LatentSpan(NamedTuple):
    """Tokens `start` .. `end` of latents and rotary keys of one sequence, [n, rank] and [n, d] with these strides.

    Token i stands at `place` + i among all of them; of a ring of so many `slots` (or None), it lies in slot
    (first + i) % slots.
    """

    latents: Any
    rotary: Any
    latent_step: Any
    rotary_step: Any
    start: Any
    end: Any
    place: Any
    first: Any
    slots: Any


@triton.jit
def _attend(
    exact, span, mask, chosen, out, lse, at, settings, strides, SHAPE: tl.constexpr, FLAGS: tl.constexpr,
    ROTATED: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of the columns to a span; writes output and log-sum-exp."""
    COLUMNS: tl.constexpr = SHAPE.columns
    RANK: tl.constexpr = SHAPE.rank
    channel, dim = tl.arange(0, RANK), tl.arange(0, SHAPE.rotary_width)
    head, query = at.column // SHAPE.queries, at.column % SHAPE.queries
    steps = strides.content
    base = exact.content + at.batch * steps.batch + head * steps.head + query * steps.query
    q = tl.load(base[:, None] + channel[None, :])
    if ROTATED:
        steps = strides.rotary
        base = exact.rotary + at.batch * steps.batch + head * steps.head + query * steps.query
        r = tl.load(base[:, None] + dim[None, :], mask=(dim < SHAPE.rotary)[None, :], other=0)
    peak, total = tl.full((COLUMNS,), -1e30, tl.float32), tl.zeros((COLUMNS,), tl.float32)
    acc = tl.zeros((COLUMNS, RANK), tl.float32)
    begin, end = span.start, span.end
    if FLAGS.chosen:  # look through the list: few of them are here
        begin, end = begin * 0, chosen.top_k + end * 0
    for first in tl.range(begin, end, STEP, num_stages=STAGES):
        token = first + tl.arange(0, STEP)
        inside = token < end
        if FLAGS.chosen:
            index = chosen.indices + tl.program_id(1).to(tl.int64) * chosen.top_k + token
            token = tl.load(index, mask=inside, other=-1) - span.place
            inside = (token >= span.start) & (token < span.end)
            token = tl.where(inside, token, 0)
        row = token.to(tl.int64)
        if span.slots is not None:
            row = ((token + span.first) % span.slots).to(tl.int64)
        x = span.latents + row[:, None] * span.latent_step + channel[None, :]
        x = tl.load(x, mask=inside[:, None], other=0)
        s = tl.dot(q, x.T, input_precision=PRECISION)
        if ROTATED:
            y = span.rotary + row[:, None] * span.rotary_step + dim[None, :]
            y = tl.load(y, mask=inside[:, None] & (dim < SHAPE.rotary)[None, :], other=0)
            s += tl.dot(r, y.T, input_precision=PRECISION)
        s *= settings.scaling
        if FLAGS.softcap:
            s = soft_cap(s, settings.softcap)
        if FLAGS.mask != NO_MASK:
            m = mask_of_places(mask, at, token + span.place, inside, strides.mask.token, 1, FLAGS.mask)
            s = apply_mask(s, m, FLAGS.mask)
        if FLAGS.causal:
            s = tl.where((token + span.place)[None, :] < at.limit[:, None], s, float("-inf"))
        s = tl.where(inside[None, :], s, float("-inf"))
        highest = tl.maximum(peak, tl.max(s, 1))
        alpha = tl.exp2(peak - highest)
        p = tl.exp2(s - highest[:, None])
        peak, total = highest, total * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(x.dtype), x, acc * alpha[:, None], input_precision=PRECISION)
    acc /= divisor(total)[:, None]
    tl.store(out[:, None] + channel[None, :], acc, mask=at.used[:, None])
    tl.store(lse, peak + log2_sum(total), mask=at.used)


@triton.jit
def attend_exact_latents(
    exact, mask, chosen, ring_slots, work, splits, sinks, packed, length, settings, strides,
    SHAPE: tl.constexpr, FLAGS: tl.constexpr, ROTATED: tl.constexpr, PRECISION: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program `splits` + i: split i of the tail of `length` tokens, the last one the sinks, if there are any."""
    at = program_columns(strides, sinks + packed + length, SHAPE, FLAGS.chosen)
    batches = tl.num_programs(1)
    if FLAGS.chosen:
        batches = batches // SHAPE.queries
    out, lse = split_rows(work, at, batches, tl.num_programs(2), SHAPE)
    split, tail_splits = tl.program_id(2) - splits, tl.num_programs(2) - splits
    if exact.sink_latents is not None:
        tail_splits -= 1
    # Each branch attends by itself: on AMD GPUs Triton 3.6 takes no pointer that was chosen, by a branch or otherwise.
    if split < tail_splits:
        per_split = tl.cdiv(tl.cdiv(length, EXACT_TOKENS), tail_splits) * EXACT_TOKENS
        start = split * per_split
        tail = LatentSpan(
            exact.tail_latents + at.batch * strides.tail_latents.batch,
            exact.tail_rotary + at.batch * strides.tail_rotary.batch,
            strides.tail_latents.token, strides.tail_rotary.token, start, tl.minimum(start + per_split, length),
            sinks + packed, packed, ring_slots,
        )  # fmt: skip
        _attend(
            exact, tail, mask, chosen, out, lse, at, settings, strides, SHAPE, FLAGS, ROTATED, PRECISION, STEP, STAGES
        )  # fmt: skip
    elif exact.sink_latents is not None:
        first = LatentSpan(
            exact.sink_latents + at.batch * strides.sink_latents.batch,
            exact.sink_rotary + at.batch * strides.sink_rotary.batch,
            strides.sink_latents.token, strides.sink_rotary.token, split * 0, sinks, split * 0, split * 0, None,
        )  # fmt: skip
        _attend(
            exact, first, mask, chosen, out, lse, at, settings, strides, SHAPE, FLAGS, ROTATED, PRECISION, STEP, 1
        )  # fmt: skip
