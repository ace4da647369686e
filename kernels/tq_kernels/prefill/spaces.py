"""Prefill's way into the space of the packed keys, and out of that of the packed values.

Queries are scaled, smoothed and rotated as the keys were; outputs over spans of packed tokens are joined and rotated
back.  A rotation is read some rows at a time, so that it needs little shared memory.
"""

import torch
import triton
import triton.language as tl

from ..attention.base2 import divisor, log2_sum
from ..attention.scores import LOG2E
from ..bits.layout import channels, key_channels, part_width, parts
from ..launch import Launch
from ..states import TokenSteps
from .arguments import Attended, RotatedQuery
from .problem import Problem


@triton.jit
def _rotate_add(x, matrix, acc, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    """acc + x @ matrix, [K, C]: rows of a rotation or of its transpose, each of elements of one size and zeros.

    In float16 they become +-1, so that only `x` is rounded.
    """
    if COMPUTE == tl.float32:
        return tl.dot(x, matrix, acc, input_precision=PRECISION)
    else:
        size = tl.maximum(tl.max(tl.abs(matrix), 1), 1e-30)
        return tl.dot((x * size[None, :]).to(COMPUTE), (matrix / size[:, None]).to(COMPUTE), acc)


@triton.jit
def _weights(lses, index, inside):
    """From the log-sum-exps of spans, what each counts, [M], their sum, and the log-sum-exp of all."""
    loaded, peak = (), tl.full(index.shape, -1e30, tl.float32)
    for i in tl.static_range(len(lses)):
        loaded = loaded + (tl.load(lses[i] + index, mask=inside, other=0),)
        peak = tl.maximum(peak, loaded[i])
    weights, total = (), tl.zeros(index.shape, tl.float32)
    for i in tl.static_range(len(lses)):
        weights = weights + (tl.exp2((loaded[i] - peak) * LOG2E),)
        total += weights[i]
    return weights, divisor(total), peak + log2_sum(total) / LOG2E


@triton.jit
def _weighted(outs, weights, total, index, inside, channel, DIM: tl.constexpr):
    """Sum of some channels of spans' outputs, float32 [M, channels]."""
    x = tl.zeros((index.shape[0], channel.shape[0]), tl.float32)
    used = inside[:, None] & (channel < DIM)[None, :]
    for i in tl.static_range(len(outs)):
        out = tl.load(outs[i] + index[:, None] * DIM + channel[None, :], mask=used, other=0)
        x += out.to(tl.float32) * (weights[i] / total)[:, None]
    return x


@triton.jit(do_not_specialize=["count", "rows"])
def prefill_query_kernel(
    query, transform, rotated, count, rows, factor, strides,
    DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """One program = M queries of one query head, times `factor`, brought into the space of the key codes.

    rotated: `RotatedQuery`, written, with zeros behind the last query.
    """
    rotation, smooth, center = transform
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    pair = batch * (tl.num_programs(1) // GROUP) + head // GROUP
    row = tl.program_id(0) * M + tl.arange(0, M)
    index = (batch * tl.num_programs(1) + head) * rows + row
    source, valid = key_channels(DIM, BITS)
    query += batch * strides.batch + head * strides.head + row[:, None].to(tl.int64) * strides.token
    STEP: tl.constexpr = part_width(DIM, BITS) * parts(BITS) if rotation is None else K  # all columns, or K at a time
    x = tl.zeros((M, part_width(DIM, BITS) * parts(BITS)), tl.float32)
    product = tl.zeros((M,), tl.float32)
    for first in tl.range(0, DIM, STEP):
        channel = first + tl.arange(0, STEP)
        q = tl.load(query + channel[None, :], mask=(row < count)[:, None] & (channel < DIM)[None, :], other=0)
        q = q.to(tl.float32) * factor
        if center is not None:
            product += tl.sum(q * tl.load(center + pair * DIM + channel, mask=channel < DIM, other=0)[None, :], 1)
        if smooth is not None:
            q *= tl.load(smooth + pair * DIM + channel, mask=channel < DIM, other=0)[None, :]
        if rotation is not None:
            used = valid[None, :] & (channel < DIM)[:, None]
            matrix = tl.load(rotation + source[None, :] * DIM + channel[:, None], mask=used, other=0)
            x = _rotate_add(q, matrix, x, rotated.rows.dtype.element_ty, PRECISION)
        else:
            x = q
    if center is not None:
        tl.store(rotated.offset + index, product, mask=row < rows)
    element = index[:, None] * x.shape[1] + tl.arange(0, x.shape[1])[None, :]
    tl.store(rotated.rows + element, x.to(rotated.rows.dtype.element_ty), mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=["rows"])
def prefill_merge_kernel(
    outs, lses, rotation, center, merged, rows,
    DIM: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One program = M queries of one query head: joins spans, and undoes rotation and centre of the values.

    outs: each [B, H_q, rows, D_v]; lses: each [B, H_q, rows]; merged: `Attended`, written.  Never in place: one warp
    would write a log-sum-exp that another has yet to read.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, column = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, channels(DIM))
    inside = row < rows
    index = (batch * tl.num_programs(1) + head) * rows + row
    weights, total, lse = _weights(lses, index, inside)
    if rotation is None:
        x = _weighted(outs, weights, total, index, inside, column, DIM)
    else:
        x = tl.zeros((M, channels(DIM)), tl.float32)
        for first in tl.range(0, DIM, K):
            channel = first + tl.arange(0, K)
            used = (channel < DIM)[:, None] & (column < DIM)[None, :]
            matrix = tl.load(rotation + channel[:, None] * DIM + column[None, :], mask=used, other=0)
            y = _weighted(outs, weights, total, index, inside, channel, DIM)
            x = _rotate_add(y, matrix, x, merged.out.dtype.element_ty, PRECISION)
    if center is not None:
        center += (batch * (tl.num_programs(1) // GROUP) + head // GROUP) * DIM
        c = tl.load(center + column, mask=column < DIM, other=0)
        x += tl.where((lse != float("-inf"))[:, None], c[None, :], 0)
    used = inside[:, None] & (column < DIM)[None, :]
    tl.store(merged.out + index[:, None] * DIM + column[None, :], x.to(merged.out.dtype.element_ty), mask=used)
    tl.store(merged.lse + index, lse, mask=inside)


def rotate_query(problem: Problem) -> RotatedQuery:
    """The query as the packed tokens take it."""
    query, key, rows, config = problem.query, problem.key, problem.rows, problem.configs.rotate
    assert key is not None
    batch, heads, count, dim = query.shape
    offset = None if key.center is None else problem.empty(batch, heads, rows, dtype=torch.float32)
    rotated = RotatedQuery(problem.empty(batch, heads, rows, problem.key_width), offset)
    program = problem.program(
        prefill_query_kernel, config, DIM=dim, BITS=key.coding.bits, GROUP=problem.group, PRECISION=problem.precision,
        M=config.tile.queries, K=config.tile.tokens,
    )  # fmt: skip
    factor, strides = problem.scaling * LOG2E.value, TokenSteps(*query.stride()[:3])
    arguments = (query, key.transform, rotated, count, rows, factor, strides)
    Launch(program, (triton.cdiv(rows, config.tile.queries), heads, batch), arguments).run()
    return rotated


def merge_spans(problem: Problem, spans: list[Attended], last: bool = False) -> Attended:
    """Joins spans; the `last` time, undoes rotation and centre of the values, too."""
    value, config = problem.value, problem.configs.rotate
    assert value is not None
    rotation, center = (value.rotation, value.center) if last else (None, None)
    if len(spans) == 1 and rotation is None and center is None:
        return spans[0]
    batch, heads, rows, dim = spans[0].out.shape
    outs, lses = zip(*spans, strict=True)
    merged = Attended(torch.empty_like(outs[0]), torch.empty_like(lses[0]))
    program = problem.program(
        prefill_merge_kernel, config, DIM=dim, GROUP=problem.group, PRECISION=problem.precision,
        M=config.tile.queries, K=config.tile.tokens,
    )  # fmt: skip
    arguments = (outs, lses, rotation, center, merged, rows)
    Launch(program, (triton.cdiv(rows, config.tile.queries), heads, batch), arguments).run()
    return merged
