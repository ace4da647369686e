"""The caches that a table compares: ours, the exact one again (the noise floor), transformers' own, KIVI-like ones."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, QuantizedCache
from transformers.cache_utils import Cache, DynamicLayer

from ..compat import decoder_config, own_layers
from ..formats.presets import resolve_preset
from ..planning.memory import EXACT, EXACT_BYTES
from .runs import make_cache

# What a row's setting means for `TurboQuantCache`; whatever is not named is the constructor's default.
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "all_packed": {"residual_length": 0, "skip_layers": ("sliding_window",)},
}


@dataclass(frozen=True)
class Candidate:
    """A cache to measure: a row of the table.

    preset, setting: its name
    make:            an empty cache for a model, whose attention it sets
    chunk:           tokens a forward while decoding, if other than the table's
    foreign:         somebody else's, whose failure is a row of the table and not the end of it
    """

    preset: str
    setting: str
    make: Callable[[Any], Cache]
    chunk: int | None = None
    foreign: bool = False


def exact() -> Candidate:
    """transformers' `DynamicCache`."""
    return Candidate(EXACT, "default", lambda model: make_cache(model, None))


def turboquant(preset: str, setting: str, **cache_kwargs: Any) -> Candidate:
    """A `TurboQuantCache` with the arguments of a setting of `SETTINGS`, or with others under another name."""
    arguments = SETTINGS.get(setting, {}) | cache_kwargs
    return Candidate(preset, setting, lambda model: make_cache(model, preset, **arguments))


def grid(presets: Sequence[str], settings: Sequence[str]) -> list[Candidate]:
    """Every preset with every setting; raises ValueError on unknown ones, and unless there is one of each."""
    if not presets or not settings or set(settings) - set(SETTINGS):
        wanted, got = ", ".join(SETTINGS), ", ".join(settings)
        raise ValueError(f"expected presets, and settings of {wanted}; got {len(presets)} presets and {got or 'none'}")
    names = [resolve_preset(name).name for name in presets]
    return [turboquant(name, setting) for setting in settings for name in names]


def noise_floor() -> list[Candidate]:
    """The exact cache, computed in another order: what differs is rounding, and nothing below it can be told."""

    def eager(model: Any) -> Cache:
        model.set_attn_implementation("eager")
        return DynamicCache(config=model.config)

    return [
        Candidate(EXACT, "chunk 7", lambda model: make_cache(model, None), chunk=7),
        Candidate(EXACT, "eager", eager),
    ]


def transformers_caches() -> list[Candidate]:
    """transformers' `QuantizedCache` with every backend, each along the axis that its documentation recommends."""
    found = [_quantized("hf_fp8", "fp8")]
    for bits in (4, 2):
        found.append(_quantized(f"quanto{bits}", "quanto", nbits=bits))
        found.append(_quantized(f"hqq{bits}", "hqq", nbits=bits, axis_key=1, axis_value=1))
    return found


def _quantized(name: str, backend: str, **options: Any) -> Candidate:
    def make(model: Any) -> Cache:
        model.set_attn_implementation("sdpa")
        return QuantizedCache(backend, model.config, **options)

    return Candidate(name, "default", make, foreign=True)


def kivi_caches() -> list[Candidate]:
    """KIVI's formats at 4 and 2 bits, with its 128 exact newest tokens and without."""
    return [_kivi(bits, setting) for bits in (4, 2) for setting in ("default", "all_packed")]


def _kivi(bits: int, setting: str) -> Candidate:
    def make(model: Any) -> Cache:
        model.set_attn_implementation("sdpa")
        return KiviCache(model.config, bits, 128 if setting == "default" else 0)

    return Candidate(f"kivi{bits}", setting, make, foreign=True)


def peers() -> list[Candidate]:
    """Every row to compare ours with."""
    return [*noise_floor(), *transformers_caches(), *kivi_caches()]


# ------------------------------------------------------------------------------------------------------------- KIVI

GROUP = 32


def min_max(x: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """`x`, its dimension `dim` (negative) in groups of `GROUP`, rounded to 2 ** bits levels between each group's ends.

    The step and the lowest level are held in float16, as KIVI does.
    """
    groups = x.unflatten(dim, (-1, GROUP))
    low, high = groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)
    step = ((high - low) / (2**bits - 1)).half().to(x.dtype)
    low = low.half().to(x.dtype)
    codes = ((groups - low) / torch.where(step == 0, 1, step)).round().clamp(0, 2**bits - 1)
    return (codes * step + low).flatten(dim - 1, dim)


class KiviLayer(DynamicLayer):
    """Keys rounded per channel over 32 tokens, values per token over 32 channels: "KIVI", Liu et al. 2024.

    A fake for measuring: it holds the rounded numbers in the model's dtype and says what their codes would take.
    Whole groups of tokens are rounded once, when `residual_length` newer ones have come.
    """

    def __init__(self, bits: int, residual_length: int) -> None:
        super().__init__()
        self.bits = bits
        self.residual_length = residual_length
        self.packed_length = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for x in (key_states, value_states):
            if x.shape[-1] % GROUP:
                raise ValueError(f"expected a head_dim in groups of {GROUP} channels for KIVI, got {x.shape[-1]}")
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        end = max(keys.shape[2] - self.residual_length, 0) // GROUP * GROUP
        if end > self.packed_length:
            span = slice(self.packed_length, end)
            self.keys, self.values = keys.clone(), values.clone()  # this forward still reads the exact ones
            self.keys[:, :, span] = min_max(keys[:, :, span], self.bits, -2)
            self.values[:, :, span] = min_max(values[:, :, span], self.bits, -1)
            self.packed_length = end
        return keys, values

    @property
    def true_bytes(self) -> int:
        """Codes, a float16 step and lowest level per group, and exact tokens at 16 bits."""
        assert self.keys is not None and self.values is not None
        vectors = math.prod(self.keys.shape[:2])
        elements = self.keys.shape[3] + self.values.shape[3]
        packed = elements * self.bits // 8 + 2 * EXACT_BYTES * elements // GROUP
        exact_tokens = self.keys.shape[2] - self.packed_length
        return vectors * (self.packed_length * packed + exact_tokens * EXACT_BYTES * elements)


class KiviCache(Cache):
    """`KiviLayer` for every layer of full attention, transformers' own for the others."""

    def __init__(self, config: PreTrainedConfig, bits: int, residual_length: int = 128) -> None:
        own = own_layers(decoder_config(config))
        super().__init__(
            layers=[KiviLayer(bits, residual_length) if type(layer) is DynamicLayer else layer for layer in own]
        )
