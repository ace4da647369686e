"""Formats and presets: what one key or value vector is stored as.  All checks of these names are here."""

from dataclasses import dataclass
from typing import Literal

import torch

from .codebook import GAUSSIAN, UNIFORM, Codebook

Role = Literal["key", "value"]
ScaleRule = Literal["per_head", "per_token", "norm", "unbiased", "least_squares", "min_max"]


@dataclass(frozen=True)
class Format:
    """How vectors of one role are coded.

    `scale` is the rule for the stored factor, r being the (rotated) vector and c its code values:
    per_head       float8: the checkpoint's or the user's, else one power of two per sequence and KV head, fixed when
                   the first tokens are packed
    per_token      float8: one power of two per token and KV head
    norm           ||r|| / ||c||: the read vector has the norm of the stored one (norm correction, TurboQuant)
    unbiased       ||r||^2 / <r, c>: <k, k_hat> = ||k||^2, so a key's score with itself is exact
    least_squares  <r, c> / ||c||^2: least squared error
    min_max        half a step of the range, with a zero (its midpoint) beside it
    """

    name: str
    bits: int
    scale: ScaleRule
    codebook: Codebook | None = None
    float8: torch.dtype | None = None

    @property
    def rotated(self) -> bool:
        return self.scale in ("norm", "unbiased", "least_squares")

    @property
    def has_zero(self) -> bool:
        return self.scale == "min_max"

    def values(self, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What every code stands for before scale and zero, [2**bits]."""
        if self.codebook is not None:
            return self.codebook.values(device, dtype)
        assert self.float8 is not None
        return torch.arange(256, dtype=torch.uint8, device=device).view(self.float8).to(dtype)

    def token_bytes(self, head_dim: int) -> int:
        """Bytes of one vector of `head_dim` elements: codes, fp16 scale, fp16 zero (per-head scales not counted)."""
        per_token = 0 if self.scale == "per_head" else 4 if self.has_zero else 2
        return head_dim * self.bits // 8 + per_token


_FLOAT8_TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_FLOAT8 = {name: Format(name, 8, "per_head", float8=dtype) for name, dtype in _FLOAT8_TYPES.items()} | {
    f"{name}_token": Format(f"{name}_token", 8, "per_token", float8=dtype) for name, dtype in _FLOAT8_TYPES.items()
}
FORMATS: dict[Role, dict[str, Format]] = {
    "key": _FLOAT8
    | {f"nc{bits}": Format(f"nc{bits}", bits, "norm", GAUSSIAN[bits]) for bits in (4, 3)}
    | {f"tq{bits}": Format(f"tq{bits}", bits, "unbiased", GAUSSIAN[bits]) for bits in (4, 3, 2)},
    "value": _FLOAT8
    | {f"uniform{bits}": Format(f"uniform{bits}", bits, "min_max", UNIFORM[bits]) for bits in (4, 3)}
    | {f"tq{bits}": Format(f"tq{bits}", bits, "unbiased", GAUSSIAN[bits]) for bits in (4, 3, 2)},
}


@dataclass(frozen=True)
class Preset:
    """A key format, a value format, and what is taken out of the vectors before they are coded.

    `center` subtracts one fixed vector per sequence and KV head from keys and values; `smooth` > 0 divides each key
    channel by its relative size to that power.  Both are measured once, when the first tokens are packed, and undone
    in the query and the output.
    """

    name: str
    key: Format
    value: Format
    center: bool = False
    smooth: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.smooth <= 1.0:
            raise ValueError(f"expected smooth from 0 (off) to 1, got {self.smooth}")

    def token_bytes(self, key_dim: int, value_dim: int) -> int:
        """Bytes of one packed token of one KV head."""
        return self.key.token_bytes(key_dim) + self.value.token_bytes(value_dim)


def _preset(name: str, key: str, value: str) -> Preset:
    own = key.startswith("tq") and value.startswith("tq")
    return Preset(name, FORMATS["key"][key], FORMATS["value"][value], center=own, smooth=TQ_SMOOTH if own else 0.0)


# Exponent of smoothing for the project's own presets: the least that keeps 4-bit keys with 16 times larger channels
# within 0.007 of KL; 1.0 would cost 20 % on keys without outliers (README, quality table).
TQ_SMOOTH = 0.65

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in [
        _preset("fp8_e4m3", "fp8_e4m3", "fp8_e4m3"),
        _preset("fp8_e5m2", "fp8_e5m2", "fp8_e5m2"),
        _preset("k8v4", "fp8_e4m3", "uniform4"),
        _preset("4bit_nc", "nc4", "uniform4"),
        _preset("k3v4_nc", "nc3", "uniform4"),
        _preset("3bit_nc", "nc3", "uniform3"),
        *[_preset(f"tq{bits}", f"tq{bits}", f"tq{bits}") for bits in (4, 3, 2)],
        *[_preset(f"tq_k{k}v{v}", f"tq{k}", f"tq{v}") for k in (4, 3, 2) for v in (4, 3, 2) if k != v],
    ]
}


def get_format(role: Role, name: str) -> Format:
    """The format of that name, or ValueError with the names there are."""
    if name not in FORMATS[role]:
        raise ValueError(f"expected a {role} format of {sorted(FORMATS[role])}, got {name!r}")
    return FORMATS[role][name]


def resolve_preset(
    preset: str,
    key: str | None = None,
    value: str | None = None,
    center: bool | None = None,
    smooth: float | None = None,
) -> Preset:
    """The preset of that name with some parts replaced.  Raises ValueError on unknown names or a bad exponent."""
    if preset not in PRESETS:
        raise ValueError(f"expected a preset of {list(PRESETS)}, got {preset!r}")
    base = PRESETS[preset]
    parts = [key and f"key={key}", value and f"value={value}"]
    return Preset(
        " ".join([preset, *[part for part in parts if part]]),
        base.key if key is None else get_format("key", key),
        base.value if value is None else get_format("value", value),
        base.center if center is None else bool(center),
        base.smooth if smooth is None else float(smooth),
    )
