"""The update kernel of a preallocated layer in Triton's interpreter, against the reference.

`python tests/kernels/test_update_interpreted.py interpret NAME ...` prints a line per case.
"""

import sys

import pytest
import torch
from kernel_harness import print_line, run_script
from update_cases import CASES, FAST, differences


def interpret(*names):
    torch.set_num_threads(1)
    for name in names:
        print_line(name, *differences(CASES[name]))


def check_interpreted(names):
    lines = run_script(__file__, "interpret", *names, interpret=True)
    assert [line[0] for line in lines] == list(names)
    for name, exact, packed in lines:
        assert exact == 0, name  # sinks and ring are copied
        assert packed < 2e-3, (name, packed)  # codes of elements between two, at most


def test_interpreted_equals_reference():
    check_interpreted(FAST)


@pytest.mark.slow
def test_interpreted_equals_reference_in_all_cases():
    check_interpreted([name for name in CASES if name not in FAST])


if __name__ == "__main__":
    interpret(*sys.argv[2:])
