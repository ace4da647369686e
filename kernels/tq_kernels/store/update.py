"""Update of a preallocated layer by one token, in one launch that reads its place from the device and counts it.

The layer is drawn at `PreallocatedStates` in `tq_cache/formats/states.py`: packed blocks, and a ring of the newest
tokens that has room for a block more than `residual_length`, so that the block that is packed and the token that comes
never share a slot.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..bits.layout import BLOCK_TOKENS
from ..device import Device, describe
from ..launch import Launch, Program, Signature, aligned, signature
from ..states import Layout, PairSteps, States, TokenSteps
from ..tuning import quantize_choices
from .quantize import StoreStrides, quantize_blocks


class Sizes(NamedTuple):
    """In tokens: how many stay exact, how many there is room for, slots of the ring."""

    residual_length: int
    max_length: int
    ring_slots: int


class UpdateStrides(NamedTuple):
    """Of the new token, of rings and packed states."""

    new_key: PairSteps
    new_value: PairSteps
    key: StoreStrides
    value: StoreStrides


TICKET = tl.constexpr(1 << 32)


@triton.jit
def _count_token(num_tokens, max_length):
    """How many tokens there were before this launch, int32; its last program counts the new one, if there is room.

    Reading is taking a ticket, in the upper half of the count: whoever gets the last one knows that every program has
    read, and takes the tickets away again.  Without it, a program that starts late could read the next count.
    """
    programs = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * tl.num_programs(2)
    seen = tl.atomic_add(num_tokens, TICKET)
    count = seen.to(tl.int32)  # the lower half
    if (seen >> 32) == programs - 1:
        tl.atomic_add(num_tokens, (count < max_length).to(tl.int64) - programs * TICKET)
    return count


@triton.jit
def _copy(x, ring, x_steps, steps, slot, DIM: tl.constexpr):
    """One vector of `x` to its slot."""
    batch, head = tl.program_id(2).to(tl.int64) // 2, tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, triton.next_power_of_2(DIM))
    vector = tl.load(x + batch * x_steps.batch + head * x_steps.head + channel, mask=channel < DIM)
    ring += batch * steps.batch + head * steps.head + slot.to(tl.int64) * steps.token
    tl.store(ring + channel, vector, mask=channel < DIM)


@triton.jit
def _update_side(
    x, ring, states, x_steps, strides, count, sizes, VALUE: tl.constexpr, VECTORS: tl.constexpr,
    ARITHMETIC: tl.constexpr,
):  # fmt: skip
    """Keys, or values: program 0 packs the oldest block if the ring is full, program 1 writes the new token."""
    if tl.program_id(0) == 1:
        _copy(x, ring, x_steps, strides.x, count % sizes.ring_slots, VECTORS.dim)
    else:
        start = tl.cdiv(tl.maximum(count - sizes.residual_length, 0), BLOCK_TOKENS) * BLOCK_TOKENS
        if count - start == sizes.residual_length:
            ring += (start % sizes.ring_slots).to(tl.int64) * strides.x.token
            end = start + BLOCK_TOKENS
            quantize_blocks(ring, states, strides, start, end, VALUE, VECTORS, ARITHMETIC, 1, 1)


@triton.jit
def _update_kernel(
    keys, values, ring_keys, key, ring_values, value, strides, num_tokens, sizes,
    KEY: tl.constexpr, VALUE: tl.constexpr, ARITHMETIC: tl.constexpr,
):  # fmt: skip
    """Keys or values by the last axis of the grid."""
    count = _count_token(num_tokens, sizes.max_length)
    if count < sizes.max_length:
        if tl.program_id(2) % 2 == 0:
            _update_side(
                keys, ring_keys, key, strides.new_key, strides.key, count, sizes, False, KEY, ARITHMETIC
            )  # fmt: skip
        else:
            _update_side(
                values, ring_values, value, strides.new_value, strides.value, count, sizes, True, VALUE, ARITHMETIC
            )  # fmt: skip


def update(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: States,
    value: States,
    ring_keys: torch.Tensor,
    ring_values: torch.Tensor,
    num_tokens: torch.Tensor,
    residual_length: int,
    max_length: int,
) -> None:
    """Write keys [B, H_kv, 1, D] and values [B, H_kv, 1, D_v] as token `num_tokens`, int64 [] on the device; count it.

    key, value: packed states, written in place when the ring of `residual_length` newest tokens is full
    ring_keys, ring_values: [B, H_kv, slots, D or D_v] in the dtype of keys and values

    Writes and counts nothing if there are `max_length` tokens.  Raises ValueError if shapes or dtypes do not fit.
    """
    device = describe(keys.device)
    update_launch(
        keys, values, key, value, ring_keys, ring_values, num_tokens, residual_length, max_length, device
    ).run()  # fmt: skip


def update_launch(
    keys: torch.Tensor, values: torch.Tensor, key: States, value: States, ring_keys: torch.Tensor,
    ring_values: torch.Tensor, num_tokens: torch.Tensor, residual_length: int, max_length: int, device: Device,
) -> Launch:  # fmt: skip
    """The launch of `update`."""
    plan = _plan(
        device, signature(keys), signature(values), signature(ring_keys), signature(ring_values), key.layout,
        value.layout, residual_length, max_length, aligned(num_tokens),
    )  # fmt: skip
    arguments = (
        keys, values, ring_keys, key.tensors, ring_values, value.tensors, plan.strides, num_tokens, plan.sizes,
    )  # fmt: skip
    return Launch(plan.program, plan.grid, arguments)


class _Plan(NamedTuple):
    """What is worked out once for signatures and layouts."""

    program: Program
    grid: tuple[int, int, int]
    strides: UpdateStrides
    sizes: Sizes


@lru_cache(maxsize=256)
def _plan(
    device: Device, keys: Signature, values: Signature, ring_keys: Signature, ring_values: Signature, key: Layout,
    value: Layout, residual_length: int, max_length: int, present: tuple[bool | None, ...],
) -> _Plan:  # fmt: skip
    """Raises ValueError as `update` does; present: whether `num_tokens` is aligned."""
    for x, layout, ring in ((keys, key, ring_keys), (values, value, ring_values)):
        wanted = (*layout.shape[:2], 1, layout.head_dim)
        if tuple(x.shape) != wanted or x.dtype != ring.dtype or x.strides[3] != 1:
            raise ValueError(
                f"expected {list(wanted)} in {ring.dtype} with stride 1 in the last dimension, "
                f"got {x.dtype} {list(x.shape)} with strides {x.strides}"
            )
        layout.check(0)
    constants, options = quantize_choices(key, value, keys.dtype, device)
    strides = UpdateStrides(
        PairSteps(*keys.strides[:2]),
        PairSteps(*values.strides[:2]),
        StoreStrides(TokenSteps(*ring_keys.strides[:3]), key.stored_strides),
        StoreStrides(TokenSteps(*ring_values.strides[:3]), value.stored_strides),
    )
    sizes = Sizes(residual_length, max_length, ring_keys.shape[2])
    grid = (2, keys.shape[1], 2 * keys.shape[0])
    return _Plan(Program(_update_kernel, device, constants, options), grid, strides, sizes)
