"""Decode attention over a packed cache: up to 16 query tokens per sequence, split along the cached tokens.

Two launches.  The first attends: a program takes one split of the packed tokens (`packed`) or of those still in the
model's dtype (`exact`) of one sequence and KV head.  The second (`merge`) undoes rotation and centre of the values in
the sum of the packed splits, and joins it with the exact ones.  Where the rotation of keys is no Hadamard matrix, one
more launch rotates the query before.

Query columns of a KV head are head after head, `queries` of each, in tiles of `columns`.  Scores are in base 2.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .. import tuning
from ..attention.masks import MaskSteps, describe_mask, expand_logits
from ..attention.scores import LOG2E, ScoreFactors
from ..device import Device, describe
from ..launch import Launch, Program, new, signature, signatures
from ..states import BLOCK_TOKENS, Layout, States, TokenSteps, no_layout
from ..tuning import Arithmetic
from .arguments import (
    Codes,
    Counts,
    ExactLaunch,
    ExactTokens,
    Flags,
    PackedLaunch,
    QuerySteps,
    Shape,
    Sizes,
    Strides,
)
from .exact import decode_exact_kernel
from .merge import merge_launch, merge_program
from .packed import decode_kernel
from .problem import Key, Problem, check
from .query import by_matrix, rotate_query_kernel

_LOG2E = LOG2E.value
_NO_COUNTS = Counts()


class Plan(NamedTuple):
    """What is worked out once for a key."""

    rotate: Program | None  # of the query, where that takes a launch of its own
    attend: Program
    merge: Program
    rotate_grid: tuple[int, int, int]
    grid: tuple[int, int, int]
    shape: tuple[int, int, int, int]  # of the output
    blocks: int
    tail_length: int
    splits: int  # of packed tokens
    all_splits: int
    work: int  # elements
    sizes: Sizes
    strides: Strides


def decode(
    query: torch.Tensor,
    key: States | None,
    value: States | None,
    tail_keys: torch.Tensor,
    tail_values: torch.Tensor,
    *,
    packed_length: int,
    scaling: float,
    sink_tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    causal: bool = True,
    lengths: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
    residual_length: int = 0,
    max_length: int | None = None,
    arithmetic: Arithmetic | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of up to 16 query tokens per sequence to sink tokens, packed tokens and a tail, in this order.

    query:         [B, H_q, S, D], bfloat16, float16 or float32
    key, value:    packed states, of which the first `packed_length` tokens count, or None; behind the last one their
                   blocks may hold anything
    tail_keys, tail_values: [B, H_kv, n, D] and [B, H_kv, n, D_v], n >= 0, in the query's dtype
    sink_tokens:   keys and values, likewise, or None
    mask:          [1 or B, 1 or H_q, S, all tokens or more], bool (True takes part) or float (added), or None: causal,
                   the last query seeing every token, or everything if not `causal`
    softcap:       scores become softcap * tanh(scores / softcap), before the mask
    sink_logits:   [1 or B, H_q, 1 or S], one more logit per query that takes weight and gives nothing
    lengths:       int32 [B], packed tokens of each sequence that count, if fewer than `packed_length`
    num_tokens:    int64 [] on the device, tokens in all, the first of them the sinks, which need not all be there: of
                   the others all but the newest `residual_length`, and up to 63 more, are packed, in whole blocks, and
                   the tail is a ring (`PreallocatedStates` in `tq_cache/formats/states.py`).  Takes one query;
                   `packed_length` is then the most that can be packed, and `max_length` the most that `num_tokens` says
    arithmetic, splits: for tests: another way to compute than the device's, a number of splits

    Returns the output [B, H_q, S, D_v] in the query's dtype, and the natural log-sum-exp of the scores, float32
    [B, H_q, S]; a query that may see no token gets zeros and -inf.  Raises ValueError on what does not fit together.
    """
    problem = new(Problem, (
        describe(query.device), query, key, value, tail_keys, tail_values, packed_length, scaling,
        sink_tokens, mask, softcap, sink_logits, causal, lengths, num_tokens, residual_length, max_length,
        arithmetic, splits,
    ))  # fmt: skip
    launches, out, lse = prepare(problem)
    for launch in launches:
        launch.run()
    return out, lse


