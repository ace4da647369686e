"""Cases of the dequantise kernel for its tests: packed states, and the kernel on them."""

from dataclasses import dataclass

import torch
from error_budget import seeded
from poison import empty_is_nan, poison_states

from tq_cache.backends import quantizers
from tq_cache.backends.calibration import calibrate
from tq_cache.formats.presets import FORMATS, ROLES
from tq_cache.formats.states import PackedStates

ALL = [(role, name) for role in ROLES for name, fmt in FORMATS[role].items() if fmt.scale != "per_token"]


@dataclass(frozen=True)
class Case:
    """Packed states; all but the first `length` of their tokens are to be left alone."""

    role: str
    format: str
    dim: int = 48
    length: int = 70
    batch: int = 1
    calibrated: bool = False  # centred, and keys smoothed

    def states(self, device: str = "cpu") -> PackedStates:
        generator = seeded(self.length + self.dim, device)
        capacity = -(-self.length // 64) * 64 + 64
        x = torch.randn(self.batch, 2, capacity, self.dim, generator=generator, device=device)
        x = x * (1 + torch.arange(self.dim, device=device) / self.dim) + 0.5
        fmt, counts = FORMATS[self.role][self.format], torch.ones_like(x[:, :1, :, :1], dtype=torch.bool)
        smooth = 0.65 if self.calibrated and self.role == "key" else 0.0
        calibration = calibrate(x, fmt, self.calibrated, smooth, counts)
        states = PackedStates.empty(self.role, fmt, x, capacity, calibration)
        quantizers.store(states, x, 0)
        poison_states(states, self.length)
        return states


CASES = {f"{role} {name}": Case(role, name) for role, name in ALL} | {
    "dim 16": Case("key", "tq2", dim=16, calibrated=True),
    "dim 80": Case("key", "tq3", dim=80, batch=2, calibrated=True),
    "dim 128": Case("value", "tq4", dim=128, length=64, calibrated=True),
    "dim 176": Case("value", "tq2", dim=176, length=1, calibrated=True),
    "dim 256": Case("key", "nc4", dim=256, length=60),
    "two": Case("value", "uniform3", dim=32, length=129, calibrated=True),
}


def run_kernel(states: PackedStates, length: int, dtype: torch.dtype) -> torch.Tensor:
    from tq_kernels.store.dequantize import dequantize

    from tq_cache.backends.triton import states_of

    with empty_is_nan():
        return dequantize(states_of(states), length, dtype, value=states.role == "value")
