"""KV memory from a config alone: bytes per preset, and the longest context that fits.

Bytes are those of a cache right after a prefill of the whole context.  Packed memory grows by an eighth at a time, so
a cache that got there by decoding may hold up to that much more.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from ..compat import decoder_config
from ..formats.packing import BLOCK_TOKENS
from ..formats.presets import Preset, resolve_preset
from ..formats.states import packed_length_of
from ..storage.base import round_up
from ..storage.checks import check_dims, unpackable_width
from .geometry import LayerGeometry, ModelGeometry, model_geometry
from .layers import PACKABLE, LayerPlan, plan_layers
from .prefill import Prefill

EXACT = "16-bit"
EXACT_BYTES = 2
CALIBRATION_BYTES = 4
# The search for the longest context ends here; what fits then, sliding windows only, fits at any length.
MOST_TOKENS = 1 << 32
MOST_PREFILLED = 1 << 24  # no prefill is longer: a mask of tokens x tokens would have too many bytes to count
DEFAULT_CONTEXT = 32768
MEMORY_UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class PlanSettings:
    """What bytes depend on beside model and preset: tokens, sequences, and the arguments of `TurboQuantCache`."""

    context: int
    batch: int = 1
    residual_length: int = 128
    sink_tokens: int = 4
    skip_layers: tuple[str | int, ...] = ("sliding_window",)
    boundary_layers: int = 2
    skip_format: str | None = None
    layer_presets: Mapping[int, str] | None = None
    rotary: str = "exact"

    def __post_init__(self) -> None:
        if self.context < 1 or self.batch < 1:
            raise ValueError(f"expected context and batch of 1 or more, got {self.context} and {self.batch}")
        if self.residual_length < 0 or self.sink_tokens < 0:
            raise ValueError(
                "expected residual_length and sink_tokens of 0 or more, "
                f"got {self.residual_length} and {self.sink_tokens}"
            )


@dataclass(frozen=True)
class PlanRow:
    """One cache: bytes at the context, how many times smaller than at 16 bits, bits per element, and the longest
    context, in tokens, that fits in the memory given (None: no memory given)."""

    name: str
    nbytes: int
    ratio: float
    bits_per_element: float
    longest_context: int | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """The first row is the 16-bit cache, then one per preset.

    memory:          bytes there are for all
    weights_bytes:   of them, what the weights take; None: not known, or not asked for
    positions:       tokens that the model has positions for, which no longest context exceeds; None: any number
    layer_plans:     with the first of the presets; those without a reason follow the preset of the row
    prefill_bytes:   what a prefill of the whole context takes at its peak beside weights and cache, the same for every
                     row (`prefill_bytes` of `planning.prefill`); None: not asked for, or not known
    prefill_unknown: why it is not known, else ""
    """

    geometry: ModelGeometry
    layer_plans: tuple[LayerPlan, ...]
    settings: PlanSettings
    memory: int | None
    rows: tuple[PlanRow, ...]
    prefill_bytes: int | None = None
    prefill_unknown: str = ""
    weights_bytes: int | None = None
    positions: int | None = None


def plan_memory(
    config: PreTrainedConfig,
    presets: Sequence[str],
    settings: PlanSettings,
    memory: int | None = None,
    prefill: bool = False,
    weights: int | None = 0,
) -> MemoryPlan:
    """Bytes of the 16-bit cache and of each preset, and the longest context that fits in `memory` bytes.

    With `prefill` also what a prefill of the context takes beside them, which imports the model's code and takes up to
    a few seconds; the longest context then fits with its prefill, where that is known.  It also fits with `weights`
    bytes of weights (None: the model's parameters in its dtype, from the config), and is never longer than the model
    has positions.

    Layers whose head_dim cannot be packed are counted at 16 bits, as a cache keeps them.  Raises ValueError or
    NotImplementedError on unknown presets or layers, on rotary keys that cannot be packed, on weights that the config
    does not tell where there is a memory, and on a memory that is not positive beside them.
    """
    geometry, shapes = model_geometry(config), Prefill(config, settings.batch)
    weights = _weights(shapes, memory is not None) if weights is None else weights
    left = None if memory is None else memory - (weights or 0)
    if left is not None and left <= 0:
        raise ValueError(f"expected memory left for keys and values, got {left:,} bytes after the weights")
    chosen = [None, *[resolve_preset(name) for name in presets]]
    layer_plans = tuple(_layer_plans(geometry, chosen[1] if presets else None, settings))
    exact = cache_bytes(geometry, None, settings)
    activations = _prefill(shapes, settings) if prefill else (None, "")
    most = positions(config)
    rows = []
    for preset in chosen:
        nbytes, longest = cache_bytes(geometry, preset, settings), None
        if left is not None:
            counted = shapes if activations[0] is not None else None
            longest = longest_context(geometry, preset, settings, left, counted, most or MOST_TOKENS)
        name = EXACT if preset is None else preset.name
        rows.append(PlanRow(name, nbytes, exact / nbytes, 8 * EXACT_BYTES * nbytes / exact, longest))
    return MemoryPlan(geometry, layer_plans, settings, memory, tuple(rows), *activations, weights, most)


def positions(config: PreTrainedConfig) -> int | None:
    """Tokens that a model has positions for; None: it has no such limit, or its config does not say."""
    return getattr(decoder_config(config), "max_position_embeddings", None) or None


def default_context(config: PreTrainedConfig) -> int:
    """Tokens that a plan is about unless told: 32,768, or what the model has positions for."""
    return min(DEFAULT_CONTEXT, positions(config) or DEFAULT_CONTEXT)


def cache_bytes(geometry: ModelGeometry, preset: Preset | None, settings: PlanSettings) -> int:
    """Bytes of a whole cache with this preset; None: the 16-bit cache (`DynamicCache` of a 16-bit model)."""
    if preset is None:
        return sum(_exact_bytes(layer, settings, _held(layer, settings)) for layer in geometry.layers)
    plans = _layer_plans(geometry, preset, settings)
    return sum(_layer_bytes(layer, plan, settings) for layer, plan in zip(geometry.layers, plans, strict=True))


def token_bytes_of(geometry: ModelGeometry, plans: Sequence[LayerPlan], itemsize: int) -> int:
    """Bytes that each further token of a sequence takes in full attention layers; at least 1.

    itemsize: bytes of an element in the model's dtype
    """
    total = 0
    for layer, plan in zip(geometry.layers, plans, strict=True):
        if plan.kind in PACKABLE:
            width = layer.key_dim + layer.value_dim
            packed = None if plan.preset is None else plan.preset.token_bytes(layer.key_dim, layer.value_dim)
            total += layer.num_kv_heads * (width * itemsize if packed is None else packed)
    return max(total, 1)


def longest_context(
    geometry: ModelGeometry,
    preset: Preset | None,
    settings: PlanSettings,
    memory: int,
    prefill: Prefill | None = None,
    most: int = MOST_TOKENS,
) -> int:
    """Tokens per sequence, at most `most`, whose cache fits in `memory` bytes, with their prefill if given; 0: none."""

    def search(most: int, activations: Callable[[int], int]) -> int:
        fits, too_many = 0, most + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if cache_bytes(geometry, preset, replace(settings, context=middle)) + activations(middle) <= memory:
                fits = middle
            else:
                too_many = middle
        return fits

    longest = search(most, lambda tokens: 0)
    if prefill is None or not longest:
        return longest
    most = min(longest, MOST_PREFILLED)
    prefill.bracket(most)
    while longest := search(most, prefill.estimate):
        estimate, exact = prefill.estimate(longest), prefill.measure(longest)
        held = cache_bytes(geometry, preset, replace(settings, context=longest))
        token = prefill.slope(longest) + held / longest  # bytes of one more
        room = memory - held - exact
        if room >= 0 and estimate - exact < token:
            break
        # Estimates lie above the truth, by less the nearer the lengths that were run: the next one hardly fits.
        prefill.measure(min(most, longest + max(int(room / token), 0) + 1))
    return longest


def parse_memory(text: str) -> int:
    """Bytes from "24GB" (10^9), "24GiB" (2^30), "512MB", ...; raises ValueError on anything else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2].upper() not in MEMORY_UNITS:
        raise ValueError(f"expected a memory size such as 24GB, 80GiB or 512MB, got {text!r}")
    return int(float(match[1]) * MEMORY_UNITS[match[2].upper()])


