"""Quantise and append, compiled for every target.

`python tests/kernels/test_quantize_compiled.py compile TARGET` prints a line per case, and `... compile TARGET PRESET
DTYPE` one for that case.
"""

import sys

import pytest
import torch
from kernel_harness import DTYPES, TARGETS, compile_launch, device_of, empty_states, print_line, run_script
from quantize_cases import Case

COMPILED = ("fp8_e4m3", "fp8_e5m2", "k8v4", "3bit_nc", "tq4", "tq_k3v2")


def compile_case(target: str, preset: str, dtype: str, dim: int = 128) -> None:
    from tq_kernels.store.quantize import quantize_launch

    chosen, states = Case(preset).chosen, []
    batch, tokens = (8, 2048) if dim != 128 else (2, 64)  # several blocks a program, or one
    for role, fmt in (("key", chosen.key), ("value", chosen.value)):
        states.append(empty_states(role, fmt, dim, tokens, chosen.center, batch))
    x = torch.empty(batch, 2, tokens, dim, dtype=DTYPES[dtype], device="meta")
    launch = quantize_launch(*states, x, x, 0, device_of(target))
    assert launch.program.constants["LOOP"] == (1 if dim == 128 else 4)
    compiled = compile_launch(launch, target)
    print_line(preset, dtype, dim, "wgmma" in compiled.asm.get("ptx", ""))


def compile_append(target: str, dtype: str) -> None:
    from tq_kernels.store.append import append_launch

    for tokens in (1, 40):
        shapes = [(2, 2, n, dim) for n in (tokens, 64) for dim in (128, 64)]
        tensors = (torch.empty(shape, dtype=DTYPES[dtype], device="meta") for shape in shapes)
        compile_launch(append_launch(*tensors, 3, device_of(target)), target)


def compile_all(target: str) -> None:
    """Every dtype on every target; the formats, and a width that is no power of two, are spread over the targets."""
    place = list(TARGETS).index(target)
    for index, dtype in enumerate(DTYPES):
        compile_case(target, COMPILED[(place + 2 * index) % len(COMPILED)], dtype, dim=80 if index == 1 else 128)
        compile_append(target, dtype)


@pytest.mark.slow
def test_rotates_on_tensor_cores():
    ((*_, wgmma),) = run_script(__file__, "compile", "sm_90", "tq4", "bf16")
    assert wgmma


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_every_format(target):
    assert len(run_script(__file__, "compile", target)) == len(DTYPES)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        compile_all(sys.argv[2])
    else:
        compile_case(*sys.argv[2:])
