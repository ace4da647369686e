"""Append: new keys and values to their places in two buffers, in one launch."""

import torch
import triton
import triton.language as tl

from .launch import aligned, launch

ELEMENTS = 2048  # of a tile


@triton.jit
def _copy(x, buffer, x_strides, strides, start, tokens, DIM: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    batch, head = tl.program_id(2).to(tl.int64) // 2, tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, WIDTH)[None, :]
    mask = (token < tokens)[:, None] & (channel < DIM)
    source = x + batch * x_strides[0] + head * x_strides[1] + token.to(tl.int64)[:, None] * x_strides[2]
    target = buffer + batch * strides[0] + head * strides[1] + (start + token).to(tl.int64)[:, None] * strides[2]
    tl.store(target + channel, tl.load(source + channel, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["start", "tokens"])
def _append_kernel(
    keys, values, tail_keys, tail_values, key_strides, value_strides, tail_key_strides, tail_value_strides,
    start, tokens, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program = TOKENS tokens of one (sequence, KV head), keys or values by the last axis of the grid."""
    if tl.program_id(2) % 2 == 0:
        _copy(keys, tail_keys, key_strides, tail_key_strides, start, tokens, KEY_DIM, TOKENS, WIDTH)
    else:
        _copy(values, tail_values, value_strides, tail_value_strides, start, tokens, VALUE_DIM, TOKENS, WIDTH)


def append(
    keys: torch.Tensor, values: torch.Tensor, tail_keys: torch.Tensor, tail_values: torch.Tensor, start: int
) -> None:
    """Copy `keys` [B, H_kv, T, D] and `values` [B, H_kv, T, D_v] to tokens start .. start + T of the buffers.

    The buffers are [B, H_kv, capacity, D] and [B, H_kv, capacity, D_v].  All four tensors are of one dtype; any strides
    but 1 in the last dimension.  Raises ValueError, before anything is written, if they do not fit each other.
    """
    batch, heads, tokens, key_dim = keys.shape
    _check(keys, tail_keys, keys, start)
    _check(values, tail_values, keys, start)
    if tokens == 0:
        return
    width = triton.next_power_of_2(max(key_dim, values.shape[3]))
    rows = min(triton.next_power_of_2(tokens), max(1, ELEMENTS // width))
    tensors = (keys, values, tail_keys, tail_values)
    strides = tuple(x.stride()[:3] for x in tensors)
    constants = dict(KEY_DIM=key_dim, VALUE_DIM=values.shape[3], TOKENS=rows, WIDTH=width)
    place = (keys.device, keys.dtype, strides, key_dim, values.shape[3], rows, aligned(*tensors))
    grid = (triton.cdiv(tokens, rows), heads, 2 * batch)
    launch(_append_kernel, place, grid, (*tensors, *strides, start, tokens), constants)


def _check(x: torch.Tensor, buffer: torch.Tensor, keys: torch.Tensor, start: int) -> None:
    """Raise ValueError unless `x` fits into tokens start .. of `buffer` and goes with `keys`."""
    end = start + keys.shape[2]
    if x.shape[:3] != keys.shape[:3] or x.dtype != keys.dtype or x.stride(3) != 1:
        raise ValueError(
            f"expected {keys.dtype} {list(keys.shape[:3])} with stride 1 in the last dimension, "
            f"got {x.dtype} {list(x.shape)} with strides {x.stride()}"
        )
    fits = buffer.shape[:2] == x.shape[:2] and buffer.shape[3] == x.shape[3] and 0 <= start and end <= buffer.shape[2]
    if not fits or buffer.dtype != x.dtype or buffer.stride(3) != 1:
        raise ValueError(
            f"expected a buffer of {x.dtype} [{x.shape[0]}, {x.shape[1]}, {end} or more, {x.shape[3]}] with stride 1 "
            f"in the last dimension and start >= 0, got {buffer.dtype} {list(buffer.shape)} with strides "
            f"{buffer.stride()}, start {start}"
        )
