"""The last launch of latent attention: joins the splits, and brings the mean of the codes back to latents."""

from typing import Any

import triton
import triton.language as tl

from ..attention.scores import LOG2E
from ..bits.hadamard import hadamard, log2
from ..device import Device
from ..launch import Program

MOST_AT_ONCE = 64  # splits that a program adds in one step


@triton.jit(do_not_specialize=["splits", "all_splits"])
def latent_merge_kernel(
    work, transform, sink_logits, out, lse, splits, all_splits, heads, steps,
    RANK: tl.constexpr, QUERIES: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program = one query of one head of one sequence; the first `splits` of `all_splits` are of packed tokens.

    transform: that of packed latents; SPLITS: at least `all_splits`, a power of two; CHUNK: of them
    at once.
    """
    index = tl.program_id(0).to(tl.int64)  # over B, H, S
    columns = heads * QUERIES
    batch, column = index // columns, index % columns
    channel, split = tl.arange(0, RANK), tl.arange(0, SPLITS)
    if sink_logits is not None:
        logit = sink_logits + batch * steps.batch + column // QUERIES * steps.head + column % QUERIES * steps.query
        logit = tl.load(logit).to(tl.float32) * LOG2E
    if PDL:  # no launch of this attention has written what was read until here
        tl.extra.cuda.gdc_wait()
    lses = work + tl.num_programs(0).to(tl.int64) * all_splits * RANK
    first = batch * all_splits * columns + column
    part = tl.load(lses + first + split.to(tl.int64) * columns, mask=split < all_splits, other=float("-inf"))
    peak = tl.maximum(tl.max(part), -1e30)
    weight = tl.exp2(part - peak)
    total, of_packed = tl.sum(weight), tl.sum(tl.where(split < splits, weight, 0.0))
    packed, exact = tl.zeros((RANK,), tl.float32), tl.zeros((RANK,), tl.float32)
    for start in tl.range(0, all_splits, CHUNK):
        some = start + tl.arange(0, CHUNK)
        used = some < all_splits
        row = first + some.to(tl.int64) * columns
        w = tl.exp2(tl.load(lses + row, mask=used, other=float("-inf")) - peak)
        x = tl.load(work + row[:, None] * RANK + channel[None, :], mask=used[:, None], other=0)
        packed += tl.sum(x * tl.where(some < splits, w, 0.0)[:, None], 0)
        exact += tl.sum(x * tl.where(some < splits, 0.0, w)[:, None], 0)
    if transform.rotation is not None:  # x @ rotation, which undoes x @ rotation.T
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
    result /= tl.maximum(total, 1e-30)
    tl.store(out + index * RANK + channel, result.to(out.dtype.element_ty))
    natural = (peak + tl.log2(tl.maximum(total, 1e-30))) / LOG2E
    tl.store(lse + index, tl.where(total > 0, natural, float("-inf")))


def merge_program(device: Device, rank: int, queries: int, all_splits: int) -> Program:
    splits, pdl = triton.next_power_of_2(all_splits), device.starts_dependents
    chunk = min(splits, MOST_AT_ONCE)
    constants: dict[str, Any] = dict(RANK=rank, QUERIES=queries, SPLITS=splits, CHUNK=chunk, PDL=pdl)
    # With pdl, the launch before it waits for all that was launched before.
    options = dict(num_warps=max(1, min(chunk * rank // 2048, 16)), **({"launch_pdl": True} if pdl else {}))
    return Program(latent_merge_kernel, device, constants, options)
