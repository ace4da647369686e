"""Formats and presets: what one key or value vector is stored as.  All checks of these names are here."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from .codebook import GAUSSIAN, UNIFORM, Codebook

# "rotary": the rotary part of keys that a layer of latents (MLA) caches in place of values; its latents are "key".
Role = Literal["key", "value", "rotary"]
ScaleRule = Literal["per_head", "per_token", "norm", "unbiased", "min_max", "largest", "exact"]
ROLES: tuple[Role, Role] = ("key", "value")
LATENT_ROLES: tuple[Role, Role] = ("key", "rotary")
NOUNS: dict[Role, str] = {"key": "keys", "value": "values", "rotary": "rotary keys"}


@dataclass(frozen=True)
class Format:
    """How vectors of one role are coded.

    `scale` is the rule for the stored factor, r being the (rotated) vector and c its code values:
    per_head       float8: the checkpoint's or the user's, else one power of two per sequence and KV head, fixed when
                   the first tokens are packed
    per_token      float8: one power of two per token and KV head
    norm           ||r|| / ||c||: the read vector has the norm of the stored one (norm correction, TurboQuant)
    unbiased       ||r||^2 / <r, c>: <x, x_hat> = ||x||^2.  A key's score with itself is exact, and the errors of many
                   values average out, where least squares would shrink them all (docs/presets.md)
    min_max        half a step of the range, with a zero (its midpoint) beside it
    largest        the largest |element of r| / 127: the codes are int8
    exact          none: elements stay in the model's dtype (counted as 16 bits)
    """

    name: str
    bits: int
    scale: ScaleRule
    codebook: Codebook | None = None
    float8: torch.dtype | None = None

    @property
    def rotated(self) -> bool:
        return self.scale in ("norm", "unbiased", "largest")

    @property
    def exact(self) -> bool:
        """Whether elements stay in the model's dtype."""
        return self.scale == "exact"

    @property
    def has_zero(self) -> bool:
        return self.scale == "min_max"

    def values(self, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What every code stands for before scale and zero, [2**bits]."""
        if self.codebook is not None:
            return self.codebook.values(device, dtype)
        stored = self.float8 or torch.int8
        return torch.arange(256, dtype=torch.uint8, device=device).view(stored).to(dtype)

    def token_bytes(self, head_dim: int) -> int:
        """Bytes of one vector of `head_dim` elements: codes, fp16 scale, fp16 zero (per-head scales not counted)."""
        per_token = 0 if self.scale in ("per_head", "exact") else 4 if self.has_zero else 2
        return head_dim * self.bits // 8 + per_token


_FLOAT8_TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_FLOAT8 = {name: Format(name, 8, "per_head", float8=dtype) for name, dtype in _FLOAT8_TYPES.items()} | {
    f"{name}_token": Format(f"{name}_token", 8, "per_token", float8=dtype) for name, dtype in _FLOAT8_TYPES.items()
}
EXACT = Format("exact", 16, "exact")
FORMATS: dict[Role, dict[str, Format]] = {
    "key": _FLOAT8
    | {f"nc{bits}": Format(f"nc{bits}", bits, "norm", GAUSSIAN[bits]) for bits in (4, 3)}
    | {f"tq{bits}": Format(f"tq{bits}", bits, "unbiased", GAUSSIAN[bits]) for bits in (4, 3, 2)},
    "value": _FLOAT8
    | {f"uniform{bits}": Format(f"uniform{bits}", bits, "min_max", UNIFORM[bits]) for bits in (4, 3)}
    | {f"tq{bits}": Format(f"tq{bits}", bits, "unbiased", GAUSSIAN[bits]) for bits in (4, 3, 2)},
    "rotary": {EXACT.name: EXACT, "int8": Format("int8", 8, "largest")}
    | {name: _FLOAT8[name] for name in _FLOAT8_TYPES},
}
"""Formats by role and name: what `key=`, `value=` and `rotary=` of a cache take."""


@dataclass(frozen=True)
class Preset:
    """A key format, a value format, and what is taken out of the vectors before they are coded.

    `center` names the roles of whose vectors one fixed vector per sequence and KV head is subtracted; `smooth` > 0
    divides each key channel by its size relative to that channel of the queries, to that power.  Both are measured
    once, before the first tokens are packed, and undone in the query and the output (see `backends.calibration`).

    `roles` are those of what a layer caches as keys and as values: of latents see `for_latents`.
    """

    name: str
    key: Format
    value: Format
    center: tuple[Role, ...] = ("key",)
    smooth: float = 0.0
    roles: tuple[Role, Role] = ROLES

    def __post_init__(self) -> None:
        if not 0.0 <= self.smooth <= 1.0:
            raise ValueError(f"expected smooth from 0 (off) to 1, got {self.smooth}")

    def for_latents(self, rotary: Format) -> "Preset":
        """The same for a layer that caches latents, stored as keys are, and a rotary part of keys in place of values.

        A latent is read as key and as value, from the same bits.
        """
        center = tuple(role for role in self.center if role == "key")
        return replace(self, value=rotary, center=center, roles=LATENT_ROLES)

    @property
    def holds_latents(self) -> bool:
        return self.roles == LATENT_ROLES

    def token_bytes(self, key_dim: int, value_dim: int) -> int:
        """Bytes of one packed token of one KV head."""
        return self.key.token_bytes(key_dim) + self.value.token_bytes(value_dim)


# With this exponent, keys and queries are of one size in every channel: white errors of keys then do least to the
# scores (as in SmoothQuant, Xiao et al. 2023).  A float format does not feel it, and is not rotated.
SMOOTH = 0.5


def _smooth_of(key: Format) -> float:
    return SMOOTH if key.rotated else 0.0


def _preset(name: str, key: str, value: str) -> Preset:
    fmt = FORMATS["key"][key]
    return Preset(name, fmt, FORMATS["value"][value], smooth=_smooth_of(fmt))


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
        # Fewer bits for keys than for values are worse at the same bytes, as `tq_k4v3` beside `k3v4_nc` shows (docs).
        *[_preset(f"tq_k{k}v{v}", f"tq{k}", f"tq{v}") for k, v in ((4, 3), (4, 2), (3, 2))],
    ]
}
"""Presets by name; `docs/presets.md` says which to take."""


def get_format(role: Role, name: str) -> Format:
    """The format of that name, or ValueError with the names there are."""
    if name not in FORMATS[role]:
        raise ValueError(f"expected a {role} format of {sorted(FORMATS[role])}, got {name!r}")
    return FORMATS[role][name]


def resolve_preset(
    preset: str,
    key: str | None = None,
    value: str | None = None,
    center: bool | Literal["both"] | None = None,
    smooth: float | None = None,
) -> Preset:
    """The preset of that name with some parts replaced.

    center: whether keys are centred, or "both", values too.  Raises ValueError on unknown names or a bad exponent.
    """
    if preset not in PRESETS:
        raise ValueError(f"expected a preset of {list(PRESETS)}, got {preset!r}")
    if center not in (None, True, False, "both"):
        raise ValueError(f"expected center to be True, False, 'both' or None, got {center!r}")
    base = PRESETS[preset]
    parts = [key and f"key={key}", value and f"value={value}"]
    key_format = base.key if key is None else get_format("key", key)
    roles: tuple[Role, ...] = ROLES if center == "both" else ("key",) if center else ()
    return Preset(
        " ".join([preset, *[part for part in parts if part]]),
        key_format,
        base.value if value is None else get_format("value", value),
        base.center if center is None else roles,
        _smooth_of(key_format) if smooth is None else float(smooth),
    )
