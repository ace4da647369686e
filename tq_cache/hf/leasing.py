"""Leasing a preallocated cache to a call, so that it shows when nobody has it any more.

A call gets a twin of the cache: objects of their own for the cache and each of its layers, over the same state.
Whoever keeps the twin, a `copy.copy` of it, its list of layers or a layer keeps one of these objects alive.  What a
packed layer hands out as `keys` and `values` are copies.  Tensors of transformers' own layers are the memory itself,
as in a StaticCache.
"""

import copy
import weakref
from typing import Any, NamedTuple


class Lease(NamedTuple):
    """What a call was given, referred to weakly: the cache and its layers."""

    parts: "tuple[weakref.ref[Any], ...]"

    @property
    def is_held(self) -> bool:
        """Whether anybody still has a part of it."""
        return any(part() is not None for part in self.parts)


def lease(cache: Any) -> tuple[Any, Lease]:
    """A twin of a cache, and whether somebody has it."""
    twin = copy.copy(cache)
    twin.layers = [_twin(layer) for layer in cache.layers]
    return twin, Lease(tuple(weakref.ref(part) for part in (twin, *twin.layers)))


def _twin(layer: Any) -> Any:
    """Another object with the very attributes of a layer: what one sets, the other has."""
    twin = layer.__class__.__new__(layer.__class__)
    twin.__dict__ = layer.__dict__
    return twin
