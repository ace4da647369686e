"""What tests of quantisers share: vectors, stored and read back."""

import pytest
import torch

from tq_cache.backends import reference
from tq_cache.backends.calibration import calibrate as measure
from tq_cache.formats.packing import BLOCK_TOKENS
from tq_cache.formats.presets import FORMATS, Format
from tq_cache.formats.states import Calibration, PackedStates

PLAIN = Calibration()
# All that code vectors: not "exact".
ALL_FORMATS = [(role, fmt) for role, formats in FORMATS.items() for fmt in formats.values() if not fmt.exact]
ROTATED = [(role, fmt) for role, fmt in ALL_FORMATS if fmt.rotated and fmt.codebook is not None]
UNIFORM = [fmt for fmt in FORMATS["value"].values() if fmt.has_zero]
FLOAT8 = [fmt for fmt in FORMATS["key"].values() if fmt.scale == "per_head"]


def name(parameter) -> str | None:
    return parameter.name if isinstance(parameter, Format) else None


every_format = pytest.mark.parametrize(("role", "fmt"), ALL_FORMATS, ids=name)
every_rotated = pytest.mark.parametrize(("role", "fmt"), ROTATED, ids=name)
every_uniform = pytest.mark.parametrize("fmt", UNIFORM, ids=name)
every_float8 = pytest.mark.parametrize("fmt", FLOAT8, ids=name)


def all_count(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[0], 1, x.shape[2], 1, dtype=torch.bool)


def calibrate(x: torch.Tensor, fmt: Format, center: bool = False, smooth: float = 0.0) -> Calibration:
    return measure(x, fmt, center, smooth, all_count(x))


def stored(x: torch.Tensor, role: str, fmt: Format, calibration: Calibration | None = None) -> PackedStates:
    capacity = -(-x.shape[2] // BLOCK_TOKENS) * BLOCK_TOKENS
    states = PackedStates.empty(role, fmt, x, capacity, calibrate(x, fmt) if calibration is None else calibration)
    reference.store(states, x, 0)
    return states


def read_back(x: torch.Tensor, role: str, fmt: Format, calibration: Calibration | None = None) -> torch.Tensor:
    return reference.dequantize(stored(x, role, fmt, calibration), x.shape[2], torch.float64)


def gaussian(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=dtype)


def relative_mse(x: torch.Tensor, read: torch.Tensor) -> float:
    return float((x.double() - read).square().sum() / x.double().square().sum())


def expected_mse(fmt: Format, rho: float) -> float:
    return {"norm": 2 - 2 * rho**0.5, "unbiased": 1 / rho - 1}[fmt.scale]
