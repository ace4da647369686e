"""The update kernel of a preallocated layer in Triton's interpreter, against the reference.

`python tests/kernels/test_update_interpreted.py interpret NAME ...` prints a line per case.
"""

import sys

import torch
from kernel_harness import print_line, run_script
from update_cases import CASES, differences


def interpret(*names):
    torch.set_num_threads(1)
    for name in names:
        print_line(name, *differences(CASES[name]))


def test_interpreted_equals_reference():
    lines = run_script(__file__, "interpret", *CASES, interpret=True)
    assert [line[0] for line in lines] == list(CASES)
    for name, exact, packed in lines:
        assert exact == 0, name  # sinks and ring are copied
        assert packed < 2e-3, (name, packed)  # codes of elements between two, at most


if __name__ == "__main__":
    interpret(*sys.argv[2:])
