"""The last launches of latent attention: join the splits, and bring the mean of the codes back to latents.

Where there are few queries and many splits, one program per query would read them all through one multiprocessor.
Then programs share the channels; a rotation, which needs them all, comes in a launch of its own, over what was joined.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..attention.base2 import divisor, log2_sum
from ..attention.scores import LOG2E
from ..bits.hadamard import hadamard, log2
from ..device import Device
from ..launch import Program

AT_ONCE, AT_ONCE_WIDE = 64, 32  # most splits that a program adds in one step, of up to 128 channels and of more [H200]
LEAST_CHANNELS = 32  # of a program, 128 bytes of a row
MANY_SPLITS = 16  # from so many on programs share the channels,
PROGRAMS = 256  # until there are so many, about two for each multiprocessor;
FEW_COLUMNS = 128  # rotated ones, which cost a launch more, where there are fewer queries than this


@triton.jit
def _join(work, row_of, all_splits, splits, columns, channel, RANK: tl.constexpr, CHUNK: tl.constexpr):
    """Sums over packed splits and over exact ones of one query: `peak` of log-sum-exps, weights, means times weights.

    row_of: row of the query in its first split; splits are `columns` rows apart
    """
    lses = work + tl.num_programs(0).to(tl.int64) * all_splits * RANK
    peak, of_packed, of_exact = -1e30, 0.0, 0.0
    packed, exact = tl.zeros(channel.shape, tl.float32), tl.zeros(channel.shape, tl.float32)
    for start in tl.range(0, all_splits, CHUNK):
        split = start + tl.arange(0, CHUNK)
        used = split < all_splits
        row = row_of + split.to(tl.int64) * columns
        part = tl.load(lses + row, mask=used, other=float("-inf"))
        x = tl.load(work + row[:, None] * RANK + channel[None, :], mask=used[:, None], other=0)
        highest = tl.maximum(peak, tl.max(part))
        alpha, weight = tl.exp2(peak - highest), tl.exp2(part - highest)
        to_packed, to_exact = tl.where(split < splits, weight, 0.0), tl.where(split < splits, 0.0, weight)
        peak, of_packed, of_exact = highest, of_packed * alpha + tl.sum(to_packed), of_exact * alpha + tl.sum(to_exact)
        packed = packed * alpha + tl.sum(x * to_packed[:, None], 0)
        exact = exact * alpha + tl.sum(x * to_exact[:, None], 0)
    return peak, of_packed, of_exact, packed, exact


@triton.jit(do_not_specialize=["splits", "all_splits"])
def latent_join_kernel(
    work, joined, splits, all_splits, columns,
    RANK: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program = CHANNELS of one of the `columns` of one sequence: `joined` is as `work`, of one packed split and
    one of all the exact ones."""
    index = tl.program_id(0).to(tl.int64)
    batch, column = index // columns, index % columns
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row_of = batch * all_splits * columns + column
    peak, of_packed, of_exact, packed, exact = _join(work, row_of, all_splits, splits, columns, channel, RANK, CHUNK)
    row = batch * 2 * columns + column
    tl.store(joined + row * RANK + channel, packed / divisor(of_packed))
    tl.store(joined + (row + columns) * RANK + channel, exact / divisor(of_exact))
    if tl.program_id(1) == 0:
        lses = joined + tl.num_programs(0).to(tl.int64) * 2 * RANK + row
        tl.store(lses, peak + log2_sum(of_packed))
        tl.store(lses + columns, peak + log2_sum(of_exact))
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["splits", "all_splits"])
def latent_merge_kernel(
    work, transform, sink_logits, out, lse, splits, all_splits, heads, steps,
    RANK: tl.constexpr, CHANNELS: tl.constexpr, QUERIES: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program = CHANNELS of one query of one head of one sequence, all of them where latents are rotated; the first
    `splits` of `all_splits` are of packed tokens.

    transform: that of packed latents; CHUNK: splits at once
    """
    index = tl.program_id(0).to(tl.int64)  # over B, H, S
    columns = heads * QUERIES
    batch, column = index // columns, index % columns
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    if sink_logits is not None:
        logit = sink_logits + batch * steps.batch + column // QUERIES * steps.head + column % QUERIES * steps.query
        logit = tl.load(logit).to(tl.float32) * LOG2E
    if PDL:  # no launch of this attention has written what was read until here
        tl.extra.cuda.gdc_wait()
    row_of = batch * all_splits * columns + column
    peak, of_packed, of_exact, packed, exact = _join(work, row_of, all_splits, splits, columns, channel, RANK, CHUNK)
    total = of_packed + of_exact
    if transform.rotation is not None:  # x @ rotation, which undoes x @ rotation.T
        tl.static_assert(CHANNELS == RANK)
        packed = hadamard(packed[None, :], 0, log2(RANK)).reshape(RANK) * tl.load(transform.rotation + channel)
    if transform.smooth is not None:
        packed *= tl.load(transform.smooth + batch * RANK + channel)
    if transform.center is not None:
        packed += tl.load(transform.center + batch * RANK + channel) * of_packed
    result = packed + exact
    if sink_logits is not None:  # one more logit, which gives nothing
        highest = tl.maximum(peak, logit)
        alpha = tl.exp2(peak - highest)
        peak, total, result = highest, total * alpha + tl.exp2(logit - highest), result * alpha
    result /= divisor(total)
    tl.store(out + index * RANK + channel, result.to(out.dtype.element_ty))
    if tl.program_id(1) == 0:
        tl.store(lse + index, (peak + log2_sum(total)) / LOG2E)


class MergePrograms(NamedTuple):
    """Of the splits of all columns.  channels: of a program of the first launch, `join` where there is one."""

    join: Program | None
    merge: Program
    channels: int


def merge_programs(
    device: Device, rank: int, queries: int, columns: int, all_splits: int, rotated: bool
) -> MergePrograms:
    """columns: queries of all heads and sequences; rotated: packed latents are."""
    channels, shared = rank, all_splits >= MANY_SPLITS and (columns < FEW_COLUMNS or not rotated)
    while shared and channels > LEAST_CHANNELS and columns * rank // channels < PROGRAMS:
        channels //= 2
    if channels == rank or not rotated:
        constants = dict(RANK=rank, CHANNELS=channels, QUERIES=queries)
        return MergePrograms(None, _program(latent_merge_kernel, device, constants, all_splits), channels)
    join = _program(latent_join_kernel, device, dict(RANK=rank, CHANNELS=channels), all_splits)
    merge = _program(latent_merge_kernel, device, dict(RANK=rank, CHANNELS=rank, QUERIES=queries), 2)
    return MergePrograms(join, merge, channels)


def _program(kernel: Any, device: Device, constants: dict[str, Any], all_splits: int) -> Program:
    channels, pdl = constants["CHANNELS"], device.starts_dependents
    chunk = min(triton.next_power_of_2(all_splits), AT_ONCE if channels <= 128 else AT_ONCE_WIDE)
    warps = max(1, min(chunk * channels // 2048, 16))
    # With pdl, the launch before it waits for all that was launched before.
    options = dict(num_warps=warps, **({"launch_pdl": True} if pdl else {}))
    return Program(kernel, device, constants | dict(CHUNK=chunk, PDL=pdl), options)
