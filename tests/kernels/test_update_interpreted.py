"""The update kernel of a preallocated layer in Triton's interpreter, against the reference.

`python tests/kernels/test_update_interpreted.py interpret NAME ...` prints a line per preset.
"""

import sys

import torch
from kernel_harness import print_line, run_script
from update_cases import differences

NAMES = ("fp8_e5m2", "k8v4", "3bit_nc", "tq4")


def interpret(*names):
    torch.set_num_threads(1)
    for name in names:
        print_line(name, *differences(name))


def test_interpreted_equals_reference():
    lines = run_script(__file__, "interpret", *NAMES, interpret=True)
    assert [line[0] for line in lines] == list(NAMES)
    for name, *shares in lines:
        assert shares[:2] == [0, 0], name  # the ring is copied
        assert max(shares) < 2e-3, (name, shares)  # codes of elements between two, at most


if __name__ == "__main__":
    interpret(*sys.argv[2:])
