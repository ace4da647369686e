"""The last launch of decode: joins the splits, and undoes rotation and centre of the values in the packed ones."""

from typing import Any

import torch
import triton
import triton.language as tl

from ..attention.base2 import divisor, log2_sum
from ..attention.scores import LOG2E
from ..bits.hadamard import hadamard, is_power_of_two, log2
from ..device import Device
from ..launch import Launch, Program
from ..states import States
from ..tuning import merge_warps
from .arguments import QuerySteps

NO_STEPS = QuerySteps(0, 0, 0)


@triton.jit(do_not_specialize=["splits", "all_splits"])
def decode_merge_kernel(
    work, rotation, center, sink_logits, out, lse, splits, all_splits, heads, steps,
    DIM: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program = one query of one of so many `heads` of one sequence; the first `splits` are of packed tokens."""
    index = tl.program_id(0).to(tl.int64)  # over B, H_q, S
    COLUMNS: tl.constexpr = GROUP * QUERIES
    CHANNELS: tl.constexpr = triton.next_power_of_2(DIM)
    pair = index // COLUMNS
    split, channel = tl.arange(0, SPLITS), tl.arange(0, CHANNELS)
    row = (pair * all_splits + split) * COLUMNS + index % COLUMNS
    used, inside = split < all_splits, channel < DIM
    HADAMARD: tl.constexpr = rotation is not None and is_power_of_two(DIM)
    if HADAMARD:
        diagonal = tl.load(rotation + channel)
    if center is not None:
        middle = tl.load(center + pair * DIM + channel, mask=inside, other=0)
    if sink_logits is not None:
        head = index // QUERIES
        logit = sink_logits + head // heads * steps.batch + head % heads * steps.head + index % QUERIES * steps.query
        logit = tl.load(logit).to(tl.float32) * LOG2E
    if PDL:  # no launch of decode has written what was read until here
        tl.extra.cuda.gdc_wait()
    lses = work + tl.num_programs(0).to(tl.int64) * all_splits * DIM
    part = tl.load(lses + row, mask=used, other=float("-inf"))
    x = tl.load(work + row[:, None] * DIM + channel[None, :], mask=used[:, None] & inside[None, :], other=0)
    peak = tl.maximum(tl.max(part), -1e30)
    weight = tl.exp2(part - peak)
    total = tl.sum(weight)
    packed = tl.where(split < splits, weight, 0.0)
    sum_packed = tl.sum(x * packed[:, None], 0)
    exact = tl.sum(x * (weight - packed)[:, None], 0)
    if HADAMARD:  # x @ rotation, which undoes x @ rotation.T
        sum_packed = hadamard(sum_packed, 0, log2(DIM)) * diagonal
    elif rotation is not None:
        matrix = rotation + channel[:, None] * DIM + channel[None, :]
        matrix = tl.load(matrix, mask=inside[:, None] & inside[None, :], other=0)
        sum_packed = tl.sum(sum_packed[:, None] * matrix, 0)
    if center is not None:
        sum_packed += middle * tl.sum(packed)
    result = sum_packed + exact
    if sink_logits is not None:  # one more logit, which gives nothing
        highest = tl.maximum(peak, logit)
        alpha = tl.exp2(peak - highest)
        peak, total, result = highest, total * alpha + tl.exp2(logit - highest), result * alpha
    result /= divisor(total)
    tl.store(out + index * DIM + channel, result.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + index, (peak + log2_sum(total)) / LOG2E)


def merge_program(device: Device, value_dim: int, group: int, queries: int, all_splits: int, pdl: bool) -> Program:
    splits = triton.next_power_of_2(all_splits)
    constants: dict[str, Any] = dict(DIM=value_dim, GROUP=group, QUERIES=queries, SPLITS=splits, PDL=pdl)
    # The launch before it waits for all that was launched before.
    options = dict(num_warps=merge_warps(splits, value_dim), **({"launch_pdl": True} if pdl else {}))
    return Program(decode_merge_kernel, device, constants, options)


def merge_launch(
    program: Program, work: torch.Tensor, query: torch.Tensor, value: States | None, sink_logits: torch.Tensor | None,
    shape: tuple[int, int, int, int], splits: int, all_splits: int,
) -> tuple[Launch, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The launch, output of that `shape` and log-sum-exp of `decode`; `value` is read if there are `splits` of it."""
    out, lse = query.new_empty(shape), query.new_empty(shape[:3], dtype=torch.float32)
    steps = NO_STEPS if sink_logits is None else QuerySteps(*sink_logits.stride())
    rotation, center = (value.rotation, value.center) if value is not None and splits else (None, None)
    arguments = (work, rotation, center, sink_logits, out, lse, splits, all_splits, shape[1], steps)
    return Launch(program, (shape[0] * shape[1] * shape[2], 1, 1), arguments), out, lse
