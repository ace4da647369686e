"""What tests of preallocated layers share: random tokens, added as a layer adds them."""

import torch
import torch._dynamo.utils

from tq_cache.hf.graph_ops import flatten
from tq_cache.storage.preallocated import PreallocatedStorage

CHUNKS = (100, 1, 1, 150, *[1] * 140, 60, 1)


def random_pair(generator: torch.Generator, tokens: int, dims: tuple[int, int] = (64, 64)) -> list[torch.Tensor]:
    return [torch.randn(2, 2, tokens, dim, generator=generator) for dim in dims]


def add(storage: PreallocatedStorage, keys: torch.Tensor, values: torch.Tensor) -> None:
    """One chunk, the way a layer adds it."""
    if storage.states is None or keys.shape[2] > 1:
        storage.append(keys, values)
    else:
        storage.before_step()
        torch.ops.tq_cache.update(keys, values, *flatten(storage.states))
