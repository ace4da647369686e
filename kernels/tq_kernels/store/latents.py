"""Store latents and rotary keys (MLA): quantise tokens of both into their packed states, in one launch, in place.

One program takes a few tokens of one sequence: their latents, and their rotary keys if the layer has any.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..device import Device, describe
from ..launch import Launch, Program, Signature, signature
from ..states import Layout, PackedStrides, States, TokenSteps
from ..tuning import latent_choices, latent_options
from .quantize import StoreStrides, check_vectors
from .rows import store_rows

LATENT_RANKS = (128, 256, 512)
ROTARY_DIMS = (0, 32, 64)


@triton.jit(do_not_specialize=["start", "end"])
def _store_latents_kernel(
    latents, latent, rotary_keys, rotary, latent_strides, rotary_strides, start, end,
    LATENT: tl.constexpr, ROTARY: tl.constexpr, ARITHMETIC: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Vectors, and the `Tensors` of the states they go to; LATENT and ROTARY each `Vectors`, ROTARY None without any.

    `start` and `end` are tokens of the packed states.
    """
    batch = tl.program_id(2).to(tl.int64)
    first = (start // TOKENS + tl.program_id(0)) * TOKENS
    token = first + tl.arange(0, TOKENS)
    valid = (token >= start) & (token < end)
    x = latents + batch * latent_strides.x.batch
    steps, stride = latent_strides.states, latent_strides.x.token
    store_rows(x, stride, latent, steps, batch, first, start, valid, LATENT, ARITHMETIC, TOKENS)
    if ROTARY is not None:
        x = rotary_keys + batch * rotary_strides.x.batch
        steps, stride = rotary_strides.states, rotary_strides.x.token
        store_rows(x, stride, rotary, steps, batch, first, start, valid, ROTARY, ARITHMETIC, TOKENS)


def store_latents(latent: States, rotary: States, latents: torch.Tensor, rotary_keys: torch.Tensor, start: int) -> None:
    """Quantise `latents` [B, 1, T, rank] and `rotary_keys` [B, 1, T, d] into tokens start .. start + T; one launch.

    latents, rotary_keys: bfloat16, float16 or float32, any strides but 1 in the last dimension; rank 128, 256 or 512,
                          d 0, 32 or 64
    latent:               key format of 2, 3, 4 or 8 bits; written in place, as rotary is
    rotary:               EXACT in the dtype of the vectors, LARGEST or PER_HEAD

    What is stored before `start` and behind start + T stays.  A vector with NaN or inf gets a NaN scale (float8: such
    elements become NaN) and spoils no other; where vectors are rotated, elements beyond 2**50 are not cut off as the
    reference does, and those beyond 2**96 count as inf.  Raises ValueError, before anything is written, if shapes,
    dtypes or strides do not fit.
    """
    launch = store_latents_launch(latent, rotary, latents, rotary_keys, start, describe(latents.device))
    if launch is not None:
        launch.run()


def store_latents_launch(
    latent: States, rotary: States, latents: torch.Tensor, rotary_keys: torch.Tensor, start: int, device: Device
) -> Launch | None:
    """The launch of `store_latents`, None if there is nothing to store."""
    plan = _plan(device, latent.layout, rotary.layout, signature(latents), signature(rotary_keys))
    end = start + latents.shape[2]
    if start < 0:
        raise ValueError(f"expected start >= 0, got {start}")
    for states in (latent, rotary):
        states.check(end)
    if end == start:
        return None
    programs = -(-end // plan.tokens) - start // plan.tokens
    second = (rotary_keys, rotary.tensors) if plan.strides[1] is not None else (None, None)
    arguments = (latents, latent.tensors, *second, *plan.strides, start, end)
    return Launch(plan.program, (programs, 1, latents.shape[0]), arguments)


class _Plan(NamedTuple):
    """What is worked out once for layouts and signatures."""

    program: Program
    tokens: int  # of a program
    strides: tuple[StoreStrides, StoreStrides | None]


@lru_cache(maxsize=256)
def _plan(device: Device, latent: Layout, rotary: Layout, latents: Signature, rotary_keys: Signature) -> _Plan:
    """Raises ValueError as `store_latents` does."""
    check_vectors(latent, latents, latents)
    check_vectors(rotary, rotary_keys, latents)
    check_latents(latent, rotary, latents.dtype)
    constants = latent_choices(latent, rotary, latents.dtype, device)
    program = Program(_store_latents_kernel, device, constants, latent_options(latents.dtype, device))
    second = _strides(rotary, rotary_keys) if rotary.head_dim else None
    return _Plan(program, constants["TOKENS"], (_strides(latent, latents), second))


def _strides(layout: Layout, x: Signature) -> StoreStrides:
    packed, scale, _ = layout.stored_strides
    return StoreStrides(TokenSteps(*x.strides[:3]), PackedStrides(packed, scale))


def check_latents(latent: Layout, rotary: Layout, dtype: torch.dtype) -> None:
    """Raise ValueError unless these are states of latents and of rotary keys in `dtype`, of one KV head."""
    rank, dim = latent.head_dim, rotary.head_dim
    if rank not in LATENT_RANKS or dim not in ROTARY_DIMS or latent.shape[1] != 1:
        raise ValueError(
            f"expected latents of one KV head, of rank {LATENT_RANKS}, and rotary keys of {ROTARY_DIMS} channels, got "
            f"{latent.shape[1]} KV heads, {rank} and {dim}; give the cache backend='reference'"
        )
    if latent.coding.exact or latent.strides[2] is not None or rotary.strides[2] is not None:
        raise ValueError("expected latents that are coded, and no zeros")
    if rotary.coding.exact and rotary.dtype != dtype:
        raise ValueError(f"expected exact rotary keys in {rotary.dtype}, as they are held, got {dtype}")
    if not rotary.coding.exact and (rotary.coding.bits != 8 or not dim):
        raise ValueError(f"expected rotary keys in 8 bits, or exact, got {dim} channels in {rotary.coding.bits} bits")
