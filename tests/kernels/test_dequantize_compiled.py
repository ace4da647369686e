"""The dequantise kernel, compiled for every target.

`python tests/kernels/test_dequantize_compiled.py compile TARGET FULL` prints a line per case.
"""

import sys

import pytest
from dequantize_cases import ALL
from kernel_harness import DTYPES, TARGETS, compile_launch, device_of, empty_states, print_line, run_script

from tq_cache.formats.presets import FORMATS, ROLES


def compile_all(target: str, full: str) -> None:
    wanted = [(role, name, "bf16", 64) for role, name in ALL]
    wanted += [(role, "tq3", dtype, dim) for role in ROLES for dtype, dim in (("fp16", 80), ("fp32", 256))]
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


if __name__ == "__main__":
    compile_all(*sys.argv[2:])
