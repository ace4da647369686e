"""What tests of storages share: how to make one, and all of its state."""

import torch

from tq_cache.backends import quantizers
from tq_cache.formats import packing
from tq_cache.formats.packing import BLOCK_TOKENS
from tq_cache.formats.presets import PRESETS
from tq_cache.formats.states import PackedStates
from tq_cache.storage.growing import GrowingStorage

HEADS = 2


def make_storage(preset: str = "tq4", residual: int = 0, sinks: int = 0) -> GrowingStorage:
    return GrowingStorage(PRESETS[preset], residual, sinks, "reference")


def tokens(generator, count: int, batch: int = 2, key_dim: int = 32, value_dim: int = 48, dtype=torch.bfloat16):
    """Keys and values of `count` new tokens, of different width."""
    return tuple(torch.randn(batch, HEADS, count, dim, generator=generator).to(dtype) for dim in (key_dim, value_dim))


def codes_of(states: PackedStates, count: int) -> torch.Tensor:
    """Everything stored for each of the first `count` tokens, [B, H, count, n]: codes, scale and zero as integers, or
    the elements of the exact format."""
    if states.format.exact:
        return quantizers.decode(states, states.packed.dtype)[:, :, :count]
    width = BLOCK_TOKENS if states.by_channel else states.head_dim
    codes = packing.unpack(states.packed, states.format.bits, width)
    codes = (codes.transpose(-1, -2) if states.by_channel else codes).flatten(2, 3)
    factors = [f.view(torch.int16)[..., None] for f in (states.scale, states.zero) if f is not None]
    return torch.cat([codes.to(torch.int16), *factors], dim=-1)[:, :, :count]


def everything(storage: GrowingStorage) -> dict[str, object]:
    """A copy of all of a storage's state."""
    state = {name: value for name, value in vars(storage).items() if isinstance(value, int)}
    return state | {str(i): tensor.clone() for i, tensor in enumerate(storage.tensors())}


def assert_same_state(before: dict[str, object], after: dict[str, object]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        same = torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name]
        assert same, name
