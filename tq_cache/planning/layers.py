"""Which layers are packed: from the kinds of a model's layers to one plan per layer.  Knows no tensors, no models.

Kinds are transformers' own `layer_types`: full_attention, sliding_attention, linear_attention, dummy, ...
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Sparse attention with an indexer (DSA); the second is its name up to 5.17.
INDEXED = ("indexed_attention", "deepseek_sparse_attention")
PACKABLE = ("full_attention", "hybrid", *INDEXED)
# Layers of these kinds keep a state of fixed size, or nothing: they hold no keys and values that grow.
WITHOUT_KV = ("linear_attention", "conv", "mamba", "dummy", "moe", "mlp")
WINDOWED = ("sliding_attention", "chunked_attention", "hybrid_sliding")
SKIP_WORDS = ("boundary", "sliding_window")


@dataclass(frozen=True)
class LayerPlan:
    """What happens to one layer: packed, or left to transformers for `reason`."""

    index: int
    kind: str
    packed: bool
    reason: str = ""


def plan_layers(
    kinds: Sequence[str], skip_layers: Sequence[str | int] | str | int, boundary_layers: int
) -> list[LayerPlan]:
    """One plan per layer.

    kinds:           kind of every layer
    skip_layers:     the words "boundary" and "sliding_window", and indices, negative ones counted from the end
    boundary_layers: how many layers at each end "boundary" skips, among those that hold keys and values

    Raises ValueError on unknown words, indices out of range, and models without any keys and values.
    """
    words, indices = _parse(skip_layers, len(kinds))
    if boundary_layers < 0:
        raise ValueError(f"expected boundary_layers of 0 or more, got {boundary_layers}")
    holding = [index for index, kind in enumerate(kinds) if kind not in WITHOUT_KV]
    if not holding:
        raise ValueError(
            f"expected a model with attention layers that cache keys and values, got only {sorted(set(kinds))}; "
            "this model needs no TurboQuantCache, use transformers' own cache"
        )
    if "sliding_window" not in words and any(kinds[index] in WINDOWED for index in holding):
        raise NotImplementedError(
            "packing sliding-window layers is not supported; keep 'sliding_window' in skip_layers "
            "(their window bounds their memory)"
        )
    edge = set(holding[:boundary_layers] + holding[len(holding) - boundary_layers :]) if "boundary" in words else set()
    return [_plan(index, kind, edge, indices) for index, kind in enumerate(kinds)]


def _plan(index: int, kind: str, edge: set[int], indices: set[int]) -> LayerPlan:
    if kind in WITHOUT_KV:
        return LayerPlan(index, kind, packed=False, reason="no keys and values")
    if index in indices:
        return LayerPlan(index, kind, packed=False, reason="index in skip_layers")
    if kind in WINDOWED:
        return LayerPlan(index, kind, packed=False, reason="sliding window")
    if kind not in PACKABLE:
        return LayerPlan(index, kind, packed=False, reason="layer type of the model's own")
    if index in edge:
        return LayerPlan(index, kind, packed=False, reason="boundary")
    return LayerPlan(index, kind, packed=True)


def _parse(skip_layers: Sequence[str | int] | str | int, num_layers: int) -> tuple[set[str], set[int]]:
    entries = [skip_layers] if isinstance(skip_layers, (str, int)) else list(skip_layers)
    words = {entry for entry in entries if isinstance(entry, str)}
    if unknown := words - set(SKIP_WORDS):
        raise ValueError(f"expected skip_layers of {list(SKIP_WORDS)} or layer indices, got {sorted(unknown)}")
    indices = set()
    for entry in entries:
        if isinstance(entry, str):
            continue
        if isinstance(entry, bool) or not isinstance(entry, int) or not -num_layers <= entry < num_layers:
            raise ValueError(f"expected a layer index from {-num_layers} to {num_layers - 1}, got {entry!r}")
        indices.add(entry % num_layers)
    return words, indices