def _prefill(shapes: Prefill, settings: PlanSettings) -> tuple[int | None, str]:
    """Bytes of a prefill, or None and why they are not known."""
    try:
        return shapes.measure(settings.context), ""
    except NotImplementedError as error:
        return None, str(error)


def _weights(shapes: Prefill, needed: bool) -> int | None:
    """Bytes of the model's parameters; None where they are not known nor needed."""
    try:
        if getattr(shapes.config, "quantization_config", None) is not None:
            raise NotImplementedError("the weights are quantised, and their config does not say how large they are")
        return shapes.weight_bytes()
    except NotImplementedError as error:
        if needed:
            raise NotImplementedError(f"{error}; give the bytes of the weights (--weights-gb)") from error
        return None


def _layer_plans(geometry: ModelGeometry, preset: Preset | None, settings: PlanSettings) -> list[LayerPlan]:
    latents = {layer.index: layer.value_dim for layer in geometry.layers if layer.latent and layer.kind in PACKABLE}
    unpackable = {
        layer.index: problem
        for layer in geometry.layers
        if layer.kind in PACKABLE
        and layer.num_kv_heads
        and (problem := unpackable_width(layer.key_dim, layer.value_dim, layer.latent))
    }
    return plan_layers(
        *([layer.kind for layer in geometry.layers], preset, settings.skip_layers, settings.boundary_layers),
        *(settings.skip_format, settings.layer_presets, latents, settings.rotary),
        unpackable=unpackable,
    )


