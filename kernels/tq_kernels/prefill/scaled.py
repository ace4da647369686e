"""Packed keys and values times their scales, as operands of prefill's products."""

import triton
import triton.language as tl

from ..bits.layout import BLOCK_TOKENS, channels, part_width, parts, tile_order
from ..bits.to_float16 import load_keys, load_values


@triton.jit
def scale_pointers(key, value, batch, head, strides):
    """Where the scales of keys, scales of values and zeros of values (if any) of a KV head are."""
    pointers = (key[1] + batch * strides[0][1][0] + head * strides[0][1][1],)
    for i in tl.static_range(1, len(value)):
        pointers = pointers + (value[i] + batch * strides[1][i][0] + head * strides[1][i][1],)
    return pointers


@triton.jit
def load_scales(pointers, start, order, end):
    """Scales of keys, scales and zeros of values of tokens `start` + `order`, float16 [N] each; float32: one number.

    Loaded in a few equal rows: a tensor of fewer elements than threads would be loaded anew by every thread, element
    by element, in the layout of its use.
    """
    ROWS: tl.constexpr = max(256 // order.shape[0], 1)
    offset = (start + order)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    loaded = ()
    for i in tl.static_range(len(pointers)):
        if pointers[i].dtype.element_ty == tl.float32:
            loaded = loaded + (tl.load(pointers[i]),)
        else:
            rows = tl.load(pointers[i] + offset, mask=offset < end, other=0)
            loaded = loaded + (tl.max(rows, 0).to(tl.float16),)
    return loaded


@triton.jit
def load_scaled_keys(
    base, start, order, blocks, scale, DIM: tl.constexpr, CODE: tl.constexpr, MODE: tl.constexpr, DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """`load_keys` times their scales."""
    k = load_keys(base, start, order, blocks, DIM, CODE, MODE, MASKED).to(DTYPE)
    return k * (scale if scale.dtype == tl.float32 else scale[:, None]).to(DTYPE)


@triton.jit
def load_scaled_values(
    base, start, blocks, scales, N: tl.constexpr, DIM: tl.constexpr, CODE: tl.constexpr, MODE: tl.constexpr,
    DTYPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`load_values` times scale plus zero; where all tokens have one scale, as they are."""
    v = load_values(base, start, blocks, N, DIM, CODE, MODE, MASKED).to(DTYPE)
    if scales[1].dtype != tl.float32:
        v *= scales[1][None, :].to(DTYPE)
    if len(scales) == 3:
        v += scales[2][None, :].to(DTYPE)
    return v


@triton.jit(do_not_specialize=["first_block"])
def unpack_kernel(
    key, value, keys, values, first_block, strides,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """One program = one block of packed tokens of one KV head, from `first_block`, times their scales.

    Written as keys [B, H_kv, tokens, columns as in `key_channels`] and values [B, H_kv, tokens, D_v], not rotated back.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    DTYPE: tl.constexpr = keys.dtype.element_ty
    WIDTH: tl.constexpr = part_width(DIM, KEY[0]) * parts(KEY[0])
    order, start = tile_order(VALUE[0], BLOCK_TOKENS), (first_block + tl.program_id(0)) * BLOCK_TOKENS
    pointers = scale_pointers(key, value, batch, head, strides)
    scales = load_scales(pointers, start, order, start + BLOCK_TOKENS)
    key_packed = key[0] + batch * strides[0][0][0] + head * strides[0][0][1]
    k = load_scaled_keys(key_packed, start, order, 0, scales[0], DIM, KEY, MODE, DTYPE, False)
    value_packed = value[0] + batch * strides[1][0][0] + head * strides[1][0][1]
    v = load_scaled_values(value_packed, start, 0, scales, BLOCK_TOKENS, VALUE_DIM, VALUE, MODE, DTYPE, False)
    if scales[1].dtype == tl.float32:
        v *= scales[1].to(DTYPE)
    row = (batch * tl.num_programs(1) + head) * tl.num_programs(0) + tl.program_id(0)
    row = row * BLOCK_TOKENS + order
    tl.store(keys + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], k)
    channel = tl.arange(0, channels(VALUE_DIM))
    tl.store(values + row[:, None] * VALUE_DIM + channel[None, :], v.T, mask=(channel < VALUE_DIM)[None, :])
