"""Decode attention over a packed cache: up to 16 query tokens per sequence, split along the cached tokens.

Scores are computed transposed, tokens on M and the queries of one KV head (all heads of its group) on N:

    S^T[tokens, group] = K[tokens, D] . Q^T[D, group]        O^T[D, group] += V^T[D, tokens] . P^T[tokens, group]

so each packed byte is read and decoded once for the whole group, and codes, turned into e4m3 bytes in registers, go to
the fp8 tensor cores in the order in which they lie.  A tile of tokens is one block of values, or two.

Three launches.  The first (`decode_prepare`) brings the query into the space of the key codes and attends to the
tokens that are still in the model's dtype, which gives some more splits; the second attends to the packed tokens; the
third undoes rotation and centre of the values in the sum of the packed splits, and joins it with the exact ones.

Query columns of a KV head are head after head, `QUERIES` of each, in tiles of `COLUMNS`.  Scores are in base 2.
"""

from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .decode_merge import launch_merge, merge_warps
from .decode_prepare import EXACT_TILE, decode_prepare_kernel
from .device import capability, is_nvidia, multiprocessors, shared_memory
from .launch import aligned, launch
from .primitives import (
    BLOCK_TOKENS,
    decode_rows,
    exp2,
    gather_terms,
    keep_tables,
    load_keys,
    load_scales,
    load_values,
    part_width,
    parts,
    ptx_inverse,
    ptx_log2,
    rough_log2,
    side_by_side,
    spread_terms,
    to_rows,
    to_tokens,
    unit,
)
from .scores import FULL_MASK, LOG2E, NO_MASK, ROW_MASK, apply_mask, lengths_now, soft_cap
from .states import States, no_states
from .tuning import choose, choose_splits, exact_steps