def prepare(problem: Problem) -> tuple[list[Launch], torch.Tensor, torch.Tensor]:
    """The launches of `decode`, and what it returns once they have run; raises as it does."""
    device, query, key, value, tail_keys, tail_values, packed_length, scaling = problem[:8]
    sink_tokens, mask, softcap, sink_logits, causal, lengths, num_tokens, *rest = problem[8:]
    mask, mask_kind = describe_mask(mask, query)
    sink_keys = sink_values = None
    if sink_tokens is not None and sink_tokens[0].shape[2]:
        sink_keys, sink_values = sink_tokens
    sink_logits = expand_logits(sink_logits, query)
    counted = lengths is not None or num_tokens is not None
    present = signatures(lengths, num_tokens) if counted else (None, None)
    plan = _plan(new(Key, (
        device, signature(query), key and key.layout, value and value.layout, signature(tail_keys),
        signature(tail_values), packed_length, sink_keys if sink_keys is None else signature(sink_keys),
        sink_values if sink_values is None else signature(sink_values), mask if mask is None else signature(mask),
        mask_kind, softcap is not None, sink_logits if sink_logits is None else signature(sink_logits), causal,
        present, *rest,
    )))  # fmt: skip
    counts = _NO_COUNTS
    if counted:
        counts = Counts(lengths, num_tokens, None if num_tokens is None else plan.tail_length)
    work = query.new_empty(plan.work, dtype=torch.float32)
    exact, scales = new(ExactTokens, (tail_keys, tail_values, sink_keys, sink_values)), _scales(scaling, softcap)
    launches: list[Launch] = []
    arguments: tuple[Any, ...]
    if plan.splits:
        assert key is not None and value is not None  # checked by the plan
        rotated_query = None
        if plan.rotate is not None:
            rotated_query = torch.empty(query.shape, dtype=torch.float32, device=query.device)
            arguments = (query, key.read_as_keys.transform, rotated_query, plan.strides.query)
            launches.append(Launch(plan.rotate, plan.rotate_grid, arguments))
        arguments = (
            query, rotated_query, key.read_as_keys, value.read, exact, mask, counts, work, plan.splits, packed_length,
            plan.blocks, plan.tail_length, plan.sizes, scales, plan.strides,
        )  # fmt: skip
    else:
        arguments = (query, exact, mask, counts, work, plan.tail_length, plan.sizes, scales, plan.strides)
    launches.append(Launch(plan.attend, plan.grid, arguments))
    merge, out, lse = merge_launch(
        plan.merge, work, query, value, sink_logits, plan.shape, plan.splits, plan.all_splits
    )  # fmt: skip
    launches.append(merge)
    return launches, out, lse


@lru_cache(maxsize=256)
def _scales(scaling: float, softcap: float | None) -> ScoreFactors:
    return ScoreFactors(scaling * _LOG2E, float(softcap or 0))


