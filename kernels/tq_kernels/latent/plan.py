"""Latent attention (MLA) over a packed cache: up to 16 query tokens per sequence, split along the cached tokens.

    S = Q_c C^T + Q_r R^T        O = softmax(S) C

C are latents, keys and values at once, R rotary keys; Q_c are queries times the keys' half of the model's expanding
weight.  Three launches: queries go into the space of the codes (`query`), programs attend to one split each (`attend`),
and the splits are joined (`merge`).  Where nothing is packed, there is no first one.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..attention.masks import MaskSteps, describe_mask, expand_logits
from ..attention.scores import LOG2E
from ..bits.to_float16 import decoders
from ..decode.arguments import Counts, QuerySteps
from ..decode.merge import NO_STEPS
from ..device import describe
from ..launch import Launch, Program, signature, signatures
from ..states import BLOCK_TOKENS, Layout, PairSteps, States, TokenSteps, Transform
from . import choices
from .arguments import (
    CODED_ROTARY,
    EXACT_ROTARY,
    NO_ROTARY,
    Chosen,
    ExactLatents,
    Given,
    LatentFlags,
    LatentLaunch,
    LatentShape,
    LatentSteps,
    PackedLatents,
    Queries,
    RotaryCode,
    Settings,
)
from .attend import latent_exact_kernel, latent_kernel, latent_rows_kernel
from .merge import MergePrograms, merge_programs
from .problem import LatentKey, LatentProblem, check_latents, has_whole_tiles
from .query import QUERY_ROWS, latent_query_kernel

_NO_TRANSFORM = Transform(None, None, None)


class LatentPlan(NamedTuple):
    """What is worked out once for a key."""

    query: Program | None
    attend: Program
    merge: MergePrograms
    query_grid: tuple[int, int, int]
    grid: tuple[int, int, int]
    splits: int
    all_splits: int
    operand: tuple[tuple[int, ...], torch.dtype]  # of the queries
    positions_dtype: torch.dtype
    rows: tuple[int, int] | None  # tokens and bytes of a tile of packed rows
    steps: LatentSteps


def decode_latents(
    content: torch.Tensor,
    rotary: torch.Tensor,
    latents: States | None,
    positions: States | None,
    tail_latents: torch.Tensor,
    tail_rotary: torch.Tensor,
    *,
    packed_length: int,
    scaling: float,
    sink_tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    causal: bool = True,
    indices: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
    residual_length: int = 0,
    max_length: int | None = None,
    rows: bool | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of up to 16 query tokens per sequence to sinks, packed tokens and a tail of latents, in this order.

    content:            queries of latents, [B, H, S, rank], bfloat16, float16 or float32; rank 128, 256 or 512
    rotary:             queries of rotary keys, [B, H, S, d], likewise; d 0, 32 or 64
    latents, positions: packed latents and rotary keys, one head, of which the first `packed_length` tokens count, or
                        None; behind the last one their blocks may hold anything; with `num_tokens`, the second
                        block of 8-bit latents must hold no NaN until tokens are packed there
    tail_latents, tail_rotary: [B, 1, n, rank] and [B, 1, n, d], in the queries' dtype
    indices:            int [B, S, k], the tokens that each query may see, each once (-1: none); no others are read
    rows, splits:       for tests: whether tokens are rows of the dots, a number of splits

    Other arguments as those of `decode`.  Returns means of latents [B, H, S, rank] in the queries' dtype, and the
    natural log-sum-exp of the scores, float32 [B, H, S]; a query that may see no token gets zeros and -inf.  Raises
    ValueError on what does not fit together.
    """
    problem = LatentProblem(
        describe(content.device), content, rotary, latents, positions, tail_latents, tail_rotary, packed_length,
        scaling, sink_tokens, mask, softcap, sink_logits, causal, indices, num_tokens, residual_length, max_length,
        rows, splits,
    )  # fmt: skip
    launches, out, lse = prepare_latents(problem)
    for launch in launches:
        launch.run()
    return out, lse


