"""The dequantise kernel: in Triton's interpreter against `quantizers.dequantize`, compiled for every target, on CUDA.

`python tests/kernels/test_dequantize_kernel.py interpret NAME ...` and `... compile TARGET FULL` print a line per case.
"""

import sys
from dataclasses import dataclass, replace

import pytest
import torch
from error_budget import dequantize_budget, relative_error, seeded
from kernel_harness import (
    DTYPES,
    TARGETS,
    compile_launch,
    device_of,
    empty_states,
    print_line,
    run_script,
)

from tq_cache.backends import quantizers
from tq_cache.backends.calibration import calibrate
from tq_cache.formats.presets import FORMATS
from tq_cache.formats.states import PackedStates

ALL = [(role, name) for role, formats in FORMATS.items() for name, fmt in formats.items() if fmt.scale != "per_token"]


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

    return dequantize(states_of(states), length, dtype, value=states.role == "value")


# --- Interpreted ------------------------------------------------------------------------------------------------------


def interpret(*names: str) -> None:
    """Prints the share of the error budget in float32 and in float16, and that of the reference."""
    torch.set_num_threads(1)
    for name in names:
        states, length = CASES[name].states(), CASES[name].length
        expected = quantizers.dequantize(states, length, torch.float64)
        for dtype in (torch.float32, torch.float16):
            same = quantizers.dequantize(states, length, dtype)
            out = run_kernel(states, length, dtype)
            assert out.shape == expected.shape and out.dtype == dtype
            print_line(name, *(relative_error(x, expected) / dequantize_budget(dtype) for x in (out, same)))


def test_interpreted_equals_reference():
    lines = run_script(__file__, "interpret", *CASES, interpret=True)
    assert len(lines) == 2 * len(CASES)
    for name, *shares in lines:
        assert all(share <= 1 for share in shares), (name, *shares)


# --- Compiled ---------------------------------------------------------------------------------------------------------


def compile_all(target: str, full: str) -> None:
    wanted = [(role, name, "bf16", 64) for role, name in ALL]
    wanted += [(role, "tq3", dtype, dim) for role in FORMATS for dtype, dim in (("fp16", 80), ("fp32", 256))]
    few = [("key", "tq3", "bf16", 64), ("value", "uniform4", "fp32", 128), ("key", "fp8_e4m3", "fp16", 80)]
    for role, name, dtype, dim in wanted if full == "full" else few:
        _compile(target, role, FORMATS[role][name], dtype, dim)
        print_line(role, name, dtype, dim)


def _compile(target, role, fmt, dtype, dim):
    from tq_kernels.store.dequantize import dequantize_launch

    states = empty_states(role, fmt, dim)
    launch, _ = dequantize_launch(states, 200, DTYPES[dtype], role == "value", device_of(target))
    # Known: rotated vectors of 256 channels (sm_75: of 128) do not fit there; Triton says so at the launch.
    compile_launch(launch, target, fits=not (fmt.rotated and dim > 64 and target in ("sm_70", "sm_75")))


@pytest.mark.parametrize("target", ["sm_80"])
def test_compiles(target):
    assert run_script(__file__, "compile", target, "few")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for_every_target(target):
    assert run_script(__file__, "compile", target, "full")


# --- Refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case, length, dtype, message",
    [
        (Case("key", "tq4", dim=272), 70, torch.float32, "expected a head_dim of at most 256"),
        (Case("key", "tq4"), 70, torch.float64, "got 48 and torch.float64"),
        (Case("key", "tq4"), 193, torch.float32, "expected room for 193 tokens"),
    ],
)
def test_refuses(case, length, dtype, message):
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=message):
        run_kernel(case.states(), length, dtype)


def test_nothing():
    pytest.importorskip("triton")
    assert run_kernel(Case("value", "tq4").states(), 0, torch.bfloat16).shape == (1, 2, 0, 48)


# --- On CUDA ----------------------------------------------------------------------------------------------------------

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def check_on_gpu(case: Case, dtype: torch.dtype) -> None:
    """The error is what the roundings come to, against float64."""
    states, length = case.states("cuda"), case.length
    expected = quantizers.dequantize(states, length, torch.float64)
    assert relative_error(run_kernel(states, length, dtype), expected) <= dequantize_budget(dtype)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role, name", ALL)
def test_on_gpu(role, name, dtype):
    check_on_gpu(Case(role, name, dim=128, length=5000, batch=2, calibrated=True), DTYPES[dtype])


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 256])
@pytest.mark.parametrize("role, name", [("key", "tq3"), ("key", "fp8_e5m2"), ("value", "tq4"), ("value", "uniform4")])
def test_head_dims(role, name, dim):
    check_on_gpu(replace(Case(role, name, dim=dim, calibrated=True), length=1000), torch.float32)


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]](*sys.argv[2:])