@lru_cache(maxsize=256)
def _plan(given: Key) -> Plan:
    """Raises as `decode` does.

    With every step a length is another, and the plan made anew, once for all layers that are alike; what is compiled
    stays.
    """
    device, tail = given.device, given.tail_keys.shape
    key = given.key or no_layout(*tail[:2], tail[3])
    value = given.value or no_layout(*tail[:2], given.tail_values.shape[3])
    check(given, key, value)
    batch, heads, queries, dim = given.query.shape
    kv_heads, tail_length, value_dim = tail[1], tail[2], given.tail_values.shape[3]
    arithmetic = given.arithmetic or tuning.decode_arithmetic(given.query.dtype, device)
    columns = heads // kv_heads * queries
    shape = Shape(dim, value_dim, heads // kv_heads, queries, tuning.tile_columns(columns, arithmetic))
    tiles = triton.cdiv(columns, shape.columns)
    config = tuning.decode_config(
        value.coding.bits, shape.columns, value_dim, (key.shape[3] + value.shape[3]) // BLOCK_TOKENS,
        device.shared_memory, arithmetic.operand == tl.float8e4nv,
    )  # fmt: skip
    programs, splits = batch * kv_heads * tiles, given.splits if given.packed_length else 0
    if splits is None:
        splits = tuning.packed_splits(config, programs, given.packed_length, device.multiprocessors)
    all_splits = splits + (given.sink_keys is not None)
    all_splits += tuning.exact_splits(programs, tail_length, device.multiprocessors, beside=splits > 0)
    if splits:
        attend = _packed_program(given, key, value, shape, arithmetic, config)
    else:
        attend = _exact_program(given, shape, arithmetic)
    return Plan(
        _rotate_program(device, shape, arithmetic) if splits and by_matrix(key.coding.rotated, dim) else None, attend,
        merge_program(device, value_dim, shape.group, queries, all_splits, device.starts_dependents),
        (triton.cdiv(columns, 16) * triton.cdiv(dim, 64), kv_heads, batch),
        (kv_heads * tiles, batch, all_splits),  # exact tokens last: see `tuning.packed_splits`
        (batch, heads, queries, value_dim), key.blocks, tail_length, splits, all_splits,
        batch * kv_heads * all_splits * columns * (value_dim + 1),
        Sizes(0 if given.sink_keys is None else given.sink_keys.shape[2], given.residual_length),
        _strides(given, key, value, splits > 0),
    )  # fmt: skip


def _strides(given: Key, key: Layout, value: Layout, packed: bool) -> Strides:
    tail_keys, tail_values = given.tail_keys, given.tail_values
    return Strides(
        QuerySteps(*given.query.strides[:3]),
        key.read_strides if packed else None,
        value.read_strides if packed else None,
        TokenSteps(*tail_keys.strides[:3]),
        TokenSteps(*tail_values.strides[:3]),
        TokenSteps(*(given.sink_keys or tail_keys).strides[:3]),
        TokenSteps(*(given.sink_values or tail_values).strides[:3]),
        MaskSteps(*((0, 0, 0, 0) if given.mask is None else given.mask.strides)),
    )


def _flags(given: Key, of_bytes: bool = False) -> Flags:
    """of_bytes: values of 8 bits are packed."""
    queries, tail = given.query.shape[2], given.tail_keys.shape[2]
    causal = given.causal and given.mask is None and queries > 1
    stale = of_bytes and (given.packed_length % BLOCK_TOKENS > 0 or given.counts[0] is not None)
    return Flags(given.capped, causal, causal and tail < queries - 1, given.mask_kind, stale)


def _rotate_program(device: Device, shape: Shape, arithmetic: Arithmetic) -> Program:
    constants = dict(DIM=shape.dim, GROUP=shape.group, QUERIES=shape.queries, PRECISION=arithmetic.precision)
    return Program(rotate_query_kernel, device, constants, {})


def _packed_program(
    given: Key, key: Layout, value: Layout, shape: Shape, arithmetic: Arithmetic, config: tuning.Config
) -> Program:
    device, dims = given.device, (shape.dim, shape.value_dim)
    step, _ = tuning.exact_steps(dims, given.query.dtype.itemsize, device.shared_memory)
    repeats = max(config.tile // 16 // config.warps, 1)
    terms = 2 if arithmetic.operand == tl.float8e4nv else 1
    launch = PackedLaunch(
        config.tile, config.stages, masked=key.blocks * BLOCK_TOKENS < config.tile,
        exact_step=min(step, tuning.EXACT_BESIDE), pdl=device.starts_dependents, slots=config.tile // (16 * repeats),
        repeats=repeats, terms=terms, twins=max(16 // (shape.columns * terms), 1),
    )  # fmt: skip
    constants = dict(
        SHAPE=shape, CODES=Codes(*key.coding.code, *value.coding.code), ARITHMETIC=arithmetic, LAUNCH=launch,
        FLAGS=_flags(given, value.coding.bits == 8),
    )  # fmt: skip
    options = dict(num_warps=config.warps, num_stages=config.stages)
    if config.registers and arithmetic.ptx:
        options["maxnreg"] = config.registers
    return Program(decode_kernel, device, constants, options)


def _exact_program(given: Key, shape: Shape, arithmetic: Arithmetic) -> Program:
    device, itemsize, dims = given.device, given.query.dtype.itemsize, (shape.dim, shape.value_dim)
    step, stages = tuning.exact_steps(dims, itemsize, device.shared_memory)
    long = given.tail_keys.shape[2] > tuning.MAX_EXACT_SPLITS * tuning.EXACT_TOKENS
    stages = stages if long and given.query.dtype != torch.float32 else 1
    launch = ExactLaunch(step, stages, device.starts_dependents)
    constants = dict(SHAPE=shape, FLAGS=_flags(given), PRECISION=arithmetic.precision, LAUNCH=launch)
    options = dict(num_warps=tuning.exact_warps(dims, itemsize), num_stages=stages)
    return Program(decode_exact_kernel, device, constants, options)
