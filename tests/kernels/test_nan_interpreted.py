"""NaN in keys and values, in Triton's interpreter: it comes out where it is seen, and nowhere else.

`python tests/kernels/test_nan_interpreted.py NAME ...` prints a line per case.
"""

import sys

import pytest
import torch
from kernel_harness import print_line, run_script
from nan_cases import CASES, compare

FAST = (
    "tq4, packed, value, seen, 1", "4bit_nc, packed, value, float, 1", "4bit_nc, packed, key, bool, 2",
    "fp8_e4m3, packed, value, seen, 1", "tq2, tail, key, bool, 1", "tq3/int8, packed, key, bool, 1",
    "3bit_nc, packed, value, bool, 20",
)  # fmt: skip


def interpret(*names):
    torch.set_num_threads(1)
    for name in names:
        print_line(name, compare(CASES[name]))


def check(names):
    lines = run_script(__file__, *names, interpret=True)
    assert [line[0] for line in lines] == list(names)
    assert all(error < 1e-3 for _, error in lines), lines


@pytest.mark.slow
def test_nan_is_seen_or_hidden():
    check(FAST)


@pytest.mark.slow
def test_nan_is_seen_or_hidden_in_all_cases():
    check([name for name in CASES if name not in FAST])


@pytest.mark.parametrize("name", CASES)
def test_reference_hides_nan(name):
    assert compare(CASES[name], reference_alone=True) == 0


if __name__ == "__main__":
    interpret(*sys.argv[1:])
