"""Prefill over a packed past: attention of many queries over packed keys and values, then over exact ones.

First, rotation, smoothing and centre of the keys are undone in the query (`prefill_query_kernel`):

    q . k_hat = (R (smooth q)) . (scale * codes) + q . center

Then come the packed tokens, in one of two ways, each giving outputs and log-sum-exps of spans of them:

tiles      Flash attention (`_prefill_packed_kernel`): codes become float16 in registers, are multiplied by their scales
           there, and go to the tensor cores from shared memory.  For every mask, soft cap, dtype and architecture.
segments   On Hopper and later, where cuDNN's attention is faster than what Triton compiles to: SEGMENT tokens at a time
           become float16 in a buffer (`unpack_kernel`) and go through cuDNN.  For queries that may see every packed
           token.  The buffer takes SEGMENT * 2 * (D + D_v) bytes per sequence and KV head, 4 MiB for 128 channels,
           however long the past is; no other dequantised copy exists.

The spans are joined, and rotation and centre of the values undone (`prefill_merge_kernel`).  From there, flash
attention goes on over the tokens that are still in the model's dtype: sinks, tail, chunk (`_prefill_exact_kernel`).

Log-sum-exps that kernels hand on are natural logarithms; inside a kernel scores have base 2.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..attention.masks import add_mask, classify, mask_of, visible_span
from ..attention.scores import LOG2E, soft_cap
from ..attention.softmax import accumulate, begin_softmax, log_sum, with_extra_logit
from ..bits.layout import BLOCK_TOKENS, channels, part_width, parts, tile_order
from ..bits.to_float16 import decoders
from ..device import Device, describe
from ..launch import Launch, Program
from ..states import States
from .scaled import load_scaled_keys, load_scaled_values, load_scales, scale_pointers, unpack_kernel
from .spaces import prefill_merge_kernel, prefill_query_kernel

MAX_HEAD_DIM = 256
SEGMENT = 8192  # tokens; with twice as many the 2,048 queries of benchmarks/prefill.py take 1 % less [H200]
SEGMENT_UNIT, QUERY_UNIT = 2048, 256  # sizes that cuDNN sees are multiples of these: each new one takes it 33 ms [H200]
SEGMENT_QUERIES, FLOAT8_SEGMENT_QUERIES = 256, 512  # with fewer queries, tiles; both in float8, which tiles like
MERGED = 4  # segments that are joined at a time
UNPACK_WARPS = 4


class Config(NamedTuple):
    """Launch parameters of one kernel."""

    queries: int  # of a tile
    tokens: int  # of a tile; of packed ones a multiple of BLOCK_TOKENS; channels at a time for a rotation
    warps: int
    stages: int = 1

    @property
    def options(self) -> dict[str, int]:
        return dict(num_warps=self.warps, num_stages=self.stages)


class Configs(NamedTuple):
    """Launch parameters of one class of shapes."""

    rotate: Config  # `prefill_query_kernel`, `prefill_merge_kernel`
    packed: Config
    exact: Config


# By (float32, or no tensor cores that Triton would use; more than 128 channels; 200 KiB of shared memory, so Hopper and
# data-centre Blackwell).  Measured, on an H200: the first row.
CONFIGS = {
    (False, False, True): Configs(Config(128, 64, 8), Config(128, 128, 8, 3), Config(128, 64, 8, 3)),
    (False, False, False): Configs(Config(64, 32, 4), Config(64, 64, 4), Config(64, 32, 4)),
    (False, True, True): Configs(Config(64, 32, 8), Config(64, 64, 4, 2), Config(64, 32, 4, 2)),
    (False, True, False): Configs(Config(32, 32, 4), Config(64, 64, 4), Config(64, 32, 4)),
    (True, False, True): Configs(Config(32, 32, 4), Config(64, 64, 4, 2), Config(64, 32, 4, 2)),
    (True, False, False): Configs(Config(32, 32, 4), Config(16, 64, 4), Config(32, 32, 4)),
    (True, True, True): Configs(Config(32, 32, 4), Config(32, 64, 4), Config(32, 32, 4)),
    (True, True, False): Configs(Config(32, 16, 4), Config(16, 64, 4), Config(32, 32, 4)),
}
FLOAT8_PACKED = Config(128, 64, 4, 3)  # keys and values in float8: less is live than with codes, in the first row
FEW_QUERIES_PACKED = Config(64, 128, 4, 2)  # at most 64 queries, in the first row


@triton.jit
def _packed_tile(
    q, shift, packed, scales, start, end, state, row, mask, count, sinks, softcap, strides, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MODE: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, N: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One step over the packed tokens from `start`; `FULL`: all N of them are there, and no mask hides any."""
    blocks, order = tl.cdiv(end, BLOCK_TOKENS), tile_order(VALUE[0], N)
    k = load_scaled_keys(packed[0], start, order, blocks, scales[0], DIM, KEY, MODE, q.dtype, not FULL)
    s = tl.dot(q, k.T, input_precision=PRECISION)
    v = load_scaled_values(packed[1], start, blocks, scales, N, VALUE_DIM, VALUE, MODE, q.dtype, not FULL)
    there = start + order < end
    if shift is not None:
        s += shift[:, None]
    if SOFTCAP:
        s = soft_cap(s, softcap)
    if not FULL:  # what lies behind the last token may be NaN
        if mask is not None:
            inside = (row < count)[:, None] & there[None, :]
            s = add_mask(s, mask, row, start + order + sinks, inside, strides)
        s = tl.where(there[None, :], s, float("-inf"))
        v = tl.where(there[None, :], v, 0)
    return accumulate(s, v.T, state, PRECISION)


