"""Update of a preallocated layer by one token, in one launch that reads its place from the device and counts it.

The layer is drawn at `PreallocatedStates` in `tq_cache/formats/states.py`: sinks, packed blocks, and a ring of the
newest tokens that has room for a block more than `residual_length`.  No token takes the slot of one that is still
exact: the (residual_length + 64)th of the ring takes its last free slot, and then the oldest block is packed.  With a
residual_length of 0 it is itself the last of that block, so one program writes it and packs, in this order.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..bits.layout import BLOCK_TOKENS
from ..device import Device, describe
from ..launch import Launch, Program, Signature, check_devices, signature
from ..states import Layout, PairSteps, States, TokenSteps, check_count, check_ring
from ..tuning import quantize_choices
from .quantize import StoreStrides, quantize_blocks


class Sizes(NamedTuple):
    """In tokens: how many newest stay exact, how many first, how many there is room for, slots of the ring."""

    residual_length: int
    num_sinks: int
    max_length: int
    ring_slots: int


class Exact(NamedTuple):
    """Keys, or values, in the model's dtype: the new token, the ring, and the sinks, or None."""

    new: torch.Tensor
    ring: torch.Tensor
    sinks: torch.Tensor | None


class UpdateStrides(NamedTuple):
    """Of keys, or values: of the new token; of sinks (of the ring where there are none); of ring and packed states."""

    new: PairSteps
    sinks: TokenSteps
    store: StoreStrides


TICKET = tl.constexpr(1 << 32)


@triton.jit
def count_token(num_tokens, max_length):
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
def put_token(vector, buffer, steps, batch, head, place, DIM: tl.constexpr):
    """One vector to its place in a buffer."""
    channel = tl.arange(0, triton.next_power_of_2(DIM))
    buffer += batch * steps.batch + head * steps.head + place.to(tl.int64) * steps.token
    tl.store(buffer + channel, vector, mask=channel < DIM)


@triton.jit
def _update_side(
    exact, states, strides, count, sizes, VALUE: tl.constexpr, VECTORS: tl.constexpr, ARITHMETIC: tl.constexpr
):
    """Keys, or values: writes the new token, and packs the oldest block if that fills the ring."""
    batch, head = tl.program_id(2).to(tl.int64) // 2, tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, triton.next_power_of_2(VECTORS.dim))
    new = exact.new + batch * strides.new.batch + head * strides.new.head + channel
    vector = tl.load(new, mask=channel < VECTORS.dim)
    number = count - sizes.num_sinks  # among those that are no sinks
    if number >= 0:
        put_token(vector, exact.ring, strides.store.x, batch, head, number % sizes.ring_slots, VECTORS.dim)
        start = tl.maximum(number - sizes.residual_length, 0) // BLOCK_TOKENS * BLOCK_TOKENS
        if number - start == sizes.residual_length + BLOCK_TOKENS - 1:
            tl.debug_barrier()  # the new token may be one of the block
            ring = exact.ring + (start % sizes.ring_slots).to(tl.int64) * strides.store.x.token
            end = start + BLOCK_TOKENS
            quantize_blocks(ring, states, strides.store, start, end, VALUE, VECTORS, ARITHMETIC, 1, 1)
    elif exact.sinks is not None:
        put_token(vector, exact.sinks, strides.sinks, batch, head, count, VECTORS.dim)


