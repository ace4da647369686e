"""Update of a preallocated layer of latents (MLA) by one token: `update`, for latents and rotary keys.

A block of latents is much for one program, so there are some, each for a few tokens of the block to pack.  All read
the count; the one that packs the last tokens of a block writes the new one, which may be among these.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..bits.layout import BLOCK_TOKENS
from ..device import Device, describe
from ..launch import Launch, Program, Signature, signature
from ..states import Layout, States
from ..tuning import latent_choices, latent_options
from .latents import check_latents
from .rows import store_rows
from .update import Exact, Sizes, UpdateStrides, check_room, checked_strides, count_token, put_token


@triton.jit
def _write_token(exact, strides, batch, count, sizes, DIM: tl.constexpr):
    """The new token to its place among the sinks or in the ring."""
    vector = tl.load(exact.new + batch * strides.new.batch + tl.arange(0, DIM))
    number = count - sizes.num_sinks
    if number >= 0:
        put_token(vector, exact.ring, strides.store.x, batch, 0, number % sizes.ring_slots, DIM)
    elif exact.sinks is not None:
        put_token(vector, exact.sinks, strides.sinks, batch, 0, count, DIM)


@triton.jit
def _pack_rows(
    exact, states, strides, batch, first, start, sizes,
    VECTORS: tl.constexpr, ARITHMETIC: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Tokens `first` ... of the block of token `start`, from the ring, where a block lies in one piece."""
    steps = strides.store
    ring = exact.ring + batch * steps.x.batch + (start % sizes.ring_slots).to(tl.int64) * steps.x.token
    valid = tl.arange(0, TOKENS) < BLOCK_TOKENS  # all of them
    store_rows(ring, steps.x.token, states, steps.states, batch, first, start, valid, VECTORS, ARITHMETIC, TOKENS)


@triton.jit
def _update_latents_kernel(
    latents, rotary_keys, latent, rotary, latent_strides, rotary_strides, num_tokens, sizes,
    LATENT: tl.constexpr, ROTARY: tl.constexpr, ARITHMETIC: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Latents and rotary keys each `Exact`; without rotary keys all of theirs is None."""
    batch, part = tl.program_id(2).to(tl.int64), tl.program_id(0)
    count = count_token(num_tokens, sizes.max_length)
    if count < sizes.max_length:
        if part == tl.num_programs(0) - 1:
            _write_token(latents, latent_strides, batch, count, sizes, LATENT.dim)
            if ROTARY is not None:
                _write_token(rotary_keys, rotary_strides, batch, count, sizes, ROTARY.dim)
        number = count - sizes.num_sinks  # among those that are no sinks
        start = tl.maximum(number - sizes.residual_length, 0) // BLOCK_TOKENS * BLOCK_TOKENS
        if number - start == sizes.residual_length + BLOCK_TOKENS - 1:
            tl.debug_barrier()  # the new token may be one of the block
            first = start + part * TOKENS
            _pack_rows(latents, latent, latent_strides, batch, first, start, sizes, LATENT, ARITHMETIC, TOKENS)
            if ROTARY is not None:
                _pack_rows(rotary_keys, rotary, rotary_strides, batch, first, start, sizes, ROTARY, ARITHMETIC, TOKENS)


def update_latents(
    latents: torch.Tensor,
    rotary_keys: torch.Tensor,
    latent: States,
    rotary: States,
    ring_latents: torch.Tensor,
    ring_rotary: torch.Tensor,
    num_tokens: torch.Tensor,
    residual_length: int,
    max_length: int,
    sink_tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write latents [B, 1, 1, rank] and rotary keys [B, 1, 1, d] as token `num_tokens`, int64 [], and count it.

    Arguments as those of `update`, widths and formats as those of `store_latents`, which also says what is raised.
    Writes and counts nothing if there are `max_length` tokens.
    """
    update_latents_launch(
        latents, rotary_keys, latent, rotary, ring_latents, ring_rotary, num_tokens, residual_length, max_length,
        sink_tokens, describe(latents.device),
    ).run()  # fmt: skip


def update_latents_launch(
    latents: torch.Tensor, rotary_keys: torch.Tensor, latent: States, rotary: States, ring_latents: torch.Tensor,
    ring_rotary: torch.Tensor, num_tokens: torch.Tensor, residual_length: int, max_length: int,
    sink_tokens: tuple[torch.Tensor, torch.Tensor] | None, device: Device,
) -> Launch:  # fmt: skip
    """The launch of `update_latents`."""
    sinks = sink_tokens or (None, None)
    exact = Exact(latents, ring_latents, sinks[0]), Exact(rotary_keys, ring_rotary, sinks[1])
    first, second = (tuple([x if x is None else signature(x) for x in side]) for side in exact)
    plan = _plan(
        device, first, second, latent.layout, rotary.layout, residual_length, max_length, signature(num_tokens)
    )  # fmt: skip
    keys, stored = (exact[1], rotary.tensors) if plan.strides[1] is not None else (None, None)
    arguments = (exact[0], keys, latent.tensors, stored, *plan.strides, num_tokens, plan.sizes)
    return Launch(plan.program, plan.grid, arguments)


class _Plan(NamedTuple):
    """What is worked out once for signatures and layouts."""

    program: Program
    grid: tuple[int, int, int]
    strides: tuple[UpdateStrides, UpdateStrides | None]
    sizes: Sizes


@lru_cache(maxsize=256)
def _plan(
    device: Device, latents: tuple[Signature | None, ...], rotary_keys: tuple[Signature | None, ...], latent: Layout,
    rotary: Layout, residual_length: int, max_length: int, num_tokens: Signature,
) -> _Plan:  # fmt: skip
    """Raises ValueError as `update_latents` does."""
    strides = checked_strides(latents, latent), checked_strides(rotary_keys, rotary)
    check_room(latents, rotary_keys, (latent, rotary), residual_length, max_length, num_tokens)
    new, ring, sinks = latents
    assert new is not None and ring is not None
    check_latents(latent, rotary, new.dtype)
    constants = latent_choices(latent, rotary, new.dtype, device)
    sizes = Sizes(residual_length, 0 if sinks is None else sinks.shape[2], max_length, ring.shape[2])
    grid = (BLOCK_TOKENS.value // constants["TOKENS"], 1, new.shape[0])
    program = Program(_update_latents_kernel, device, constants, latent_options(new.dtype, device))
    return _Plan(program, grid, (strides[0], strides[1] if rotary.head_dim else None), sizes)