def _held(layer: LayerGeometry, settings: PlanSettings) -> int:
    """Tokens of the context that a layer holds."""
    return settings.context if layer.window is None else min(settings.context, layer.window - 1)


def _exact_bytes(layer: LayerGeometry, settings: PlanSettings, room: int) -> int:
    """A layer at 16 bits, with room for so many tokens."""
    tokens = layer.num_kv_heads * room * (layer.key_dim + layer.value_dim)
    return EXACT_BYTES * settings.batch * (tokens + _held(layer, settings) * layer.indexer_dim)


def _layer_bytes(layer: LayerGeometry, plan: LayerPlan, settings: PlanSettings) -> int:
    """A layer of a `TurboQuantCache`.  Buffers of our own have room for more tokens, up to a whole block."""
    if plan.preset is None or not layer.num_kv_heads:
        held = _held(layer, settings)
        return _exact_bytes(layer, settings, round_up(held + 1) if plan.kind in PACKABLE else held)
    check_dims(layer.key_dim, layer.value_dim, plan.preset)
    # Of fewer tokens than a calibration takes (`storage.first_tokens`) none are packed yet; no plan is about so few.
    packed = packed_length_of(settings.context, settings.residual_length, settings.sink_tokens)
    sinks = settings.sink_tokens if packed else 0
    tail = settings.context - packed - sinks
    most = settings.residual_length + settings.sink_tokens + BLOCK_TOKENS
    sequence = packed * plan.preset.token_bytes(layer.key_dim, layer.value_dim)
    sequence += _calibration_bytes(layer, plan.preset) if packed else 0
    exact = _exact_bytes(layer, settings, sinks + min(most, round_up(tail + 1)))
    return settings.batch * layer.num_kv_heads * sequence + exact


def _calibration_bytes(layer: LayerGeometry, preset: Preset) -> int:
    """Bytes of what is measured once per sequence and KV head (`Calibration`)."""
    elements = layer.key_dim if "key" in preset.center else 0
    elements += layer.value_dim if "value" in preset.center else 0
    elements += layer.key_dim if preset.smooth else 0
    elements += sum(fmt.scale == "per_head" for fmt in (preset.key, preset.value))
    return CALIBRATION_BYTES * elements
