"""Cases of the kernels that write and read latents and rotary keys (MLA), for their tests."""

from dataclasses import dataclass, replace

import torch
import update_cases
from error_budget import dequantize_budget, relative_error, seeded
from quantize_cases import damage, differences, states_like

from tq_cache.backends import quantizers, reference
from tq_cache.backends.calibration import calibrate_pair
from tq_cache.formats.presets import FORMATS, Preset
from tq_cache.formats.states import PackedStates
from tq_cache.storage.preallocated import PreallocatedStorage

LATENT_FORMATS = [name for name, fmt in FORMATS["key"].items() if fmt.scale != "per_token"]
ROTARY_FORMATS = list(FORMATS["rotary"])


def preset_of(latent: str, rotary: str, calibrated: bool = True) -> Preset:
    """Latents centred and smoothed (float8 too, though no preset does), or neither."""
    key = FORMATS["key"][latent]
    return Preset(latent, key, key, ("key",) if calibrated else (), 0.5 * calibrated).for_latents(
        FORMATS["rotary"][rotary]
    )


@dataclass(frozen=True)
class Case:
    """Tokens to store, in calls that end at `ends`; `damage` puts in what the specification treats specially."""

    latent: str
    rotary: str = "exact"
    rank: int = 128
    dim: int = 64
    batch: int = 1
    ends: tuple[int, ...] = (37, 70)
    damage: bool = False
    calibrated: bool = True

    def make(self, device: str, dtype: torch.dtype) -> tuple[tuple[PackedStates, torch.Tensor], ...]:
        """Calibrated states full of ones (exact ones of -1), and vectors for them, of latents and of rotary keys."""
        generator, tokens = seeded(self.rank + self.dim), self.ends[-1]
        wide = torch.randn(self.batch, tokens, 1, self.rank + self.dim, generator=generator)
        wide = wide * (1 + torch.rand(self.rank + self.dim, generator=generator))
        wide[..., : self.rank] += torch.randn(self.rank, generator=generator)
        # as a model's projection gives them: one row after the other
        vectors = wide.to(device, dtype).transpose(1, 2).split([self.rank, self.dim], dim=-1)
        preset = preset_of(self.latent, self.rotary, self.calibrated)
        counts = torch.ones(self.batch, 1, tokens, 1, dtype=torch.bool, device=device)
        calibrations = calibrate_pair(preset, *vectors, {}, counts)
        made = []
        for role, fmt, x, calibration in zip(
            preset.roles, (preset.key, preset.value), vectors, calibrations, strict=True
        ):
            if self.damage and x.shape[3]:
                damage(x)
            states = PackedStates.empty(role, fmt, x, -(-tokens // 64) * 64 + 64, calibration)
            states.packed.fill_(-1 if fmt.exact else 255)
            made.append((states, x))
        return tuple(made)


CASES = (
    {f"{name}, 128": Case(name, rotary) for name, rotary in zip(LATENT_FORMATS, ROTARY_FORMATS * 2, strict=False)}
    | {
        "tq4, 512": Case("tq4", "int8", 512),
        "tq3, 512": Case("tq3", "exact", 512, batch=2, ends=(64, 65, 70)),
        "fp8_e4m3, 512": Case("fp8_e4m3", "fp8_e4m3", 512, calibrated=False),
        "tq2, 256": Case("tq2", "int8", 256, dim=32),
        "no rotary part": Case("nc3", "exact", 256, dim=0),
    }
    | {f"special, {name}": Case(name, rotary, damage=True) for name, rotary in (("tq4", "int8"), ("nc3", "fp8_e5m2"))}
    | {"special, float8": Case("fp8_e5m2", "exact", damage=True)}
)


def store_kernel(pairs: list, start: int) -> None:
    from tq_cache.backends.triton import store_pair

    (latent, latents), (rotary, rotary_keys) = pairs
    store_pair(latent, rotary, latents, rotary_keys, start)


def store_reference(pairs: list, start: int) -> None:
    (latent, latents), (rotary, rotary_keys) = pairs
    reference.store_pair(latent, rotary, latents, rotary_keys, start)


def compare(case: Case, device: str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, list[float]]:
    """By role: see `quantize_cases.differences`.  What is exact must be equal, also where nothing is to be written."""
    found = case.make(device, dtype)
    wanted = [(states_like(states), x) for states, x in found]
    for start, end in zip((0, *case.ends), case.ends, strict=False):
        for pairs, store in ((found, store_kernel), (wanted, store_reference)):
            store([(states, x[:, :, start:end]) for states, x in pairs], start)
    result: dict[str, list[float]] = {}
    for pair, right in zip(found, wanted, strict=True):
        if pair[0].format.exact:
            same = torch.equal(*(states.packed.view(torch.uint8) for states in (pair[0], right[0])))
            result[pair[0].role] = [0.0 if same else 1.0, 0.0, 0.0]
        else:
            result[pair[0].role] = differences(pair, right)
    return result


def read_share(case: Case, device: str, dtype: torch.dtype) -> float:
    """The largest error of what is read back, whole and in pieces, over what its roundings come to."""
    from tq_cache.backends.triton import dequantize

    shares, case = [0.0], replace(case, damage=False)
    for states, x in case.make(device, torch.float32):
        reference.store(states, x, 0)
        length = x.shape[2]
        expected = quantizers.dequantize(states, length, torch.float64)
        for start, end in ((0, length), (length // 64 * 64, length)):
            out = dequantize(states.tokens(start, end), end - start, dtype)
            assert out.dtype == dtype and out.shape == expected[:, :, start:end].shape
            if out.numel():
                shares.append(relative_error(out, expected[:, :, start:end]) / dequantize_budget(dtype))
    return max(shares)


@dataclass(frozen=True)
class Steps(update_cases.Case):
    """A preallocated layer of latents: see `update_cases.Case`."""

    rotary: str = "exact"
    dims: tuple[int, int] = (128, 32)
    heads: int = 1

    def storage(self) -> PreallocatedStorage:
        preset = preset_of(self.preset, self.rotary)
        return PreallocatedStorage(preset, self.residual_length, self.sink_tokens, self.most, "reference")


# One block is packed, the last step finds no room; then other residual lengths and numbers of sinks, over three blocks
# and a ring that wraps.
STEPS = {
    "tq4, int8": Steps("tq4", rotary="int8", dims=(512, 64)),
    "tq3, exact": Steps("tq3", sink_tokens=4, dims=(256, 64)),
    "fp8": Steps("fp8_e4m3", rotary="fp8_e4m3"),
    "no rotary part": Steps("nc4", dims=(128, 0)),
    "0 and 0": Steps("tq2", 0, 0, 1, 200, 198, rotary="int8"),
    "0 and 4": Steps("fp8_e5m2", 0, 4, 3, 200, 198, rotary="fp8_e5m2"),
    "64 and 4": Steps("nc3", 64, 4, 3, 264, 262),
    "fewer than sinks": Steps(sink_tokens=140),
    "never packed": Steps(residual_length=192, sink_tokens=4),
}
FAST_STEPS = ("tq4, int8", "tq3, exact", "fp8", "no rotary part", "fewer than sinks", "never packed")
