"""Exact tokens by flash attention: sink tokens, tail and chunk, still in the model's dtype, after the packed ones."""

import torch
import triton
import triton.language as tl

from ..attention.masks import add_mask, mask_of, visible_span
from ..attention.scores import LOG2E, ScoreFactors, soft_cap
from ..attention.softmax import accumulate, begin_softmax, log_sum, weighted_mean, with_sink_logit
from ..bits.layout import at_head, channels
from ..launch import Launch
from ..states import TokenSteps
from .arguments import Attended, ExactTokenStrides
from .problem import Problem


@triton.jit
def _load_vectors(base, step, row, end, DIM: tl.constexpr, FULL: tl.constexpr):
    """Vectors of DIM elements, [rows, channels], zeros from row `end` on; `FULL`: no row is that far."""
    channel = tl.arange(0, channels(DIM))
    pointer = base + row[:, None].to(tl.int64) * step + channel[None, :]
    if not FULL:
        return tl.load(pointer, mask=(row < end)[:, None] & (channel < DIM)[None, :], other=0)
    elif channels(DIM) != DIM:
        return tl.load(pointer, mask=(channel < DIM)[None, :], other=0)
    else:
        return tl.load(pointer)


@triton.jit
def _exact_tile(
    q, keys, values, start, state, row, mask, count, packed_length, exact_length, num_sinks, factors, strides,
    DIMS: tl.constexpr, CAUSAL: tl.constexpr, HOW: tl.constexpr, N: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One step over the exact tokens from `start`; `FULL`: every query sees all N of them."""
    PRECISION: tl.constexpr = HOW.precision
    token = start + tl.arange(0, N)
    k = _load_vectors(keys, strides.exact_keys.token, token, exact_length, DIMS.key_dim, FULL)
    s = tl.dot(q, k.T, input_precision=PRECISION) * factors.scaling
    v = _load_vectors(values, strides.exact_values.token, token, exact_length, DIMS.value_dim, FULL)
    if HOW.softcap:
        s = soft_cap(s, factors.softcap)
    if not FULL:
        seen = (token < exact_length)[None, :]
        if mask is not None:
            column = token + tl.where(token < num_sinks, 0, packed_length)
            s = add_mask(s, mask, row, column, seen & (row < count)[:, None], strides.mask)
        if CAUSAL:
            seen = seen & (token[None, :] <= row[:, None] + (exact_length - count))
        s = tl.where(seen, s, float("-inf"))
    return accumulate(s, v, state, PRECISION)


@triton.jit(do_not_specialize=["count", "packed_length", "exact_length", "num_sinks", "rows"])
def _prefill_exact_kernel(
    query, exact_keys, exact_values, packed, offset, mask, sink_logits, attended, count, packed_length, exact_length,
    num_sinks, rows, factors, strides,
    DIMS: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, HOW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program = M queries of one query head of one sequence: goes on from the packed tokens over the exact ones.

    `num_sinks` of the exact tokens stand before the packed ones.  packed: `Attended` or None; offset: to be added to
    its log-sum-exps (base 2), or None; mask: `TiledMask` or None; attended: `Attended`, written; factors:
    `ScoreFactors`; strides: `ExactTokenStrides`.  The longest rows begin first.
    """
    VALUE_DIM: tl.constexpr = DIMS.value_dim
    M: tl.constexpr = TILE.queries
    N: tl.constexpr = TILE.tokens
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    heads, kv_head = tl.num_programs(0), head // GROUP
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    row = tile * M + tl.arange(0, M)
    inside = row < count
    state = begin_softmax(packed, offset, (batch * heads + head) * rows + row, inside, M, VALUE_DIM)

    q = _load_vectors(at_head(query, strides.query, batch, head), strides.query.token, row, count, DIMS.key_dim, False)
    exact_keys = at_head(exact_keys, strides.exact_keys, batch, kv_head)
    exact_values = at_head(exact_values, strides.exact_values, batch, kv_head)
    first, full, end = 0, exact_length // N, tl.cdiv(exact_length, N)
    if mask is not None:
        mask = mask_of(mask, strides.mask, batch, head, tile)
        first, end, unmasked, _ = visible_span(mask.tiles, 0, end)
        full = tl.minimum(full, unmasked)
    if CAUSAL:
        full = tl.minimum(exact_length, exact_length - count + tile * M + 1) // N
        end = tl.cdiv(tl.minimum(exact_length, exact_length - count + (tile + 1) * M), N)
    for i in tl.range(first, full):
        state = _exact_tile(
            q, exact_keys, exact_values, i * N, state, row, mask, count, packed_length, exact_length, num_sinks,
            factors, strides, DIMS, CAUSAL, HOW, N, True,
        )  # fmt: skip
    for i in tl.range(tl.maximum(first, full), end):
        state = _exact_tile(
            q, exact_keys, exact_values, i * N, state, row, mask, count, packed_length, exact_length, num_sinks,
            factors, strides, DIMS, CAUSAL, HOW, N, False,
        )  # fmt: skip
    if sink_logits is not None:
        of_head = batch * strides.sink_logits.batch + head * strides.sink_logits.head
        logit = sink_logits + (of_head + row * strides.sink_logits.token)
        state = with_sink_logit(state, tl.load(logit, mask=inside, other=float("-inf")))
    index = (batch * heads + head) * count + row
    channel = tl.arange(0, channels(VALUE_DIM))
    used = inside[:, None] & (channel < VALUE_DIM)[None, :]
    out = weighted_mean(state).to(attended.out.dtype.element_ty)
    tl.store(attended.out + index[:, None] * VALUE_DIM + channel[None, :], out, mask=used)
    tl.store(attended.lse + index, log_sum(state), mask=inside)


def attend_exact_tokens(problem: Problem, packed: Attended | None, offset: torch.Tensor | None = None) -> Attended:
    """Output [B, H_q, S, D_v] and log-sum-exp [B, H_q, S] of all tokens; `packed` is without `offset`."""
    query, keys, values, config = problem.query, problem.exact_keys, problem.exact_values, problem.configs.exact
    batch, heads, count, _ = query.shape
    attended = Attended(
        problem.empty(batch, heads, count, values.shape[3], dtype=query.dtype),
        problem.empty(batch, heads, count, dtype=torch.float32),
    )
    mask, mask_strides = problem.tiled_mask(config, keys.shape[2], problem.num_sinks, problem.packed_length)
    sink_logits, steps = problem.sink_logits, TokenSteps(0, 0, 0)
    if sink_logits is not None:
        steps = TokenSteps(*sink_logits.stride())
    of_vectors = [TokenSteps(*x.stride()[:3]) for x in (query, keys, values)]
    program = problem.program(
        _prefill_exact_kernel, config, DIMS=problem.dims, GROUP=problem.group,
        CAUSAL=problem.causal and mask is None, HOW=problem.arithmetic, TILE=config.tile,
    )  # fmt: skip
    arguments = (
        query, keys, values, packed, offset, mask, sink_logits, attended, count, problem.packed_length, keys.shape[2],
        problem.num_sinks, problem.rows, ScoreFactors(problem.scaling * LOG2E.value, float(problem.softcap or 0)),
        ExactTokenStrides(of_vectors[0], of_vectors[1], of_vectors[2], mask_strides, steps),
    )  # fmt: skip
    Launch(program, (heads, batch, triton.cdiv(count, config.tile.queries)), arguments).run()
    return attended