def prepare_latents(problem: LatentProblem) -> tuple[list[Launch], torch.Tensor, torch.Tensor]:
    """The launches of `decode_latents`, and what it returns once they have run; raises as it does."""
    content, rotary, latents, positions = problem.content, problem.rotary, problem.latents, problem.positions
    batch, heads, queries, rank = content.shape
    mask, mask_kind = describe_mask(problem.mask, content)
    chosen = None
    if problem.indices is not None:
        if problem.indices.dim() != 3 or problem.indices.is_floating_point():
            raise ValueError(f"expected indices [{batch}, {queries}, k] of integers, got {list(problem.indices.shape)}")
        indices = problem.indices.to(torch.int32).contiguous()
        chosen = Chosen(indices, indices.shape[2])
    sinks = problem.sink_tokens if problem.sink_tokens is not None and problem.sink_tokens[0].shape[2] else (None, None)
    exact = ExactLatents(content, rotary, problem.tail_latents, problem.tail_rotary, *sinks)
    sink_logits = expand_logits(problem.sink_logits, content)
    logits, listed, counted = signatures(sink_logits, None if chosen is None else chosen.indices, problem.num_tokens)
    plan = _plan(LatentKey(
        problem.device, signature(content), signature(rotary), latents and latents.layout,
        positions and positions.layout, signatures(*exact[2:]), problem.packed_length,
        None if mask is None else signature(mask), mask_kind, problem.softcap is not None, problem.causal, logits,
        listed, counted, problem.residual_length, problem.max_length, problem.rows, problem.splits,
    ))  # fmt: skip
    tail_length = problem.tail_latents.shape[2]
    counts = Counts(None, problem.num_tokens, None if problem.num_tokens is None else tail_length)
    num_sinks = 0 if sinks[0] is None else sinks[0].shape[2]
    settings = Settings(
        num_sinks, problem.residual_length, problem.scaling * LOG2E.value, float(problem.softcap or 0)
    )  # fmt: skip
    work = content.new_empty(batch * plan.all_splits * heads * queries * (rank + 1), dtype=torch.float32)
    launches: list[Launch] = []
    arguments: tuple[Any, ...]
    if plan.query is None:
        arguments = (exact, mask, chosen, counts, work, tail_length, settings, plan.steps)
    else:
        assert latents is not None and positions is not None
        launch, prepared = _prepare_queries(plan, problem, latents, positions)
        launches.append(launch)
        packed = PackedLatents(latents.packed, latents.read.scale, *_read(positions))
        given = (counts, work, plan.splits, problem.packed_length, latents.packed.shape[2])
        if plan.rows is None:
            arguments = (prepared, packed, exact, mask, chosen, *given, tail_length, settings, plan.steps)
        else:
            rows = _descriptor(latents.packed, *plan.rows)
            arguments = (rows, prepared, packed, exact, mask, *given, tail_length, settings, plan.steps)
    launches.append(Launch(plan.attend, plan.grid, arguments))
    out, lse = (
        torch.empty_like(content, memory_format=torch.contiguous_format),
        content.new_empty(batch, heads, queries, dtype=torch.float32),
    )
    steps = NO_STEPS if sink_logits is None else QuerySteps(*sink_logits.stride())
    transform = latents.transform if plan.splits and latents is not None else _NO_TRANSFORM
    join, merge, channels = plan.merge
    grid, splits, all_splits = (batch * heads * queries, rank // channels, 1), plan.splits, plan.all_splits
    if join is not None:
        joined = content.new_empty(2 * grid[0] * (rank + 1), dtype=torch.float32)
        launches.append(Launch(join, grid, (work, joined, splits, all_splits, heads * queries)))
        work, splits, all_splits, grid = joined, 1, 2, (grid[0], 1, 1)
    launches.append(Launch(merge, grid, (work, transform, sink_logits, out, lse, splits, all_splits, heads, steps)))
    return launches, out, lse


def _prepare_queries(
    plan: LatentPlan, problem: LatentProblem, latents: States, positions: States
) -> tuple[Launch, Queries]:
    """The first launch, and what it writes."""
    content, rotary = problem.content, problem.rotary
    batch, heads, queries, _ = content.shape
    assert plan.query is not None
    shape, dtype = plan.operand
    prepared = Queries(
        torch.empty(shape, dtype=dtype, device=content.device),
        torch.empty(batch, heads * queries, rotary.shape[3], dtype=plan.positions_dtype, device=content.device),
        torch.empty(3, batch, heads * queries, dtype=torch.float32, device=content.device),
    )
    transform = _NO_TRANSFORM if positions.coding.exact else positions.transform
    arguments = (
        Given(content, rotary), prepared, latents.transform, latents.head_scale, transform, positions.head_scale,
        problem.scaling, plan.steps,
    )  # fmt: skip
    return Launch(plan.query, plan.query_grid, arguments), prepared


def _read(positions: States) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Packed rotary keys, if there are any, and their scales per token."""
    return (positions.packed if positions.head_dim else None), positions.scale


def _descriptor(packed: torch.Tensor, tokens: int, row: int) -> Any:
    """Packed latents [B, 1, blocks, bytes] as rows of tokens, in tiles of so many."""
    batch, _, blocks, _ = packed.shape
    count = (batch - 1) * (packed.stride(0) // row) + blocks * BLOCK_TOKENS
    return TensorDescriptor(packed, [count, row], [row, 1], [tokens, row])


@lru_cache(maxsize=256)
def _plan(given: LatentKey) -> LatentPlan:
    """Raises as `decode_latents` does."""
    check_latents(given)
    device, content, latents, positions = given.device, given.content, given.latents, given.positions
    batch, heads, queries, rank = content.shape
    width, columns = given.rotary.shape[3], heads * (queries if given.chosen is None else 1)
    packs = latents is not None and positions is not None and given.packed_length > 0
    bits = latents.coding.bits if packs and latents is not None else 16
    config = _config(given, bits, columns)
    tiles = triton.cdiv(columns, config.columns)
    programs = batch * tiles * (1 if given.chosen is None else queries)
    tail = given.exact[0]
    assert tail is not None
    splits = 0
    if packs:
        tokens = given.packed_length if given.chosen is None else given.chosen.shape[2]
        splits = given.splits or choices.latent_splits(config, programs, tokens, device.multiprocessors)
    exact = choices.latent_exact_splits(config, programs, tail.shape[2], device.multiprocessors, splits > 0)
    all_splits = splits + exact + (given.exact[2] is not None)
    shape = LatentShape(rank, width, max(width, 16), heads, queries, config.columns)
    stale = splits > 0 and bits == 8 and (given.chosen is not None or given.packed_length % BLOCK_TOKENS > 0)
    flags = LatentFlags(
        given.capped, given.causal and given.mask is None and queries > 1, given.mask_kind, given.chosen is not None,
        stale,
    )  # fmt: skip
    pdl, arithmetic = device.starts_dependents, choices.latent_arithmetic(content.dtype, device)
    operand: tuple[tuple[int, ...], torch.dtype] = ((batch, heads * queries, rank), content.dtype)
    query, positions_dtype = None, content.dtype
    if not splits:
        constants = dict(SHAPE=shape, FLAGS=flags, PRECISION=arithmetic.precision, STEP=config.tile,
                         STAGES=config.stages, PDL=pdl)  # fmt: skip
        attend = Program(latent_exact_kernel, device, constants, dict(num_warps=config.warps, num_stages=config.stages))
    else:
        assert latents is not None and positions is not None
        if config.rows:
            arithmetic = choices.rows_arithmetic(device)
        coded = _rotary_code(positions)
        if coded.kind == CODED_ROTARY:
            positions_dtype = torch.float32 if content.dtype == torch.float32 else torch.float16
        two_terms = config.rows and device.is_nvidia
        operand = (operand[0], torch.float32 if content.dtype == torch.float32 else torch.float16)
        if two_terms:
            operand = ((batch, tiles, 2 * config.columns, rank), torch.uint8)
        attend = _packed_program(given, config, shape, coded, flags, arithmetic)
        constants = dict(SHAPE=shape, ROTARY=coded, FP8=two_terms, PTX=device.is_nvidia, ROWS=QUERY_ROWS, PDL=pdl)
        query = Program(latent_query_kernel, device, constants, {})
    rotated = splits > 0 and latents is not None and latents.coding.rotated
    merge = merge_programs(device, rank, queries, batch * heads * queries, all_splits, rotated)
    padded = tiles * config.columns if query is not None else 0
    return LatentPlan(
        query, attend, merge, (triton.cdiv(max(padded, heads * queries), QUERY_ROWS), batch, 1),
        (tiles, programs // tiles, all_splits), splits, all_splits, operand, positions_dtype,
        (config.tile, rank * bits // 8) if config.rows and splits else None, _steps(given),
    )  # fmt: skip


def _config(given: LatentKey, bits: int, columns: int) -> choices.LatentConfig:
    """bits: of packed latents, 16 where none are; columns: of a sequence, or of a query where tokens are chosen."""
    rows, rank, width, device = given.rows, given.content.shape[3], given.rotary.shape[3], given.device
    if given.chosen is not None or (bits == 8 and not has_whole_tiles(given)):
        rows = False
    config = choices.latent_config(bits, rank, width, columns, given.content.dtype, device, rows)
    if config.rows and given.latents is not None and given.latents.blocks * BLOCK_TOKENS < config.tile:
        return choices.SHORT_ROWS
    return config


def _rotary_code(positions: Layout) -> RotaryCode:
    """How packed rotary keys are read, if there are any."""
    if not positions.head_dim:
        return RotaryCode(NO_ROTARY, (0, 0), False)
    if positions.coding.exact:
        return RotaryCode(EXACT_ROTARY, (0, 0), False)
    return RotaryCode(CODED_ROTARY, positions.coding.code.table, positions.strides[1] is not None)


def _packed_program(
    given: LatentKey, config: choices.LatentConfig, shape: LatentShape, rotary: RotaryCode, flags: LatentFlags,
    arithmetic: Any,
) -> Program:  # fmt: skip
    device, latents = given.device, given.latents
    assert latents is not None
    launch = LatentLaunch(config.tile, config.stages, config.exact_step, device.starts_dependents)
    constants: dict[str, Any] = dict(
        SHAPE=shape, CODE=latents.coding.code, ROTARY=rotary, FLAGS=flags, ARITHMETIC=arithmetic,
        MODE=decoders(device), LAUNCH=launch,
    )  # fmt: skip
    options: dict[str, Any] = dict(num_warps=config.warps, num_stages=config.stages)
    if device.starts_dependents:
        options["launch_pdl"] = True
    return Program(latent_rows_kernel if config.rows else latent_kernel, device, constants, options)


def _steps(given: LatentKey) -> LatentSteps:
    def of_tokens(x: Any) -> TokenSteps:
        return TokenSteps(*x.strides[:3])

    def of_packed(layout: Any) -> PairSteps:
        """To the next sequence of what is packed, and of its scales."""
        if layout is None:
            return PairSteps(0, 0)
        scale = layout.strides[1]
        return PairSteps(layout.strides[0][0], 0 if scale is None else scale[0])

    tail_latents, tail_rotary, sink_latents, sink_rotary = given.exact
    return LatentSteps(
        QuerySteps(*given.content.strides[:3]), QuerySteps(*given.rotary.strides[:3]), of_packed(given.latents),
        of_packed(given.positions), of_tokens(tail_latents), of_tokens(tail_rotary),
        of_tokens(sink_latents or tail_latents), of_tokens(sink_rotary or tail_rotary),
        MaskSteps(*((0, 0, 0, 0) if given.mask is None else given.mask.strides)),
    )  # fmt: skip
