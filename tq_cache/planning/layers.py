"""What each layer is stored as: from the kinds of a model's layers to one plan per layer.  Knows no tensors, no models.

Kinds are transformers' own `layer_types`: full_attention, sliding_attention, linear_attention, dummy, ...
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..formats.presets import EXACT, PRESETS, Format, Preset, get_format

# Sparse attention with an indexer (DSA); the second is its name up to 5.17.
INDEXED = ("indexed_attention", "deepseek_sparse_attention")
PACKABLE = ("full_attention", "hybrid", *INDEXED)
# Layers of these kinds keep a state of fixed size, or nothing: they hold no keys and values that grow.
WITHOUT_KV = ("linear_attention", "conv", "mamba", "dummy", "moe", "mlp")
WINDOWED = ("sliding_attention", "chunked_attention", "hybrid_sliding")
# Sparse by blocks, by arguments of attention that "turboquant" refuses.
BLOCK_SPARSE = ("minimax_m3_sparse",)
SKIP_WORDS = ("boundary", "sliding_window")


@dataclass(frozen=True)
class LayerPlan:
    """What the keys and values of one layer are stored as.

    preset: they are packed with it; None: they stay in the model's dtype
    reason: why it is not the cache's preset; empty where it is
    latent: they are latents and rotary keys, as the preset then is for (`Preset.for_latents`)
    packable: whether any preset takes their width
    """

    index: int
    kind: str
    preset: Preset | None = None
    reason: str = ""
    latent: bool = False
    packable: bool = True

    @property
    def packed(self) -> bool:
        return self.preset is not None


def plan_layers(
    kinds: Sequence[str],
    preset: Preset | None,
    skip_layers: Sequence[str | int] | str | int,
    boundary_layers: int,
    skip_format: str | None = None,
    layer_presets: Mapping[int, str] | None = None,
    latents: Mapping[int, int] | None = None,
    rotary: str = "exact",
    unpackable: Mapping[int, str] | None = None,
) -> list[LayerPlan]:
    """One plan per layer.

    kinds:           kind of every layer
    preset:          of the layers that nothing else is said of; None: the model's dtype
    skip_layers:     the words "boundary" and "sliding_window", and indices, negative ones counted from the end
    boundary_layers: how many layers at each end "boundary" means, among those that hold keys and values
    skip_format:     preset of the layers that "boundary" or an index names; None: the model's dtype
    layer_presets:   presets by layer index, which win over all of these
    latents:         of the layers that cache latents, by index, the width of their rotary keys, maybe 0
    rotary:          format of those rotary keys; where there are none, "exact", since there is nothing to pack
    unpackable:      the layers whose width no preset takes, by index, with what is wrong with it

    Raises ValueError on unknown words, presets or formats, indices out of range, a skip_format of no layers,
    layer_presets that name a layer twice or one that cannot be packed, a format of rotary keys where there are none,
    and models without any keys and values; TypeError on layer_presets that are no mapping; NotImplementedError where
    sliding windows were to be packed.
    """
    latents = {} if latents is None else latents
    why_not = {index: _why_not(kind) for index, kind in enumerate(kinds) if kind not in PACKABLE}
    why_not.update(unpackable or {})
    rotary_format = _rotary_format(rotary, latents)
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
    skipped = _skipped_preset(skip_format, skip_layers, "boundary" in words or bool(indices))
    edge = holding[:boundary_layers] + holding[len(holding) - boundary_layers :] if "boundary" in words else []
    # What is said of single layers; what stands later wins.
    said: dict[int, tuple[Preset | None, str]] = dict.fromkeys(edge, (skipped, "boundary"))
    said |= dict.fromkeys(indices, (skipped, "index in skip_layers"))
    said |= {index: (own, "layer_presets") for index, own in _presets_by_layer(layer_presets, kinds, why_not).items()}
    plans = []
    for index, kind in enumerate(kinds):
        own, reason = (None, why_not[index]) if index in why_not else said.get(index, (preset, ""))
        if own is not None and index in latents:
            own = own.for_latents(rotary_format if latents[index] else EXACT)
        packable = kind not in PACKABLE or index not in why_not
        plans.append(LayerPlan(index, kind, own, reason, index in latents, packable))
    return plans


def _skipped_preset(
    skip_format: str | None, skip_layers: Sequence[str | int] | str | int, names_layers: bool
) -> Preset | None:
    """The preset of the layers that skip_layers names; it must name some."""
    if skip_format is not None and not names_layers:
        raise ValueError(
            f"expected 'boundary' or layer indices in skip_layers beside skip_format={skip_format!r}, "
            f"got {skip_layers!r}; name the layers that it is for"
        )
    return None if skip_format is None else _preset(skip_format, "as skip_format")


def _rotary_format(rotary: str, latents: Mapping[int, int]) -> Format:
    """The format of that name; there must be latents for any but the exact one."""
    fmt = get_format("rotary", rotary)
    if not latents and not fmt.exact:
        raise ValueError(
            "expected no format of rotary keys, since no layer that can be packed caches latents (MLA), "
            f"got {rotary!r}; leave rotary out"
        )
    return fmt


def _why_not(kind: str) -> str:
    """Why layers of a kind that is not in PACKABLE are transformers' own."""
    if kind in WITHOUT_KV:
        return "no keys and values"
    return "sliding window" if kind in WINDOWED else "layer type of the model's own"


def _parse(skip_layers: Sequence[str | int] | str | int, num_layers: int) -> tuple[set[str], set[int]]:
    """The words of skip_layers, and its indices, from 0 on."""
    entries = [skip_layers] if isinstance(skip_layers, (str, int)) else list(skip_layers)
    words = {entry for entry in entries if isinstance(entry, str)}
    if unknown := words - set(SKIP_WORDS):
        raise ValueError(f"expected skip_layers of {list(SKIP_WORDS)} or layer indices, got {sorted(unknown)}")
    return words, {_index(entry, num_layers, "skip_layers") for entry in entries if not isinstance(entry, str)}


def _presets_by_layer(
    layer_presets: Mapping[int, str] | None, kinds: Sequence[str], why_not: Mapping[int, str]
) -> dict[int, Preset]:
    """layer_presets with indices from 0 on, all of layers that can be packed."""
    if layer_presets is None:
        return {}
    if not isinstance(layer_presets, Mapping):
        raise TypeError(f"expected layer_presets as {{layer index: preset name}}, got {layer_presets!r}")
    presets: dict[int, Preset] = {}
    for entry, name in layer_presets.items():
        index = _index(entry, len(kinds), "layer_presets")
        if index in presets:
            raise ValueError(f"expected one entry per layer in layer_presets, got two for layer {index}: {entry} too")
        if index in why_not:
            raise ValueError(
                f"expected layers that can be packed in layer_presets, got layer {index} ({kinds[index]}: "
                f"{why_not[index]}); leave it out"
            )
        presets[index] = _preset(name, f"for layer {index} in layer_presets")
    return presets


def _index(entry: object, num_layers: int, argument: str) -> int:
    """A layer's index from 0 on."""
    if isinstance(entry, bool) or not isinstance(entry, int) or not -num_layers <= entry < num_layers:
        raise ValueError(f"expected a layer index from {-num_layers} to {num_layers - 1}, got {entry!r} in {argument}")
    return entry % num_layers


def _preset(name: str, place: str) -> Preset:
    """The preset of that name, as it is: what the cache's arguments change is its own preset."""
    if name not in PRESETS:
        raise ValueError(f"expected a preset of {list(PRESETS)} {place}, got {name!r}")
    return PRESETS[name]
