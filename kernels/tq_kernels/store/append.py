"""Append: new keys and values to their places in two buffers, in one launch."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..device import Device, describe
from ..launch import Launch, Program, Signature, check_devices, signature
from ..states import TokenSteps
from ..tuning import append_tile


class AppendStrides(NamedTuple):
    key: TokenSteps
    value: TokenSteps
    tail_key: TokenSteps
    tail_value: TokenSteps


@triton.jit
def _copy(x, buffer, x_steps, steps, start, tokens, DIM: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    batch, head = tl.program_id(2).to(tl.int64) // 2, tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, WIDTH)[None, :]
    mask = (token < tokens)[:, None] & (channel < DIM)
    source = x + batch * x_steps.batch + head * x_steps.head + token.to(tl.int64)[:, None] * x_steps.token
    target = buffer + batch * steps.batch + head * steps.head + (start + token).to(tl.int64)[:, None] * steps.token
    tl.store(target + channel, tl.load(source + channel, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["start", "tokens"])
def _append_kernel(
    keys, values, tail_keys, tail_values, strides, start, tokens,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program = TOKENS tokens of one (sequence, KV head), keys or values by the last axis of the grid."""
    if tl.program_id(2) % 2 == 0:
        _copy(keys, tail_keys, strides.key, strides.tail_key, start, tokens, KEY_DIM, TOKENS, WIDTH)
    else:
        _copy(values, tail_values, strides.value, strides.tail_value, start, tokens, VALUE_DIM, TOKENS, WIDTH)


def append(
    keys: torch.Tensor, values: torch.Tensor, tail_keys: torch.Tensor, tail_values: torch.Tensor, start: int
) -> None:
    """Copy `keys` [B, H_kv, T, D] and `values` [B, H_kv, T, D_v] to tokens start .. start + T of the buffers.

    The buffers are [B, H_kv, capacity, D] and [B, H_kv, capacity, D_v].  All four tensors are of one dtype; any strides
    but 1 in the last dimension.  Raises ValueError, before anything is written, if they do not fit each other.
    """
    launch = append_launch(keys, values, tail_keys, tail_values, start, describe(keys.device))
    if launch is not None:
        launch.run()


def append_launch(
    keys: torch.Tensor, values: torch.Tensor, tail_keys: torch.Tensor, tail_values: torch.Tensor, start: int,
    device: Device,
) -> Launch | None:  # fmt: skip
    """The launch of `append`, None if there is nothing to copy."""
    tensors = (keys, values, tail_keys, tail_values)
    plan = _plan(device, *map(signature, tensors))
    if start < 0 or start + plan.tokens > plan.capacity:
        raise ValueError(f"expected start >= 0 and room for {plan.tokens} tokens, got start {start} of {plan.capacity}")
    if not plan.tokens:
        return None
    return Launch(plan.program, plan.grid, (*tensors, plan.strides, start, plan.tokens))


class _Plan(NamedTuple):
    """What is worked out once for the signatures of the tensors."""

    program: Program
    grid: tuple[int, int, int]
    tokens: int
    capacity: int  # tokens of the buffers
    strides: AppendStrides


@lru_cache(maxsize=256)
def _plan(device: Device, *tensors: Signature) -> _Plan:
    """Raises ValueError unless keys, values and their buffers fit each other."""
    check_devices(*tensors)
    keys, values, tail_keys, tail_values = (x.shape for x in tensors)
    fit = keys[:3] == values[:3] and tail_keys[:3] == tail_values[:3] and keys[:2] == tail_keys[:2]
    fit = fit and (keys[3], values[3]) == (tail_keys[3], tail_values[3])
    if not fit or len({x.dtype for x in tensors}) > 1 or any(x.strides[3] != 1 for x in tensors):
        raise ValueError(
            "expected keys and values [B, H_kv, T, D], buffers [B, H_kv, capacity, D] of the same D, one dtype and "
            f"stride 1 in the last dimension, got {[list(x.shape) for x in tensors]}, strides "
            f"{[x.strides for x in tensors]}, {[x.dtype for x in tensors]}"
        )
    batch, heads, tokens, _ = keys
    width = triton.next_power_of_2(max(keys[3], values[3]))
    rows = append_tile(tokens, width)
    constants = dict(KEY_DIM=keys[3], VALUE_DIM=values[3], TOKENS=rows, WIDTH=width)
    grid = (-(-tokens // rows), heads, 2 * batch)
    program = Program(_append_kernel, device, constants, {})
    strides = AppendStrides(*(TokenSteps(*x.strides[:3]) for x in tensors))
    return _Plan(program, grid, tokens, tail_keys[2], strides)