@triton.jit
def _load_rows(base, stride, row, end, DIM: tl.constexpr, FULL: tl.constexpr):
    """Rows of DIM elements, [rows, channels], zeros from row `end` on; `FULL`: no row is that far."""
    channel = tl.arange(0, channels(DIM))
    pointer = base + row[:, None].to(tl.int64) * stride + channel[None, :]
    if not FULL:
        return tl.load(pointer, mask=(row < end)[:, None] & (channel < DIM)[None, :], other=0)
    elif channels(DIM) != DIM:
        return tl.load(pointer, mask=(channel < DIM)[None, :], other=0)
    else:
        return tl.load(pointer)


@triton.jit
def _exact_tile(
    q, keys, values, start, state, row, mask, count, packed, exact, sinks, factors, strides, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """One step over the exact tokens from `start`; `FULL`: every query sees all N of them."""
    token = start + tl.arange(0, N)
    k = _load_rows(keys, strides[1][2], token, exact, DIM, FULL)
    s = tl.dot(q, k.T, input_precision=PRECISION) * factors[0]
    v = _load_rows(values, strides[2][2], token, exact, VALUE_DIM, FULL)
    if SOFTCAP:
        s = soft_cap(s, factors[1])
    if not FULL:
        seen = (token < exact)[None, :]
        if mask is not None:
            place = token + tl.where(token < sinks, 0, packed)
            s = add_mask(s, mask, row, place, seen & (row < count)[:, None], strides[3])
        if CAUSAL:
            seen = seen & (token[None, :] <= row[:, None] + (exact - count))
        s = tl.where(seen, s, float("-inf"))
    return accumulate(s, v, state, PRECISION)


@triton.jit(do_not_specialize=["count", "first_block", "length", "sinks", "rows"])
def _prefill_packed_kernel(
    rotated, offset, key, value, mask, partial, partial_lse, count, first_block, length, sinks, rows, softcap, strides,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MODE: tl.constexpr,
    GROUP: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program = M queries of one query head of one sequence, over one split of the packed tokens.

    `length` tokens, but for those before `first_block` (0 with a mask); key = (packed, scale), value = (packed, scale[,
    zero]), mask = (mask, its tiles), strides = (those of key, of value, of mask), KEY and VALUE = (bits, table),
    partial [splits, B, H_q, rows, D_v].
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_head = head // GROUP
    blocks = tl.cdiv(count, M)
    split, splits = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    begin = first_block * BLOCK_TOKENS
    tiles = tl.cdiv(length - begin, N)
    span = tl.cdiv(tiles, splits)
    first, end = split * span, tl.minimum((split + 1) * span, tiles)
    masked = first  # tiles up to this one need the mask
    row = tl.program_id(0) % blocks * M + tl.arange(0, M)
    inside = row < count
    index = (batch * tl.num_programs(1) + head) * rows + row
    if mask is not None:
        mask = mask_of(mask, strides[2], batch, head, tl.program_id(0) % blocks)
        first, end, _, tail = visible_span(mask[1], first, end)
        masked = tl.maximum(first, tl.minimum(tail, end))
    full = tl.maximum(masked, tl.minimum(end, (length - begin) // N))
    packed = (
        key[0] + batch * strides[0][0][0] + kv_head * strides[0][0][1],
        value[0] + batch * strides[1][0][0] + kv_head * strides[1][0][1],
    )
    pointers = scale_pointers(key, value, batch, kv_head, strides)

    WIDTH: tl.constexpr = part_width(DIM, KEY[0]) * parts(KEY[0])
    q = tl.load(rotated + index[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], mask=inside[:, None], other=0)
    shift = None
    if offset is not None:
        shift = tl.load(offset + index, mask=inside, other=0)
    state = begin_softmax(None, None, None, index, inside, M, VALUE_DIM)
    order = tile_order(VALUE[0], N)
    scales = load_scales(pointers, begin + masked * N, order, length)
    for tile in tl.range(masked, full):
        start = begin + tile * N
        coming = load_scales(pointers, start + N, order, length)  # a step ahead: nothing waits
        state = _packed_tile(
            q, shift, packed, scales, start, length, state, row, mask, count, sinks, softcap, strides[2], DIM,
            VALUE_DIM, KEY, VALUE, MODE, SOFTCAP, PRECISION, N, True,
        )  # fmt: skip
        scales = coming
    before = tl.maximum(masked - first, 0)
    for i in tl.range(0, before + tl.maximum(end - full, 0), num_stages=1):
        start = begin + tl.where(i < before, first + i, full + i - before) * N
        scales = load_scales(pointers, start, order, length)
        state = _packed_tile(
            q, shift, packed, scales, start, length, state, row, mask, count, sinks, softcap, strides[2], DIM,
            VALUE_DIM, KEY, VALUE, MODE, SOFTCAP, PRECISION, N, False,
        )  # fmt: skip

    acc = state[2] / tl.maximum(state[1], 1e-30)[:, None]
    if value[1].dtype.element_ty == tl.float32:
        acc *= tl.load(pointers[1])
    index += split * (tl.num_programs(2) * tl.num_programs(1)).to(tl.int64) * rows
    tl.store(partial_lse + index, log_sum(state), mask=inside)
    channel = tl.arange(0, channels(VALUE_DIM))
    used = inside[:, None] & (channel < VALUE_DIM)[None, :]
    tl.store(partial + index[:, None] * VALUE_DIM + channel[None, :], acc.to(partial.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize=["count", "packed", "exact", "sinks", "rows"])
def _prefill_exact_kernel(
    query, keys, values, partial, partial_lse, offset, mask, s_aux, out, lse, count, packed, exact, sinks, rows,
    factors, strides,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program = M queries of one query head of one sequence: goes on from the packed tokens over the exact ones.

    `sinks` of the `exact` tokens stand before the packed ones; factors = (scaling * log2 e, soft cap), strides =
    (query, keys, values, mask, s_aux), partial [B, H_q, rows, D_v] or None.  The longest rows begin first.
    """
    head, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    heads, kv_head = tl.num_programs(0), head // GROUP
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    row = tile * M + tl.arange(0, M)
    inside = row < count
    state = begin_softmax(partial, partial_lse, offset, (batch * heads + head) * rows + row, inside, M, VALUE_DIM)

    q = _load_rows(query + batch * strides[0][0] + head * strides[0][1], strides[0][2], row, count, DIM, False)
    keys += batch * strides[1][0] + kv_head * strides[1][1]
    values += batch * strides[2][0] + kv_head * strides[2][1]
    first, full, end = 0, exact // N, tl.cdiv(exact, N)
    if mask is not None:
        mask = mask_of(mask, strides[3], batch, head, tile)
        first, end, unmasked, _ = visible_span(mask[1], 0, end)
        full = tl.minimum(full, unmasked)
    if CAUSAL:
        full = tl.minimum(exact, exact - count + tile * M + 1) // N
        end = tl.cdiv(tl.minimum(exact, exact - count + (tile + 1) * M), N)
    for i in tl.range(first, full):
        state = _exact_tile(
            q, keys, values, i * N, state, row, mask, count, packed, exact, sinks, factors, strides, DIM, VALUE_DIM,
            CAUSAL, SOFTCAP, PRECISION, N, True,
        )  # fmt: skip
    for i in tl.range(tl.maximum(first, full), end):
        state = _exact_tile(
            q, keys, values, i * N, state, row, mask, count, packed, exact, sinks, factors, strides, DIM, VALUE_DIM,
            CAUSAL, SOFTCAP, PRECISION, N, False,
        )  # fmt: skip
    if s_aux is not None:
        s_aux += batch * strides[4][0] + head * strides[4][1] + row * strides[4][2]
        state = with_extra_logit(state, tl.load(s_aux, mask=inside, other=float("-inf")))
    index = (batch * heads + head) * count + row
    acc = (state[2] / tl.maximum(state[1], 1e-30)[:, None]).to(out.dtype.element_ty)
    channel = tl.arange(0, channels(VALUE_DIM))
    used = inside[:, None] & (channel < VALUE_DIM)[None, :]
    tl.store(out + index[:, None] * VALUE_DIM + channel[None, :], acc, mask=used)
    tl.store(lse + index, log_sum(state), mask=inside)


# ---------------------------------------------------------------------------------------------------------- launching


class Problem(NamedTuple):
    """What all launches of one `prefill` share."""

    device: Device
    query: torch.Tensor
    key: States | None
    value: States | None
    keys: torch.Tensor  # sinks and newest tokens
    values: torch.Tensor
    packed: int
    sinks: int
    rows: int  # queries, padded for cuDNN
    scaling: float
    softcap: float | None
    mask: torch.Tensor | None

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.keys.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of products."""
        return torch.float32 if self.query.dtype == torch.float32 else torch.float16

    @property
    def configs(self) -> Configs:
        wide, roomy = max(self.query.shape[3], self.values.shape[3]) > 128, self.device.program_memory >= 200 << 10
        return CONFIGS[self.dtype == torch.float32 or self.device.capability < (8, 0), wide, roomy]

    @property
    def precision(self) -> str:
        """How float32 products are made."""
        return "tf32x3" if self.device.is_nvidia and self.device.capability >= (8, 0) else "ieee"

    @property
    def past(self) -> tuple[tuple, tuple, tuple, dict]:
        """Tensors of keys, of values, strides of both, and constants."""
        sides = [(side.packed, *side.factors) for side in (self.key, self.value)]
        strides = tuple(tuple(x.stride()[:2] for x in side) for side in sides)
        constants = dict(DIM=self.query.shape[3], VALUE_DIM=self.values.shape[3], KEY=self.key.coding.code)
        return *sides, strides, constants | dict(VALUE=self.value.coding.code, MODE=decoders(self.device))

    @property
    def is_float8(self) -> bool:
        return self.key.coding.bits == self.value.coding.bits == 8

    @property
    def width(self) -> int:
        """Columns of a key, its parts padded."""
        bits = self.key.coding.bits
        return part_width(self.query.shape[3], bits) * parts(bits)

    def tiled_mask(self, config: Config, length: int, boundary: int, shift: int) -> tuple[tuple | None, tuple]:
        """(mask, its tiles) and the strides of both, for `length` tokens that stand where `classify` says."""
        if self.mask is None:
            return None, ()
        tiles = classify(self.mask, length, boundary, shift, config.queries, config.tokens, self.device)
        return (self.mask, tiles), (self.mask.stride(), tiles.stride()[:3])

    def program(self, kernel: Any, config: Config, **constants: Any) -> Program:
        return Program(kernel, self.device, constants, config.options)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.query.new_empty(*shape, dtype=dtype or self.dtype)


def prefill(
    query: torch.Tensor, key: States | None, value: States | None, keys: torch.Tensor, values: torch.Tensor, *,
    packed_length: int, scaling: float, sinks: tuple[torch.Tensor, torch.Tensor] | None = None,
    mask: torch.Tensor | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    causal: bool = True, segments: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of many queries over sinks, packed tokens and exact tokens, in this order.

    query:        [B, H_q, S, D], bfloat16, float16 or float32; D and D_v at most 256
    key, value:   packed states with at least `packed_length` tokens; None if that is 0
    keys, values: the newest tokens, [B, H_kv, n, D] and [B, H_kv, n, D_v] in the query's dtype
    scaling:      factor of the scores; softcap: scores become softcap * tanh(scores / softcap), before the mask
    sinks:        first keys and values, like `keys` and `values`
    mask:         [B or 1, H_q or 1, S, all tokens or more], bool (True takes part) or float (added), or None: causal,
                  the last query seeing every token, or everything if not `causal`
    s_aux:        [1 or B, H_q, 1 or S] or [H_q], one more logit per query that takes weight and gives nothing
    segments:     force one of the two ways (see above) for the packed tokens; segments take no mask and no soft cap

    Returns the output [B, H_q, S, D_v] in the query's dtype, contiguous, and the natural log of the softmax' sum,
    float32 [B, H_q, S].  A query that may see no token gets zeros and -inf.  Raises ValueError for anything else.
    """
    _check(query, keys, values, causal and mask is None)
    if packed_length:
        _check_past(key, value, packed_length, query.shape[3], values.shape[3])
    sink_count = 0 if sinks is None else sinks[0].shape[2]
    if sinks is not None:
        keys, values = torch.cat([sinks[0], keys], 2), torch.cat([sinks[1], values], 2)
    if mask is not None:
        mask = _expand(mask, query, packed_length + keys.shape[2])
    if segments and (mask is not None or softcap is not None):
        raise ValueError("expected no mask and no softcap with segments=True; give segments=None")
    rows, device = query.shape[2], describe(query.device)
    problem = Problem(device, query, key, value, keys, values, packed_length, sink_count, rows, scaling, softcap, mask)
    return attend(problem, s_aux, causal, segments)


def attend(
    problem: Problem, s_aux: torch.Tensor | None, causal: bool, segments: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`prefill` of a problem."""
    softcap = problem.softcap
    if problem.packed == 0:
        return _attend_exact(problem, None, None, None, s_aux, causal)
    if segments is None:
        segments = problem.mask is None and softcap is None and _has_fast_segments(problem)
    if segments:
        problem = problem._replace(rows=triton.cdiv(problem.rows, QUERY_UNIT) * QUERY_UNIT)
    rotated, offset = _rotate_query(problem)
    spans = _attend_segments(problem, rotated) if segments else _attend_tiles(problem, rotated, offset)
    out, lse = _merge(problem, spans, last=True)
    return _attend_exact(problem, out, lse, offset if softcap is None else None, s_aux, causal)


def _check(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool) -> None:
    batch, heads, count, dim = query.shape
    dtypes = {query.dtype, keys.dtype, values.dtype}
    if len(dtypes) != 1 or not dtypes <= {torch.bfloat16, torch.float16, torch.float32}:
        raise ValueError(
            "expected query, keys and values of one dtype, bfloat16, float16 or float32, "
            f"got {query.dtype}, {keys.dtype} and {values.dtype}"
        )
    if heads % keys.shape[1] or keys.shape[:3] != values.shape[:3] or keys.shape[::3] != (batch, dim):
        raise ValueError(
            "expected query [B, H_q, S, D], keys [B, H_kv, n, D] and values [B, H_kv, n, D_v], H_q a multiple of H_kv, "
            f"got {list(query.shape)}, {list(keys.shape)} and {list(values.shape)}"
        )
    if max(dim, values.shape[3]) > MAX_HEAD_DIM:
        raise ValueError(f"expected a head_dim of at most {MAX_HEAD_DIM}, got {dim} and {values.shape[3]}")
    if causal and keys.shape[2] < count:
        raise ValueError(
            f"expected the {count} tokens of the queries among the exact ones, got {keys.shape[2]} exact tokens; "
            "give a mask, or causal=False"
        )
    if any(x.stride(-1) != 1 for x in (query, keys, values)):
        raise ValueError("expected tensors whose last dimension is contiguous; call .contiguous()")


def _check_past(key: States | None, value: States | None, packed_length: int, dim: int, value_dim: int) -> None:
    if key is None or value is None or (key.head_dim, value.head_dim) != (dim, value_dim) or key.zero is not None:
        raise ValueError(
            f"expected packed keys (without a zero) and values of {packed_length} tokens, as wide as the exact ones, "
            f"{dim} and {value_dim}, got {[None if side is None else side.head_dim for side in (key, value)]}"
        )
    key.check(packed_length)
    value.check(packed_length)


def _expand(mask: torch.Tensor, query: torch.Tensor, tokens: int) -> torch.Tensor:
    """The mask as kernels take it: [B, H_q, S, T], a bool one as bytes."""
    if mask.dim() != 4 or mask.shape[2] != query.shape[2] or mask.shape[3] < tokens:
        raise ValueError(f"expected a mask [B, H, {query.shape[2]}, {tokens} or more], got {list(mask.shape)}")
    mask = mask.expand(query.shape[0], query.shape[1], -1, -1)
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _has_fast_segments(problem: Problem) -> bool:
    """Whether cuDNN's attention is there and worth it; below Hopper it was not measured."""
    query = problem.query
    if not problem.device.is_nvidia or query.dtype == torch.float32 or problem.packed < SEGMENT_UNIT:
        return False
    enough = FLOAT8_SEGMENT_QUERIES if problem.is_float8 else SEGMENT_QUERIES
    if problem.device.capability < (9, 0) or query.shape[2] < enough:
        return False
    like = query.new_empty(1, 1, QUERY_UNIT, problem.width, dtype=torch.float16)
    value = query.new_empty(1, 1, QUERY_UNIT, problem.values.shape[3], dtype=torch.float16)
    parameters = torch.backends.cuda.SDPAParams(like, like, value, None, 0.0, False, False)
    return torch.backends.cuda.can_use_cudnn_attention(parameters)


def _rotate_query(problem: Problem) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The query as `_prefill_packed_kernel` takes it, and what the centre of the keys adds to its scores (base 2)."""
    query, key, rows = problem.query, problem.key, problem.rows
    batch, heads, count, dim = query.shape
    rotated = problem.empty(batch, heads, rows, problem.width)
    offset = None if key.center is None else problem.empty(batch, heads, rows, dtype=torch.float32)
    config = problem.configs.rotate
    program = problem.program(
        prefill_query_kernel, config, DIM=dim, BITS=key.coding.bits, GROUP=problem.group, PRECISION=problem.precision,
        M=config.queries, K=config.tokens,
    )  # fmt: skip
    arguments = (
        query, key.rotation, key.smooth, key.center, rotated, offset, count, rows, problem.scaling * LOG2E.value,
        query.stride()[:3],
    )  # fmt: skip
    Launch(program, (triton.cdiv(rows, config.queries), heads, batch), arguments).run()
    return rotated, offset


def _choose_packed(problem: Problem) -> Config:
    configs = problem.configs
    if configs is not CONFIGS[False, False, True]:
        return configs.packed
    if problem.query.shape[2] <= FEW_QUERIES_PACKED.queries:
        return FEW_QUERIES_PACKED
    return FLOAT8_PACKED if problem.is_float8 else configs.packed


def _attend_tiles(problem: Problem, rotated, offset, first: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs [B, H_q, rows, D_v] and log-sum-exps [B, H_q, rows] of some spans of the packed tokens from `first`.

    The log-sum-exps are without `offset`, but with a soft cap, which needs it inside.
    """
    batch, heads, rows, _ = rotated.shape
    config, count = _choose_packed(problem), problem.query.shape[2]
    blocks = triton.cdiv(count, config.queries)
    splits = 1 if first else _choose_splits(blocks * heads * batch, problem.packed, problem.device)
    partial = problem.empty(splits, batch, heads, rows, problem.values.shape[3])
    partial_lse = problem.empty(splits, batch, heads, rows, dtype=torch.float32)
    key, value, strides, constants = problem.past
    mask, mask_strides = problem.tiled_mask(config, problem.packed, 0, problem.sinks)
    program = problem.program(
        _prefill_packed_kernel, config, **constants, GROUP=problem.group, SOFTCAP=problem.softcap is not None,
        PRECISION=problem.precision, M=config.queries, N=config.tokens,
    )  # fmt: skip
    arguments = (
        rotated, None if problem.softcap is None else offset, key, value, mask, partial, partial_lse, count,
        first // BLOCK_TOKENS.value, problem.packed, problem.sinks, rows, float(problem.softcap or 0),
        (*strides, mask_strides),
    )  # fmt: skip
    Launch(program, (blocks * splits, heads, batch), arguments).run()
    return list(zip(partial, partial_lse, strict=True))


def _choose_splits(programs: int, tokens: int, device: Device) -> int:
    """1, 2, 4, 8 or 16 splits of at least 1,024 tokens, about enough that every multiprocessor has two programs."""
    wanted = max(1, min(2 * device.multiprocessors // programs, tokens // 1024, 16))
    return 1 << (wanted.bit_length() - 1)


def _attend_segments(problem: Problem, rotated: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As `_attend_tiles`; at most MERGED spans."""
    whole = problem.packed // SEGMENT_UNIT * SEGMENT_UNIT
    spans = [] if whole == problem.packed else _attend_tiles(problem, rotated, None, whole)
    for start in range(0, whole, SEGMENT):
        if len(spans) == MERGED:
            spans = [_merge(problem, spans)]
        spans.append(_cudnn_attention(rotated, *_unpack(problem, start, min(SEGMENT, whole - start))))
    return spans


def _unpack(problem: Problem, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `count` tokens from `start`, times their scales, not rotated back."""
    batch, kv_heads = problem.keys.shape[:2]
    keys = problem.empty(batch, kv_heads, count, problem.width)
    values = problem.empty(batch, kv_heads, count, problem.values.shape[3])
    key, value, strides, constants = problem.past
    arguments = (key, value, keys, values, start // BLOCK_TOKENS.value, strides)
    grid = (count // BLOCK_TOKENS.value, kv_heads, batch)
    Launch(Program(unpack_kernel, problem.device, constants, dict(num_warps=UNPACK_WARPS)), grid, arguments).run()
    return keys, values


def _cudnn_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor):
    """Output and log-sum-exp.  The query holds scaling * log2 e; here log2 e is taken out again."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = attend(query, keys, values, None, True, 0.0, False, False, scale=1 / LOG2E.value)
    return out.contiguous(), lse.reshape(lse.shape[:3]).contiguous()


def _merge(problem: Problem, spans: list, last: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins spans; the `last` time, undoes rotation and centre of the values, too."""
    value, (out, lse) = problem.value, spans[0]
    rotation, center = (value.rotation, value.center) if last else (None, None)
    if len(spans) == 1 and rotation is None and center is None:
        return out, lse
    batch, heads, rows, dim = out.shape
    outs, lses = zip(*spans, strict=True)
    out, lse = torch.empty_like(out), torch.empty_like(lse)
    config = problem.configs.rotate
    program = problem.program(
        prefill_merge_kernel, config, DIM=dim, GROUP=problem.group, PRECISION=problem.precision, M=config.queries,
        K=config.tokens,
    )  # fmt: skip
    arguments = outs, lses, rotation, center, out, lse, rows
    Launch(program, (triton.cdiv(rows, config.queries), heads, batch), arguments).run()
    return out, lse


def _attend_exact(problem: Problem, partial, partial_lse, offset, s_aux, causal) -> tuple[torch.Tensor, torch.Tensor]:
    query, keys, values, config = problem.query, problem.keys, problem.values, problem.configs.exact
    batch, heads, count, dim = query.shape
    out = problem.empty(batch, heads, count, values.shape[3], dtype=query.dtype)
    lse = problem.empty(batch, heads, count, dtype=torch.float32)
    if s_aux is not None:
        s_aux = (s_aux[None, :, None] if s_aux.dim() == 1 else s_aux).expand(batch, heads, count)
    mask, mask_strides = problem.tiled_mask(config, keys.shape[2], problem.sinks, problem.packed)
    strides = (*(x.stride()[:3] for x in (query, keys, values)), mask_strides)
    strides = (*strides, (0, 0, 0) if s_aux is None else s_aux.stride())
    program = problem.program(
        _prefill_exact_kernel, config, DIM=dim, VALUE_DIM=values.shape[3], GROUP=problem.group,
        CAUSAL=causal and mask is None, SOFTCAP=problem.softcap is not None, PRECISION=problem.precision,
        M=config.queries, N=config.tokens,
    )  # fmt: skip
    arguments = (
        query, keys, values, partial, partial_lse, offset, mask, s_aux, out, lse, count, problem.packed, keys.shape[2],
        problem.sinks, problem.rows, (problem.scaling * LOG2E.value, float(problem.softcap or 0)), strides,
    )  # fmt: skip
    Launch(program, (heads, batch, triton.cdiv(count, config.queries)), arguments).run()
    return out, lse
