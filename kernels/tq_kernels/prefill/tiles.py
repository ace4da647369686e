"""Packed tokens by flash attention over tiles of them, for every mask, soft cap, dtype and architecture.

Codes become float16 in registers, are multiplied by their scales there, and go to the tensor cores from shared memory.
"""

import torch
import triton
import triton.language as tl

from ..attention.masks import add_mask, mask_of, visible_span
from ..attention.scores import soft_cap
from ..attention.softmax import accumulate, begin_softmax, log_sum, weighted_mean
from ..bits.layout import BLOCK_TOKENS, at_head, channels, part_width, parts, tile_order
from ..launch import Launch
from . import tuning
from .arguments import Attended, PackedTokenStrides, RotatedQuery
from .problem import Problem
from .scaled import load_scaled_keys, load_scaled_values, load_scales, scale_pointers


@triton.jit
def _packed_tile(
    query, packed, scales, start, end, state, row, mask, count, num_sinks, softcap, strides,
    DIMS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, HOW: tl.constexpr, N: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One step over the packed tokens from `start`; `FULL`: all N of them are there, and no mask hides any."""
    PRECISION: tl.constexpr = HOW.precision
    q = query.rows
    blocks, order = tl.cdiv(end, BLOCK_TOKENS), tile_order(VALUE.bits, N)
    k = load_scaled_keys(packed[0], start, order, blocks, scales.key, DIMS.key_dim, KEY, HOW, q.dtype, not FULL)
    s = tl.dot(q, k.T, input_precision=PRECISION)
    v = load_scaled_values(packed[1], start, blocks, scales, N, DIMS.value_dim, VALUE, HOW, q.dtype, not FULL)
    there = start + order < end
    if query.offset is not None:
        s += query.offset[:, None]
    if HOW.softcap:
        s = soft_cap(s, softcap)
    if not FULL:  # what lies behind the last token may be NaN
        if VALUE.bits != 8:  # of others NaN goes with the score, which a mask may hide, and never with the value
            s += (scales.value * 0.0).to(tl.float32)[None, :]
            v = tl.where((scales.value == scales.value)[None, :], v, 0.0)
        if mask is not None:
            inside = (row < count)[:, None] & there[None, :]
            s = add_mask(s, mask, row, start + order + num_sinks, inside, strides)
        s = tl.where(there[None, :], s, float("-inf"))
        v = tl.where(there[None, :], v, 0.0)
    return accumulate(s, v.T, state, PRECISION)


@triton.jit(do_not_specialize=["count", "first_block", "packed_length", "num_sinks", "rows"])
def _prefill_packed_kernel(
    query, key, value, mask, spans, count, first_block, packed_length, num_sinks, rows, softcap, strides,
    DIMS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, GROUP: tl.constexpr, HOW: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One program = M queries of one query head of one sequence, over one split of the packed tokens.

    Of `packed_length` tokens those from `first_block` on (0 with a mask).  query: `RotatedQuery`; key, value: `Packed`;
    mask: `TiledMask` or None; spans: `Attended` of each split; strides: `PackedTokenStrides`; KEY and VALUE: `Code`.
    """
    DIM: tl.constexpr = DIMS.key_dim
    VALUE_DIM: tl.constexpr = DIMS.value_dim
    M: tl.constexpr = TILE.queries
    N: tl.constexpr = TILE.tokens
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_head = head // GROUP
    blocks = tl.cdiv(count, M)
    split, splits = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    begin = first_block * BLOCK_TOKENS
    tiles = tl.cdiv(packed_length - begin, N)
    span = tl.cdiv(tiles, splits)
    first, end = split * span, tl.minimum((split + 1) * span, tiles)
    masked = first  # tiles up to this one need the mask
    row = tl.program_id(0) % blocks * M + tl.arange(0, M)
    inside = row < count
    index = (batch * tl.num_programs(1) + head) * rows + row
    if mask is not None:
        mask = mask_of(mask, strides.mask, batch, head, tl.program_id(0) % blocks)
        first, end, _, tail = visible_span(mask.tiles, first, end)
        masked = tl.maximum(first, tl.minimum(tail, end))
    full = tl.maximum(masked, tl.minimum(end, (packed_length - begin) // N))
    packed = (
        at_head(key.packed, strides.key.packed, batch, kv_head),
        at_head(value.packed, strides.value.packed, batch, kv_head),
    )
    pointers = scale_pointers(key, value, batch, kv_head, strides)

    WIDTH: tl.constexpr = part_width(DIM, KEY.bits) * parts(KEY.bits)
    q = tl.load(query.rows + index[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], mask=inside[:, None], other=0)
    offset = None
    if query.offset is not None:
        offset = tl.load(query.offset + index, mask=inside, other=0)
    query = RotatedQuery(q, offset)
    state = begin_softmax(None, None, index, inside, M, VALUE_DIM)
    order = tile_order(VALUE.bits, N)
    scales = load_scales(pointers, begin + masked * N, order, packed_length)
    for tile in tl.range(masked, full):
        start = begin + tile * N
        coming = load_scales(pointers, start + N, order, packed_length)  # a step ahead: nothing waits
        state = _packed_tile(
            query, packed, scales, start, packed_length, state, row, mask, count, num_sinks, softcap, strides.mask,
            DIMS, KEY, VALUE, HOW, N, True,
        )  # fmt: skip
        scales = coming
    before = tl.maximum(masked - first, 0)
    for i in tl.range(0, before + tl.maximum(end - full, 0), num_stages=1):
        start = begin + tl.where(i < before, first + i, full + i - before) * N
        scales = load_scales(pointers, start, order, packed_length)
        state = _packed_tile(
            query, packed, scales, start, packed_length, state, row, mask, count, num_sinks, softcap, strides.mask,
            DIMS, KEY, VALUE, HOW, N, False,
        )  # fmt: skip

    acc = weighted_mean(state)
    if value.scale.dtype.element_ty == tl.float32:
        acc *= tl.load(pointers.value)
    index += split * (tl.num_programs(2) * tl.num_programs(1)).to(tl.int64) * rows
    tl.store(spans.lse + index, log_sum(state), mask=inside)
    channel = tl.arange(0, channels(VALUE_DIM))
    used = inside[:, None] & (channel < VALUE_DIM)[None, :]
    out = spans.out + index[:, None] * VALUE_DIM + channel[None, :]
    tl.store(out, acc.to(spans.out.dtype.element_ty), mask=used)


def attend_tiles(problem: Problem, rotated: RotatedQuery, first: int = 0) -> list[Attended]:
    """Spans of the packed tokens from `first`; their log-sum-exps are without the offset of the rotated query, but with
    a soft cap, which needs it inside."""
    batch, heads, rows, _ = rotated.rows.shape
    count, packed_length, key, value = problem.query.shape[2], problem.packed_length, problem.key, problem.value
    assert key is not None and value is not None
    config = tuning.choose_packed(problem.configs, count, problem.is_float8)
    blocks = triton.cdiv(count, config.tile.queries)
    splits = 1 if first else tuning.prefill_splits(blocks * heads * batch, packed_length, problem.device)
    spans = Attended(
        problem.empty(splits, batch, heads, rows, problem.dims.value_dim),
        problem.empty(splits, batch, heads, rows, dtype=torch.float32),
    )
    mask, mask_strides = problem.tiled_mask(config, packed_length, 0, problem.num_sinks)
    program = problem.program(
        _prefill_packed_kernel, config, **problem.formats, GROUP=problem.group, HOW=problem.arithmetic, TILE=config.tile
    )
    arguments = (
        rotated if problem.softcap is not None else RotatedQuery(rotated.rows, None), key.read, value.read, mask, spans,
        count, first // BLOCK_TOKENS.value, packed_length, problem.num_sinks, rows, float(problem.softcap or 0),
        PackedTokenStrides(key.layout.read_strides, value.layout.read_strides, mask_strides),
    )  # fmt: skip
    Launch(program, (blocks * splits, heads, batch), arguments).run()
    return [Attended(*span) for span in zip(*spans, strict=True)]
