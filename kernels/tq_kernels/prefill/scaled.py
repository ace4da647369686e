"""Packed keys and values times their scales, as operands of products."""

import triton
import triton.language as tl

from ..bits.layout import at_head
from ..bits.to_float16 import load_keys, load_values
from .arguments import TokenScales, TokenScalesAndZero


@triton.jit
def scale_pointers(key, value, batch, head, strides):
    """Where the scales of keys, scales of values and zeros of values (if any) of a KV head are."""
    key_scale = at_head(key.scale, strides.key.scale, batch, head)
    value_scale = at_head(value.scale, strides.value.scale, batch, head)
    if value.zero is None:
        return TokenScales(key_scale, value_scale)
    else:
        return TokenScalesAndZero(key_scale, value_scale, at_head(value.zero, strides.value.scale, batch, head))


@triton.jit
def _load_token_scale(pointer, offset, end):
    """One of `load_scales`."""
    if pointer.dtype.element_ty == tl.float32:
        return tl.load(pointer)
    else:
        return tl.max(tl.load(pointer + offset, mask=offset < end, other=0), 0).to(tl.float16)


@triton.jit
def load_scales(pointers, start, order, end):
    """Scales of keys, scales and zeros of values of tokens `start` + `order`, float16 [N] each; float32: one number.

    Loaded in a few equal rows: a tensor of fewer elements than threads would be loaded anew by every thread, element
    by element, in the layout of its use.
    """
    ROWS: tl.constexpr = max(256 // order.shape[0], 1)
    offset = (start + order)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    key, value = _load_token_scale(pointers.key, offset, end), _load_token_scale(pointers.value, offset, end)
    if len(pointers) == 2:
        return TokenScales(key, value)
    else:
        return TokenScalesAndZero(key, value, _load_token_scale(pointers.zero, offset, end))


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
    if scales.value.dtype != tl.float32:
        v *= scales.value[None, :].to(DTYPE)
    if len(scales) == 3:
        v += scales.zero[None, :].to(DTYPE)
    return v
