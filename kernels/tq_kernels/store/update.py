"""Update of a preallocated layer by one token, in one launch that reads its place from the device.

The layer is drawn in `tq_cache/static_parts.py`: packed blocks, and a ring of the newest tokens that has room for a
block more than `residual_length`, so that the block that is packed and the token that comes never share a slot.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..bits.layout import BLOCK_TOKENS
from ..device import Device, describe
from ..launch import Launch, Program, aligned, signature
from ..states import States
from .quantize import choose, quantize_blocks


@triton.jit
def _copy(x, ring, x_strides, strides, slot, DIM: tl.constexpr):
    """One vector of `x` to its slot."""
    batch, head = tl.program_id(2).to(tl.int64) // 2, tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, triton.next_power_of_2(DIM))
    vector = tl.load(x + batch * x_strides[0] + head * x_strides[1] + channel, mask=channel < DIM)
    ring += batch * strides[0] + head * strides[1] + slot.to(tl.int64) * strides[2]
    tl.store(ring + channel, vector, mask=channel < DIM)


@triton.jit
def _update_side(
    x, side, x_strides, strides, count, sizes, CODING: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    DTYPE: tl.constexpr, TERMS: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Keys, or values: program 0 packs the oldest block if the ring is full, program 1 writes the new token."""
    ring, packed, scale, zero, center, smooth, head_scale, rotation = side
    if tl.program_id(0) == 1:
        _copy(x, ring, x_strides, strides, count % sizes[2], DIM)
    else:
        start = tl.cdiv(tl.maximum(count - sizes[0], 0), BLOCK_TOKENS) * BLOCK_TOKENS
        if count - start == sizes[0]:
            ring += (start % sizes[2]).to(tl.int64) * strides[2]
            block = (ring, packed, scale, zero, center, smooth, head_scale, rotation)
            quantize_blocks(
                block, strides, start, start + BLOCK_TOKENS, CODING, DIM, VALUE, DTYPE, TERMS, PRECISION, PTX, NATIVE,
                1, 1,
            )  # fmt: skip


@triton.jit
def _update_kernel(
    keys, values, key, value, token_strides, key_strides, value_strides, total, sizes,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DTYPE: tl.constexpr, KEY_TERMS: tl.constexpr, VALUE_TERMS: tl.constexpr, PRECISION: tl.constexpr,
    PTX: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Keys or values by the last axis of the grid.  sizes = (residual length, most tokens, slots of the ring)."""
    count = tl.load(total).to(tl.int32)
    if count < sizes[1]:
        if tl.program_id(2) % 2 == 0:
            _update_side(
                keys, key, token_strides[0], key_strides, count, sizes, KEY, KEY_DIM, False, DTYPE, KEY_TERMS,
                PRECISION, PTX, NATIVE,
            )  # fmt: skip
        else:
            _update_side(
                values, value, token_strides[1], value_strides, count, sizes, VALUE, VALUE_DIM, True, DTYPE,
                VALUE_TERMS, PRECISION, PTX, NATIVE,
            )  # fmt: skip


def update(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: States,
    value: States,
    ring: tuple[torch.Tensor, torch.Tensor],
    total: torch.Tensor,
    residual_length: int,
    max_length: int,
) -> None:
    """Write keys [B, H_kv, 1, D] and values [B, H_kv, 1, D_v] as token `total`, int64 [] on the device.

    key, value: packed states, written in place when the ring of `residual_length` newest tokens is full
    ring:       of keys and values, [B, H_kv, slots, D or D_v] in their dtype

    Writes nothing if there are `max_length` tokens.  Raises ValueError if shapes or dtypes do not fit.
    """
    update_launch(keys, values, key, value, ring, total, residual_length, max_length, describe(keys.device)).run()


def update_launch(
    keys, values, key: States, value: States, ring, total, residual_length: int, max_length: int, device: Device
) -> Launch:
    """The launch of `update`."""
    plan = _plan(
        device, *map(signature, (keys, values, *ring)), key.layout, value.layout, residual_length, max_length,
        aligned(total),
    )  # fmt: skip
    sides = (ring[0], *key[:7]), (ring[1], *value[:7])
    return Launch(plan.program, plan.grid, (keys, values, *sides, *plan.strides, total, plan.sizes))


class _Plan(NamedTuple):
    """What is worked out once for signatures and layouts."""

    program: Program
    grid: tuple[int, int, int]
    strides: tuple[tuple, ...]  # of the new token, of keys, of values
    sizes: tuple[int, int, int]


@lru_cache(maxsize=256)
def _plan(device, keys, values, ring_keys, ring_values, key, value, residual_length, max_length, present) -> _Plan:
    """Raises ValueError as `update` does; present: whether `total` is aligned."""
    for x, layout, held in ((keys, key, ring_keys), (values, value, ring_values)):
        wanted = (*layout.shape[:2], 1, layout.head_dim)
        if tuple(x.shape) != wanted or x.dtype != held.dtype or x.strides[3] != 1:
            raise ValueError(
                f"expected {list(wanted)} in {held.dtype} with stride 1 in the last dimension, "
                f"got {x.dtype} {list(x.shape)} with strides {x.strides}"
            )
        layout.check(0)
    constants, options = choose(key, value, keys.dtype, device)
    constants.pop("STAGES")
    strides = (
        (keys.strides[:2], values.strides[:2]),
        (*ring_keys.strides[:3], *key.steps),
        (*ring_values.strides[:3], *value.steps),
    )
    sizes = (residual_length, max_length, ring_keys.shape[2])
    grid = (2, keys.shape[1], 2 * keys.shape[0])
    return _Plan(Program(_update_kernel, device, constants, options), grid, strides, sizes)
