"""Packed tokens through cuDNN, where its attention is faster than what Triton compiles to: on Hopper and later.

SEGMENT tokens at a time become float16 in a buffer and go through cuDNN, for queries that may see every packed token.
The buffer takes SEGMENT * 2 * (D + D_v) bytes per sequence and KV head, 4 MiB for 128 channels, however long the past
is; no other dequantised copy exists.
"""

import torch
import triton
import triton.language as tl

from ..attention.scores import LOG2E
from ..bits.layout import BLOCK_TOKENS, at_head, channels, part_width, parts, tile_order
from ..bits.to_float16 import decoders
from ..launch import Launch, Program
from . import tuning
from .arguments import Attended, PackedTokenStrides, RotatedQuery
from .problem import Problem
from .scaled import load_scaled_keys, load_scaled_values, load_scales, scale_pointers
from .spaces import merge_spans
from .tiles import attend_tiles


@triton.jit(do_not_specialize=["first_block"])
def dequantize_segment_kernel(
    key, value, keys, values, first_block, strides,
    DIMS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """One program = one block of packed tokens of one KV head, from `first_block`, times their scales.

    Written as keys [B, H_kv, tokens, columns as in `key_channels`] and values [B, H_kv, tokens, D_v], not rotated back.
    """
    DIM: tl.constexpr = DIMS.key_dim
    VALUE_DIM: tl.constexpr = DIMS.value_dim
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    DTYPE: tl.constexpr = keys.dtype.element_ty
    WIDTH: tl.constexpr = part_width(DIM, KEY.bits) * parts(KEY.bits)
    order, start = tile_order(VALUE.bits, BLOCK_TOKENS), (first_block + tl.program_id(0)) * BLOCK_TOKENS
    pointers = scale_pointers(key, value, batch, head, strides)
    scales = load_scales(pointers, start, order, start + BLOCK_TOKENS)
    key_packed = at_head(key.packed, strides.key.packed, batch, head)
    k = load_scaled_keys(key_packed, start, order, 0, scales.key, DIM, KEY, MODE, DTYPE, False)
    value_packed = at_head(value.packed, strides.value.packed, batch, head)
    v = load_scaled_values(value_packed, start, 0, scales, BLOCK_TOKENS, VALUE_DIM, VALUE, MODE, DTYPE, False)
    if scales.value.dtype == tl.float32:
        v *= scales.value.to(DTYPE)
    row = (batch * tl.num_programs(1) + head) * tl.num_programs(0) + tl.program_id(0)
    row = row * BLOCK_TOKENS + order
    tl.store(keys + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], k)
    channel = tl.arange(0, channels(VALUE_DIM))
    tl.store(values + row[:, None] * VALUE_DIM + channel[None, :], v.T, mask=(channel < VALUE_DIM)[None, :])


def has_fast_segments(problem: Problem) -> bool:
    """Whether cuDNN's attention may be used, is there and is worth it; below Hopper it was not measured."""
    query, device = problem.query, problem.device
    if problem.mask is not None or problem.softcap is not None or query.dtype == torch.float32:
        return False
    enough = tuning.FLOAT8_SEGMENT_QUERIES if problem.is_float8 else tuning.SEGMENT_QUERIES
    if problem.packed_length < tuning.SEGMENT_UNIT or query.shape[2] < enough:
        return False
    if not device.is_nvidia or device.capability < (9, 0):
        return False
    like = query.new_empty(1, 1, tuning.QUERY_UNIT, problem.key_width, dtype=torch.float16)
    value = query.new_empty(1, 1, tuning.QUERY_UNIT, problem.dims.value_dim, dtype=torch.float16)
    parameters = torch.backends.cuda.SDPAParams(like, like, value, None, 0.0, False, False)
    return torch.backends.cuda.can_use_cudnn_attention(parameters)


def attend_segments(problem: Problem, rotated: RotatedQuery) -> list[Attended]:
    """As `attend_tiles`; at most MERGED spans."""
    whole = problem.packed_length // tuning.SEGMENT_UNIT * tuning.SEGMENT_UNIT
    spans = [] if whole == problem.packed_length else attend_tiles(problem, rotated, whole)
    for start in range(0, whole, tuning.SEGMENT):
        if len(spans) == tuning.MERGED:
            spans = [merge_spans(problem, spans)]
        keys, values = _dequantize(problem, start, min(tuning.SEGMENT, whole - start))
        spans.append(_cudnn_attention(rotated.rows, keys, values))
    return spans


def _dequantize(problem: Problem, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `count` tokens from `start`, times their scales, not rotated back."""
    key, value, (batch, kv_heads) = problem.key, problem.value, problem.exact_keys.shape[:2]
    assert key is not None and value is not None
    keys = problem.empty(batch, kv_heads, count, problem.key_width)
    values = problem.empty(batch, kv_heads, count, problem.dims.value_dim)
    strides = PackedTokenStrides(key.layout.read_strides, value.layout.read_strides)
    constants, options = problem.formats | dict(MODE=decoders(problem.device)), dict(num_warps=tuning.SEGMENT_WARPS)
    program = Program(dequantize_segment_kernel, problem.device, constants, options)
    arguments = (key.read, value.read, keys, values, start // BLOCK_TOKENS.value, strides)
    Launch(program, (count // BLOCK_TOKENS.value, kv_heads, batch), arguments).run()
    return keys, values


def _cudnn_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> Attended:
    """The query holds scaling * log2 e; here log2 e is taken out again."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = attend(query, keys, values, None, True, 0.0, False, False, scale=1 / LOG2E.value)
    return Attended(out.contiguous(), lse.reshape(lse.shape[:3]).contiguous())
