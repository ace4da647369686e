"""The dequantise kernel in Triton's interpreter against `quantizers.dequantize`; and what `dequantize` refuses.

`python tests/kernels/test_dequantize_interpreted.py interpret NAME ...` prints two lines per case.
"""

import sys

import pytest
import torch
from dequantize_cases import CASES, Case, run_kernel
from error_budget import dequantize_budget, relative_error
from kernel_harness import print_line, run_script

from tq_cache.backends import quantizers


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


if __name__ == "__main__":
    interpret(*sys.argv[2:])
