"""Cases of quantise and append for their tests: tokens to store, and what the kernels and the reference store."""

from dataclasses import dataclass, replace

import torch
from error_budget import seeded

from tq_cache.backends import reference
from tq_cache.backends.calibration import calibrate as measure
from tq_cache.formats import packing
from tq_cache.formats.presets import PRESETS, Preset, get_format
from tq_cache.formats.states import PackedStates

ROLES = ("key", "value")


@dataclass(frozen=True)
class Case:
    """Tokens to store, in calls that end at `ends`; `damage` puts in what the specification treats specially."""

    preset: str
    dim: int = 64
    value_dim: int | None = None
    batch: int = 1
    heads: int = 1
    ends: tuple[int, ...] = (37, 70)
    damage: bool = False

    @property
    def chosen(self) -> Preset:
        key, _, value = self.preset.partition("/")
        if not value:
            return PRESETS[key]
        return Preset(self.preset, get_format("key", key), get_format("value", value), center=True, smooth=0.5)

    def make(self, role: str, device: str, dtype: torch.dtype) -> tuple[PackedStates, torch.Tensor]:
        """Calibrated states full of ones, and vectors for them."""
        dim = self.dim if role == "key" else self.value_dim or self.dim
        generator = seeded(dim + len(role))
        x = torch.randn(self.batch, self.heads, self.ends[-1], dim, generator=generator)
        x = x * (1 + torch.rand(dim, generator=generator)) + torch.randn(dim, generator=generator)
        x = x.to(device, dtype)
        counts = torch.ones(self.batch, 1, x.shape[2], 1, dtype=torch.bool, device=device)
        smooth = self.chosen.smooth if role == "key" else 0.0
        fmt = self.chosen.key if role == "key" else self.chosen.value
        calibration = measure(x, fmt, self.chosen.center, smooth, counts)
        if self.damage:
            damage(x)
        states = PackedStates.empty(role, fmt, x, -(-x.shape[2] // 64) * 64 + 64, calibration)
        states.packed.fill_(255)
        return states, x


def damage(x: torch.Tensor) -> None:
    """NaN, inf, -inf, zeros, tiny and huge vectors, tokens 1 to 7 of `x`."""
    x[:, :, 1, 3] = torch.nan
    x[:, :, 2, 4] = torch.inf
    x[:, :, 3, 5] = -torch.inf
    x[:, :, 4] = 0.0
    x[:, :, 5] *= 1e-4
    x[:, :, 6] *= 1e4 if x.dtype == torch.float16 else 1e14
    x[:, :, 7, 6] = 6e4 if x.dtype == torch.float16 else 1e25


CASES = (
    # mixed presets pair formats that others have
    {name: Case(name, dim=64 + 16 * (index % 3)) for index, name in enumerate(PRESETS) if "_k" not in name}
    | {f"{name}, {dim}": Case(name, dim=dim) for name, dim in (("tq4", 32), ("tq3", 48), ("tq4", 128), ("tq2", 192))}
    | {f"special, {name}": Case(name, damage=True) for name in ("tq4", "3bit_nc", "k8v4", "fp8_e5m2")}
    | {
        "two widths": Case("tq_k4v2", dim=80, value_dim=64, batch=2, heads=2, ends=(64, 65, 70)),
        "float8, centred, smoothed": Case("fp8_e4m3/fp8_e5m2"),
        "uniform, centred": Case("fp8_e5m2/uniform3"),
        "norm, centred, smoothed": Case("nc4/tq3", dim=80),
        "norm of 3 bits": Case("nc3/tq2", dim=128, value_dim=96),
    }
)


def codes(states: PackedStates, tokens: int) -> torch.Tensor:
    """Codes [B, H_kv, tokens, D]."""
    if states.role == "value":
        unpacked = packing.unpack(states.packed, states.format.bits, packing.BLOCK_TOKENS).transpose(-1, -2)
    else:
        unpacked = packing.unpack(states.packed, states.format.bits, states.head_dim)
    return unpacked.flatten(2, 3)[:, :, :tokens]


def run(pairs: list, calls: list[tuple[int, int]], store_all) -> None:
    for start, end in calls:
        store_all([(states, x[:, :, start:end]) for states, x in pairs], start)


def store_kernel(pairs: list, start: int) -> None:
    from tq_kernels.store.quantize import quantize

    from tq_cache.backends.triton import states_of

    (key, keys), (value, values) = pairs
    quantize(states_of(key), states_of(value), keys, values, start)


def store_reference(pairs: list, start: int) -> None:
    for states, x in pairs:
        reference.store(states, x, start)


def compare(case: Case, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, list[float]]:
    """By role: share of codes that differ, largest difference of factors, error over the reference's less 1."""
    calls = list(zip((0, *case.ends), case.ends, strict=False))
    found = [case.make(role, device, dtype) for role in ROLES]
    wanted = [(states_like(states), x) for states, x in found]
    run(found, calls, store_kernel)
    run(wanted, calls, store_reference)
    return {role: differences(*pair) for role, *pair in zip(ROLES, found, wanted, strict=True)}


def states_like(states: PackedStates) -> PackedStates:
    factors = [None if factor is None else factor.clone() for factor in (states.scale, states.zero)]
    return replace(states, packed=states.packed.clone(), scale=factors[0], zero=factors[1])


def differences(found: tuple[PackedStates, torch.Tensor], wanted: tuple[PackedStates, torch.Tensor]) -> list[float]:
    (got, x), (right, _) = found, wanted
    tokens = x.shape[2]
    finite = x.isfinite().all(-1)
    same = codes(got, tokens) == codes(right, tokens)
    if got.scale is None:  # float8: bytes that are NaN need not be the same ones
        nan = [states.format.values(x.device)[codes(states, tokens).int()].isnan() for states in (got, right)]
        same |= nan[0] & nan[1]
        assert torch.equal(*nan)
        kept = torch.ones_like(finite)
    else:
        kept = finite
        assert torch.equal(got.scale[:, :, :tokens].isnan(), ~finite)
    bad = (~same)[kept].float().mean().item()
    undisturbed = same.all(-1) & finite
    factors = [0.0]
    for a, b in ((got.scale, right.scale), (got.zero, right.zero)):
        if a is not None and b is not None:
            ulps = (a[:, :, :tokens].view(torch.int16).int() - b[:, :, :tokens].view(torch.int16).int()).abs()
            factors.append(ulps[undisturbed].max().item())
            assert not a[:, :, tokens:].any()  # nothing written behind the last token
    plain = finite & (x.abs() < 1e3).all(-1)
    outs = [reference.dequantize(states, tokens, torch.float32)[plain] for states in (got, right)]
    errors = [(out.double() - x[plain].double()).norm().item() for out in outs]
    return [bad, max(factors), abs(errors[0] / errors[1] - 1)]


def check(result: dict[str, list[float]], *, few: bool) -> None:
    """Codes may differ at ties alone: below 1e-4 of them, or a handful where there are few."""
    for role, (bad, ulps, error) in result.items():
        assert bad < (1e-3 if few else 1e-4), (role, bad)
        assert ulps <= 1, (role, ulps)
        assert error < 1e-3, (role, error)


def append_case(device: str = "cpu") -> bool:
    """Whether `append` puts strided keys and values of two widths where they belong and nothing elsewhere."""
    from tq_kernels.store.append import append

    keys = torch.randn(2, 5, 3, 80, device=device).transpose(1, 2)
    values = torch.randn(2, 3, 5, 64, device=device)
    tails = torch.zeros(2, 3, 9, 96, device=device)[..., :80], torch.zeros(2, 3, 9, 64, device=device)
    append(keys, values, *tails, 2)
    expected = [torch.nn.functional.pad(x, (0, 0, 2, 2)) for x in (keys, values)]
    return all(torch.equal(*pair) for pair in zip(tails, expected, strict=True)) and _append_without_values(device)


def _append_without_values(device: str) -> bool:
    """The same of latents without rotary keys."""
    from tq_kernels.store.append import append

    keys, tail = torch.randn(2, 1, 5, 512, device=device), torch.zeros(2, 1, 9, 512, device=device)
    append(keys, keys[..., :0], tail, tail[..., :0], 2)
    return torch.equal(tail, torch.nn.functional.pad(keys, (0, 0, 2, 2)))