@triton.jit
def _update_kernel(
    keys, values, key, value, key_strides, value_strides, num_tokens, sizes,
    KEY: tl.constexpr, VALUE: tl.constexpr, ARITHMETIC: tl.constexpr,
):  # fmt: skip
    """Keys or values, each `Exact`, by the last axis of the grid."""
    count = count_token(num_tokens, sizes.max_length)
    if count < sizes.max_length:
        if tl.program_id(2) % 2 == 0:
            _update_side(keys, key, key_strides, count, sizes, False, KEY, ARITHMETIC)
        else:
            _update_side(values, value, value_strides, count, sizes, True, VALUE, ARITHMETIC)


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
    sink_tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write keys [B, H_kv, 1, D] and values [B, H_kv, 1, D_v] as token `num_tokens`, int64 [] on the device; count it.

    key, value: packed states, written in place when the ring holds 64 tokens more than `residual_length`, a multiple
                of 64
    ring_keys, ring_values: [B, H_kv, slots, D or D_v] in the dtype of keys and values
    sink_tokens: keys and values, likewise with as many slots as first tokens stay exact, or None

    Writes and counts nothing if there are `max_length` tokens.  Raises ValueError if shapes or dtypes do not fit.
    """
    update_launch(
        keys, values, key, value, ring_keys, ring_values, num_tokens, residual_length, max_length, sink_tokens,
        describe(keys.device),
    ).run()  # fmt: skip


def update_launch(
    keys: torch.Tensor, values: torch.Tensor, key: States, value: States, ring_keys: torch.Tensor,
    ring_values: torch.Tensor, num_tokens: torch.Tensor, residual_length: int, max_length: int,
    sink_tokens: tuple[torch.Tensor, torch.Tensor] | None, device: Device,
) -> Launch:  # fmt: skip
    """The launch of `update`."""
    sink_keys, sink_values = sink_tokens or (None, None)
    exact = Exact(keys, ring_keys, sink_keys), Exact(values, ring_values, sink_values)
    plan = _plan(
        device, *(tuple([x if x is None else signature(x) for x in side]) for side in exact), key.layout, value.layout,
        residual_length, max_length, signature(num_tokens),
    )  # fmt: skip
    arguments = (*exact, key.tensors, value.tensors, *plan.strides, num_tokens, plan.sizes)
    return Launch(plan.program, plan.grid, arguments)


class _Plan(NamedTuple):
    """What is worked out once for signatures and layouts."""

    program: Program
    grid: tuple[int, int, int]
    strides: tuple[UpdateStrides, UpdateStrides]
    sizes: Sizes


@lru_cache(maxsize=256)
def _plan(
    device: Device, keys: tuple[Signature | None, ...], values: tuple[Signature | None, ...], key: Layout,
    value: Layout, residual_length: int, max_length: int, num_tokens: Signature,
) -> _Plan:  # fmt: skip
    """Raises ValueError as `update` does; keys, values: of `Exact`."""
    strides = checked_strides(keys, key), checked_strides(values, value)
    check_room(keys, values, (key, value), residual_length, max_length, num_tokens)
    new, ring, sinks = keys
    assert new is not None and ring is not None
    constants, options = quantize_choices(key, value, new.dtype, device)
    sizes = Sizes(residual_length, 0 if sinks is None else sinks.shape[2], max_length, ring.shape[2])
    grid = (1, new.shape[1], 2 * new.shape[0])
    return _Plan(Program(_update_kernel, device, constants, options), grid, strides, sizes)


def check_room(
    keys: tuple[Signature | None, ...], values: tuple[Signature | None, ...], layouts: tuple[Layout, Layout],
    residual_length: int, max_length: int, num_tokens: Signature,
) -> None:  # fmt: skip
    """Raise ValueError unless keys and values, of `Exact`, have the same room, for `max_length` tokens."""
    check_devices(*keys, *values, *layouts, num_tokens)
    check_count(num_tokens)
    (_, ring, sinks), rooms = keys, [[x and x.shape[2] for x in side] for side in (keys, values)]
    assert ring is not None
    if rooms[0] != rooms[1]:
        raise ValueError(f"expected as many keys as values, in rings and among sinks, too, got {rooms}")
    capacity = min(layout.blocks for layout in layouts) * BLOCK_TOKENS.value
    check_ring(max_length, residual_length, 0 if sinks is None else sinks.shape[2], capacity, ring.shape[2])


def checked_strides(exact: tuple[Signature | None, ...], layout: Layout) -> UpdateStrides:
    """Raises ValueError unless the new token and its buffers fit each other and the packed states."""
    new, ring, sinks = exact
    assert new is not None and ring is not None
    for x, tokens in ((new, 1), (ring, ring.shape[2]), *([] if sinks is None else [(sinks, sinks.shape[2])])):
        wanted = (*layout.shape[:2], tokens, layout.head_dim)
        if tuple(x.shape) != wanted or x.dtype != ring.dtype or x.strides[3] != 1:
            raise ValueError(
                f"expected {list(wanted)} in {ring.dtype} with stride 1 in the last dimension, "
                f"got {x.dtype} {list(x.shape)} with strides {x.strides}"
            )
    layout.check(0)
    return UpdateStrides(
        PairSteps(*new.strides[:2]),
        TokenSteps(*(sinks or ring).strides[:3]),
        StoreStrides(TokenSteps(*ring.strides[:3]), layout.stored_strides),
    )