P_SHIFT = tl.constexpr(7.5)  # probabilities times 2**7.5, at most 2**7.6 with `rough_log2`, to use the range of e4m3
LIFT = tl.constexpr(32.0)  # of the remainder of p: half a step at 2**7.6 is 8, times 32 still in range
MAX_QUERIES = 16
_NUMBERS = count()
MAX_EXACT_SPLITS = 8
QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DTYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _packed_scores(
    q, rows, scale, shift, softcap, SOFTCAP: tl.constexpr, TERMS: tl.constexpr, TWINS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores [tokens, columns] of decoded key rows; `scale` [tokens], or a number, is their factor."""
    s = gather_terms(tl.dot(rows, q, input_precision=PRECISION), TERMS, TWINS, 1)
    s *= scale if scale.numel == 1 else scale[:, None]
    if SOFTCAP:
        s = soft_cap(s + shift[None, :], softcap)
    return s


@triton.jit
def _decode_values(
    base, start, blocks,
    VALUE: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr, COMPUTE: tl.constexpr,
    PTX: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Values of `TILE` tokens, [CHANNELS, TILE]: of two blocks, block by block, each lying in one piece."""
    BITS: tl.constexpr = VALUE[0]
    TABLE: tl.constexpr = VALUE[1]
    planes = load_values(base, start, blocks, BITS, HEAD_DIM, CHANNELS, MASKED)
    channels = decode_rows(planes, BITS, TABLE, COMPUTE, PTX)
    if TILE == 2 * BLOCK_TOKENS:
        planes = load_values(base, start + BLOCK_TOKENS, blocks, BITS, HEAD_DIM, CHANNELS, MASKED)
        channels = side_by_side(channels, decode_rows(planes, BITS, TABLE, COMPUTE, PTX))
    return channels


@triton.jit
def _sum_repeats(x, REPEATS: tl.constexpr):
    """[R, N] by score row, summed over the rows that a thread has of different repeats."""
    return tl.sum(x.reshape(REPEATS, x.shape[0] // REPEATS, x.shape[1]), 0)


@triton.jit
def _store_split(
    out, total, zeros, peak, shift, scale, partial, partial_lse, used,
    VALUE_DIM: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Divides by the sum; writes output and log-sum-exp of a split."""
    total = tl.sum(total, 0)
    out = (out * scale + tl.sum(zeros, 0)[None, :]) / tl.maximum(total, 1e-30)[None, :]
    lse = tl.where(total > 0, peak + shift - P_SHIFT + tl.log2(tl.maximum(total, 1e-30)), float("-inf"))
    channel = tl.arange(0, CHANNELS)
    tl.store(partial[None, :] + channel[:, None], out, mask=used[None, :] & (channel < VALUE_DIM)[:, None])
    tl.store(partial_lse, lse, mask=used)


@triton.jit(do_not_specialize=["tokens", "blocks", "others", "behind"])
def _decode_split_kernel(
    work, key, value, mask, lengths, total, tokens, blocks, others, behind, sizes, softcap, strides,
    DIMS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr,
    FLAGS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr,
    PRECISION: tl.constexpr, LAUNCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program = one split of the packed tokens of one sequence and KV head, for a tile of its query columns.

    work = (operand, factors, partial, partial_lse), key = (packed, scale), value = (packed, scale[, zero]), `tokens`
    packed ones in `blocks`, `others` splits of exact tokens, `behind` of them behind the packed ones, sizes = (sinks,
    residual length), strides = (key, key scale, value, value scale, mask), KEY and VALUE = (bits, table), FLAGS =
    (SOFTCAP, CAUSAL, MASK), LAUNCH = (tokens of a tile, warps, loads need a mask, stages).  With `total`, int64 on the
    device, it says how many tokens are packed.
    """
    SOFTCAP: tl.constexpr = FLAGS[0]
    CAUSAL: tl.constexpr = FLAGS[1]
    MASK: tl.constexpr = FLAGS[2]
    TILE: tl.constexpr = LAUNCH[0]
    MASKED: tl.constexpr = LAUNCH[2]
    KEY_BITS: tl.constexpr = KEY[0]
    VALUE_BITS: tl.constexpr = VALUE[0]
    KEY_TABLE: tl.constexpr = KEY[1]
    VALUE_TABLE: tl.constexpr = VALUE[1]
    DIM: tl.constexpr = DIMS[0]
    WIDTH: tl.constexpr = part_width(DIM, KEY_BITS)
    CHANNELS: tl.constexpr = max(triton.next_power_of_2(DIMS[1]), 64)
    REPEATS: tl.constexpr = max(TILE // 16 // LAUNCH[1], 1)
    SLOTS: tl.constexpr = TILE // (16 * REPEATS)
    TWINS: tl.constexpr = max(16 // (COLUMNS * TERMS), 1)
    TILES: tl.constexpr = (GROUP * QUERIES + COLUMNS - 1) // COLUMNS

    batch, kv_head = tl.program_id(2).to(tl.int64), (tl.program_id(1) // TILES).to(tl.int64)
    pair, first_column = batch * (tl.num_programs(1) // TILES) + kv_head, tl.program_id(1) % TILES * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    limit = tokens + behind - QUERIES + 1 + column % QUERIES  # packed tokens that a column may see
    tokens = lengths_now(total, 0, tokens, sizes[1])[1]
    if lengths is not None:
        tokens = tl.minimum(tl.load(lengths + batch), tokens)
    if PTX:
        keep_tables(tokens, KEY_TABLE, VALUE_TABLE)
    index = batch * tl.num_programs(1) + tl.program_id(1)
    K: tl.constexpr = parts(KEY_BITS) * WIDTH
    if PDL:  # all programs wait for the first launch, so that the end of this one is the end of both
        tl.extra.cuda.gdc_wait()
    n = tl.arange(0, TERMS * COLUMNS * TWINS)[None, :] // TWINS  # see `spread_terms`
    q = tl.load(work[0] + (index * (TERMS * COLUMNS) + n) * K + tl.arange(0, K)[:, None])
    factor = tl.load(work[1] + index * (1 + COLUMNS))
    offset = tl.load(work[1] + index * (1 + COLUMNS) + 1 + tl.arange(0, COLUMNS))
    key_packed = key[0] + batch * strides[0][0] + kv_head * strides[0][1]
    key_scale = key[1] + batch * strides[1][0] + kv_head * strides[1][1]
    value_packed = value[0] + batch * strides[2][0] + kv_head * strides[2][1]
    value_scale = value[1] + batch * strides[3][0] + kv_head * strides[3][1]
    mask_base = batch * strides[4][0]
    mask_columns = tl.where(column < GROUP * QUERIES, column, 0)
    mask_head = kv_head * GROUP + mask_columns // QUERIES
    mask_columns = mask_base + mask_head * strides[4][1] + mask_columns % QUERIES * strides[4][2]

    row = to_rows(tl.arange(0, TILE), SLOTS, REPEATS)  # the token of a score row
    peak = tl.full((COLUMNS,), -1e30, tl.float32)  # finite: exp2(-inf - peak) is 0 even where all is masked
    weight = tl.zeros((TILE // REPEATS, COLUMNS), tl.float32)  # summed over its rows at the end, like `zeros`
    zeros = tl.zeros((TILE // REPEATS, COLUMNS), tl.float32)
    out = tl.zeros((CHANNELS, COLUMNS), tl.float32)
    tiles = tl.cdiv(tokens, TILE)
    per_split = tl.cdiv(tiles, tl.num_programs(0))
    end = tl.minimum((tl.program_id(0) + 1) * per_split, tiles)
    # Stages given here: else Triton prefetches only what goes to a dot, and not the zeros.
    for tile in tl.range(tl.program_id(0) * per_split, end, num_stages=LAUNCH[3]):
        # The last tile is moved back so that no load passes the last block; what it repeats is masked out.
        first = tile * TILE
        start = first if MASKED else tl.minimum(first, blocks * BLOCK_TOKENS - TILE)
        keys = load_keys(key_packed, start, blocks, KEY_BITS, DIM, TILE, WIDTH, SLOTS, REPEATS, MASKED)
        scale = factor
        if KEY_BITS != 8:
            scale = load_scales(key_scale, start, blocks, TILE, SLOTS, REPEATS, MASKED) * factor
        rows = decode_rows(keys, KEY_BITS, KEY_TABLE, COMPUTE, PTX)
        s = _packed_scores(q, rows, scale, offset, softcap, SOFTCAP, TERMS, TWINS, PRECISION)
        new = (start - first + row).to(tl.uint32, bitcast=True) < (tokens - first).to(tl.uint32, bitcast=True)
        s = apply_mask(s, mask, mask_base, mask_columns, strides[4][3], sizes[0] + start + row, new, MASK)
        if CAUSAL:
            s = tl.where((start + row)[:, None] < limit[None, :], s, float("-inf"))
        # What goes to the dot is the probability times the scale of its value: the largest is to suit e4m3.
        shift = tl.zeros((TILE,), tl.float32)
        if VALUE_BITS != 8:
            scale = tl.maximum(load_scales(value_scale, start, blocks, TILE, SLOTS, REPEATS, MASKED), 1e-7)
            if PTX:  # the scale in the exponent: fewer instructions, but for float32 too coarse
                shift = ptx_log2(scale)
        s += tl.where(new, shift, float("-inf"))[:, None]
        highest = s
        if VALUE_BITS != 8 and not PTX:
            highest = s + rough_log2(scale)[:, None]
        previous = peak
        peak = tl.maximum(peak, tl.max(highest, 0))
        alpha = exp2(previous - peak, PTX)
        p = exp2(s - (peak - P_SHIFT)[None, :], PTX)
        probability = p
        if VALUE_BITS != 8:
            if PTX:
                probability = p * ptx_inverse(scale)[:, None]
            else:
                p *= scale[:, None]
        weight = weight * alpha[None, :] + _sum_repeats(probability, REPEATS)
        if len(value) == 3:
            zero = value[2] + batch * strides[3][0] + kv_head * strides[3][1]
            zero = load_scales(zero, start, blocks, TILE, SLOTS, REPEATS, MASKED)
            zeros = zeros * alpha[None, :] + _sum_repeats(probability * zero[:, None], REPEATS)
        p = spread_terms(to_tokens(p, SLOTS, REPEATS), TERMS, TWINS, LIFT, COMPUTE, PTX)
        channels = _decode_values(value_packed, start, blocks, VALUE, DIMS[1], TILE, CHANNELS, COMPUTE, PTX, MASKED)
        tile_out = gather_terms(tl.dot(channels, p, input_precision=PRECISION), TERMS, TWINS, LIFT)
        out = out * alpha[None, :] + tile_out  # an ordinary add: the tensor core's own sum keeps 14 bits

    if PDL:  # not before: programs of the next launch would take the places of some of this one
        tl.extra.cuda.gdc_launch_dependents()
    if SOFTCAP:
        offset = tl.zeros((COLUMNS,), tl.float32)  # is in the scores
    value_factor = unit(VALUE_BITS, VALUE_TABLE, COMPUTE)
    if VALUE_BITS == 8:
        value_factor *= tl.load(value_scale)
    index = ((pair * (tl.num_programs(0) + others) + tl.program_id(0)) * GROUP * QUERIES) + column
    _store_split(
        out, weight, zeros, peak, offset, value_factor, work[2] + index * DIMS[1], work[3] + index,
        column < GROUP * QUERIES, DIMS[1], CHANNELS,
    )  # fmt: skip


class Path(NamedTuple):
    """How a device computes: the type that goes to the dots, inline assembly or not, and how float32 is multiplied.

    pdl: programmatic dependent launch.  The programs of the second and third launch start before the previous launch
         has ended, and wait for its end (`gdc_wait`) where they first read what it has written.
    """

    compute: torch.dtype
    ptx: bool = False
    precision: str = "ieee"
    pdl: bool = False


@lru_cache
def choose_path(dtype: torch.dtype, capability: tuple[int, int] | None) -> Path:
    """The path for queries of `dtype` on an NVIDIA GPU of that compute capability (None: any other device).

    fp8 tensor cores where e4m3 is native, float16 else, float32 for float32 queries.  The inline assembly decodes four
    neighbouring bytes, which only the operands of fp8 dots keep together.
    """
    capability = capability or (0, 0)
    precision, pdl = "tf32x3" if capability >= (8, 0) else "ieee", capability >= (9, 0)
    if dtype == torch.float32:
        return Path(torch.float32, False, precision, pdl)
    native = capability >= (8, 9)
    return Path(torch.float8_e4m3fn if native else torch.float16, native, precision, pdl)


class _Mask(NamedTuple):
    tensor: torch.Tensor | None
    strides: tuple[int, ...]
    kind: int


class _Plan(NamedTuple):
    """What is worked out once for shapes, formats and flags: how the three launches look."""

    number: int  # no other plan has it
    rows: int  # queries of a column tile, for all tiles of all KV heads and sequences
    width: int  # elements of the operand for one of them
    grids: tuple[tuple[int, int, int], ...]
    constants: tuple[dict[str, Any], ...]
    options: tuple[dict[str, Any], ...]


def decode(
    query: torch.Tensor,
    key: States | None,
    value: States | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    packed_length: int,
    scaling: float,
    sinks: tuple[torch.Tensor, torch.Tensor] | None = None,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    causal: bool = True,
    lengths: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    residual_length: int = 0,
    path: Path | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of up to 16 query tokens per sequence to sinks, packed tokens and a tail, in this order.

    query:         [B, H_q, S, D], bfloat16, float16 or float32
    key, value:    packed states, of which the first `packed_length` tokens count, or None; every number in their
                   blocks, also behind the last token, must be finite (`torch.zeros` is)
    keys, values:  the tail, [B, H_kv, n, D] and [B, H_kv, n, D_v], n >= 0, in the query's dtype; `sinks` likewise
    mask:          [1 or B, 1 or H_q, S, all tokens or more], bool (True takes part) or float (added), or None: causal,
                   the last query seeing every token, or everything if not `causal`
    softcap:       scores become softcap * tanh(scores / softcap), before the mask
    s_aux:         [1 or B, H_q, 1 or S], one more logit per query that takes weight and gives nothing
    lengths:       int32 [B], packed tokens of each sequence that count, if fewer than `packed_length`
    total:         int64 [] on the device, tokens in all: of them all but at most `residual_length` are packed, in whole
                   blocks, and keys and values are a ring (`tq_cache/static_parts.py`).  Takes one query, no sinks;
                   `packed_length` is then the most that can be packed
    path, splits:  for tests: another way to compute than the device's, a number of splits

    Returns the output [B, H_q, S, D_v] in the query's dtype, and the natural log-sum-exp of the scores, float32
    [B, H_q, S]; a query that may see no token gets zeros and -inf.  Raises ValueError on what does not fit together.
    """
    key = key or no_states(*keys.shape[:2], keys.shape[3], keys.device)
    value = value or no_states(*values.shape[:2], values.shape[3], values.device)
    _check(
        *((x.shape, x.stride(3), x.dtype) for x in (query, keys, values)), key.layout, value.layout, packed_length,
        None if mask is None else mask.shape, total is not None,
    )  # fmt: skip
    batch, heads, queries, _ = query.shape
    kv_heads, tail = keys.shape[1:3]
    path = path or choose_path(query.dtype, capability(query.device) if is_nvidia(query.device) else None)
    pairs, columns = batch * kv_heads, heads // kv_heads * queries
    config = choose(
        value.coding.bits, _columns(columns, path), (key.packed.shape[3] + value.packed.shape[3]) // BLOCK_TOKENS.value,
        shared_memory(query.device), path.compute == torch.float8_e4m3fn,
    )  # fmt: skip
    splits, tail_splits = _count_splits(query.device, path, config, pairs, columns, packed_length, tail, splits)
    sinks = sinks if sinks is not None and sinks[0].shape[2] else None
    masked = _describe(mask, batch, heads, queries)
    flags = (softcap is not None, causal and mask is None and queries > 1, masked.kind)
    plan = _plan(
        query.device, query.dtype, (batch, heads, kv_heads, queries, query.shape[3], values.shape[3]), key.coding.code,
        value.coding.code, flags, splits, tail_splits, sinks is not None, path, config,
        key.capacity < config.tile, tail < queries - 1, tail > MAX_EXACT_SPLITS * EXACT_TILE.value,
    )  # fmt: skip
    new, all_splits = query.new_empty, splits + tail_splits + (sinks is not None)
    work = (
        new(plan.rows, plan.width, dtype=path.compute),
        new(plan.rows, 1 + plan.constants[0]["COLUMNS"], dtype=torch.float32),
        new(pairs, all_splits, columns, values.shape[3], dtype=torch.float32),
        new(pairs, all_splits, columns, dtype=torch.float32),
    )
    now = (total, residual_length, scaling * LOG2E.value, float(softcap or 0))
    _launch_prepare(plan, work, query, key, (keys, values), sinks, masked, now, packed_length, splits)
    if splits:
        _launch_split(plan, work, key, value, sinks, masked, lengths, now, packed_length, tail, all_splits - splits)
    return launch_merge(plan, work, query, value, s_aux, splits, all_splits)


def _launch_prepare(plan, work, query, key, tail, sinks, masked, now, packed, splits):
    total, residual, scaling, softcap = now
    strides = (*(x.stride()[:3] for x in (query, *tail, *(sinks or tail))), masked.strides)
    sizes, slots = (0 if sinks is None else sinks[0].shape[2], residual), None if total is None else tail[0].shape[2]
    space = (key.rotation, key.smooth, key.center)
    arguments = (
        query, key.factors[0], space, tail, sinks, masked.tensor, total, slots, work, sizes, splits, tail[0].shape[2],
        packed, (scaling, softcap), strides,
    )  # fmt: skip
    present = aligned(query, key.factors[0], *space, *tail, *(sinks or ()), masked.tensor, total)
    mask_type = None if masked.tensor is None else masked.tensor.dtype
    key_ = (plan.number, strides, sizes, slots, present, mask_type)
    launch(decode_prepare_kernel, key_, plan.grids[0], arguments, plan.constants[0], **plan.options[0])


def _launch_split(plan, work, key, value, sinks, masked, lengths, now, packed, tail, others):
    total, residual, _, softcap = now
    sides = (key.packed, *key.factors), (value.packed, *value.factors)
    strides = (*(x.stride()[:2] for side in sides for x in side[:2]), masked.strides)
    sizes = (0 if sinks is None else sinks[0].shape[2], residual)
    arguments = (
        work, *sides, masked.tensor, lengths, total, packed, key.packed.shape[2], others, tail, sizes, softcap, strides
    )  # fmt: skip
    mask_type = None if masked.tensor is None else masked.tensor.dtype
    present = aligned(*sides[0], *sides[1], masked.tensor, lengths, total)
    key_ = (plan.number, strides, sizes, present, mask_type)
    launch(_decode_split_kernel, key_, plan.grids[1], arguments, plan.constants[1], **plan.options[1])


def _count_splits(device, path, config, pairs, columns, packed, tail, splits):
    """Splits of the packed tokens and of the tail."""
    programs, available = pairs * -(-columns // _columns(columns, path)), multiprocessors(device)
    if not packed:
        splits = 0
    elif splits is None:
        splits = choose_splits(config, programs, packed, available)
    most = MAX_EXACT_SPLITS if packed else max(MAX_EXACT_SPLITS, min(8 * available // programs, 128))
    return splits, min(-(-tail // EXACT_TILE.value), most)


def _columns(columns, path):
    """Query columns of a tile: 4, 8 or 16 with two terms each, else 16."""
    return max(4, min(triton.next_power_of_2(columns), 16)) if path.compute == torch.float8_e4m3fn else 16


@lru_cache(maxsize=1024)
def _plan(
    device, dtype, sizes, key_code, value_code, flags, splits, tail_splits, has_sinks, path, config, small,
    causal_packed, long,
):  # fmt: skip
    """The plan; `small`: room for fewer packed tokens than a tile has, `long`: a tail of many tiles."""
    batch, heads, kv_heads, queries, dim, value_dim = sizes
    exact_tile, stages = exact_steps((dim, value_dim), dtype.itemsize, shared_memory(device))
    fp8, columns = path.compute == torch.float8_e4m3fn, heads // kv_heads * queries
    tile, terms = _columns(columns, path), 2 if fp8 else 1
    tiles, others = triton.cdiv(columns, tile), tail_splits + has_sinks
    shared = dict(GROUP=heads // kv_heads, QUERIES=queries, PDL=path.pdl)
    tiled = dict(DIMS=(dim, value_dim), COLUMNS=tile, TERMS=terms) | shared
    prepare = dict(
        BITS=key_code[0], UNIT=unit(*key_code, DTYPES[path.compute]), FLAGS=flags, PRECISION=path.precision,
        TILE=exact_tile,
    )  # fmt: skip
    split = dict(
        KEY=key_code, VALUE=value_code, FLAGS=(flags[0], flags[1] and causal_packed, flags[2]),
        COMPUTE=DTYPES[path.compute], PTX=path.ptx, PRECISION=path.precision,
        LAUNCH=(config.tile, config.warps, small, config.stages),
    )  # fmt: skip
    all_splits = triton.next_power_of_2(splits + others)
    merge = dict(DIM=value_dim, SPLITS=all_splits)
    registers = {"maxnreg": config.registers} if config.registers and path.ptx else {}
    early = {"launch_pdl": True} if path.pdl else {}  # the first launch waits for all that was launched before
    return _Plan(
        next(_NUMBERS),
        batch * kv_heads * tiles,
        parts(key_code[0]) * terms * tile * part_width(dim, key_code[0]),
        (
            (1 + others, kv_heads * tiles, batch),
            (splits, kv_heads * tiles, batch),
            (batch * heads * queries, 1, 1),
        ),
        (prepare | tiled, split | tiled, merge | shared),
        (
            dict(num_warps=8, num_stages=stages if long and dtype != torch.float32 else 1),
            dict(num_warps=config.warps, num_stages=config.stages, **registers, **early),
            dict(num_warps=merge_warps(all_splits, value_dim), **early),
        ),
    )  # fmt: skip


def _describe(mask, batch, heads, queries):
    if mask is None:
        return _Mask(None, (0, 0, 0, 0), NO_MASK.value)
    kind = ROW_MASK if mask.shape[1] == 1 and queries == 1 else FULL_MASK
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    mask = mask.expand(batch, heads, queries, mask.shape[3])
    return _Mask(mask, mask.stride(), kind.value)


@lru_cache(maxsize=1024)
def _check(query, keys, values, key, value, packed_length, mask, static):
    """Raise ValueError, with what was given, on what the kernels would read wrongly.

    query, keys, values: (shape, stride of the last dimension, dtype); mask: its shape
    """
    (query, keys, values), last_strides, dtypes = zip(query, keys, values, strict=True)
    key.check(packed_length)
    value.check(packed_length)
    batch, heads, queries, dim = query
    kv_heads, tail = keys[1:3]
    if not 0 < queries <= MAX_QUERIES:
        raise ValueError(f"expected 1 to {MAX_QUERIES} queries, got {queries}; prefill takes more")
    if heads % kv_heads or keys != (batch, kv_heads, tail, dim) or keys[:3] != values[:3]:
        raise ValueError(
            f"expected keys [{batch}, a divisor of {heads}, n, {dim}] and values that differ at most in head_dim, "
            f"got {list(keys)} and {list(values)}"
        )
    held = (*key.shape[:2], key.head_dim, *value.shape[:2], value.head_dim)
    if held != (batch, kv_heads, dim, batch, kv_heads, values[3]):
        raise ValueError(
            f"expected packed states of {batch} sequences, {kv_heads} KV heads, head_dim {dim} and {values[3]}, "
            f"got {list(held[:3])} and {list(held[3:])}"
        )
    if len(set(dtypes)) > 1 or dtypes[0] not in QUERY_DTYPES:
        raise ValueError(f"expected one of {QUERY_DTYPES} throughout, got {', '.join(map(str, dtypes))}")
    if last_strides != (1, 1, 1):
        raise ValueError("expected query, keys and values whose last dimension is contiguous")
    if static and (queries > 1 or tail % BLOCK_TOKENS.value):
        raise ValueError(f"expected one query and a ring of whole blocks with total, got {queries} and {tail} slots")
    total = 1 if static else packed_length + tail
    if mask is not None and (len(mask) != 4 or mask[2] != queries or mask[3] < total):
        raise ValueError(f"expected a mask [B, H, {queries}, {total} or more], got {list(mask)}")
