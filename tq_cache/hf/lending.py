"""Whether a cache that was lent to a call can still be seen by anybody, so that its memory must not be used again.

A `copy.copy` of the cache, its list of layers, a layer, tensors of a layer and views of them may all outlive the cache.
Counts of references tell: an object that nobody else has is referred to by what it is a part of, and nothing more.
"""

import sys
from collections import Counter
from typing import Any

import torch

from ..compat import storage_users
from .layers import PackedLayer, PreallocatedLayer

Parts = list[tuple[Any, int]]  # objects, and how many references to each the cache accounts for


def is_seen(owner: tuple[Any, ...]) -> bool:
    """Whether anybody but `owner`, whose first element is a cache, refers to the cache, its parts or its memory.

    The caller must have no variable that does.  What is in garbage cycles counts as seen until it is collected.
    """
    parts = _parts(owner[0])
    if any(count > _UNSEEN for count in _unaccounted(parts)):
        return True
    return any(storage_users(part) > 1 for part, _ in parts if isinstance(part, torch.Tensor))


def _parts(cache: Any) -> Parts:
    """The cache, its layers, their storages and tensors."""
    parts: Parts = [(cache, 1), (cache.layers, 1)]
    for layer in cache.layers:
        parts.append((layer, 1))
        flat: Counter[int] = Counter()
        if isinstance(layer, PreallocatedLayer) and layer.flat is not None:
            flat.update(id(x) for x in (*layer.flat.buffers, *layer.flat.calibration, layer.flat.num_tokens))
        if isinstance(layer, PackedLayer):
            parts.append((layer.storage, 1))
            parts += [(tensor, 1 + flat[id(tensor)]) for tensor in layer.storage.tensors()]
        else:
            parts += [(part, 1) for part in vars(layer).values() if isinstance(part, torch.Tensor)]
    return parts


def _unaccounted(parts: Parts) -> list[int]:
    return [sys.getrefcount(part) - owners for part, owners in parts]


_UNSEEN = _unaccounted([(object(), 0)])[0]  # those of the list and of the loop
