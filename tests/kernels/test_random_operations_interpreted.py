"""Sequences of random operations (`random_operations`) with the kernels in Triton's interpreter.

`python tests/kernels/test_random_operations_interpreted.py interpret SEQUENCES PART MACHINE ...` runs them.
"""

import sys
from typing import Any

import pytest
import torch
from error_budget import Roundings
from kernel_harness import print_line, run_script
from random_operations import CacheMachine
from random_rules import GrowingMachine
from random_ways import PreallocatedMachine, run


class Interpreted(CacheMachine):
    """What the kernels compute, though nothing here is a GPU's."""

    kernels = True
    dtypes = (torch.float32,)

    def roundings(self, by_sdpa):
        return Roundings.of_kernels(torch.float32)


class InterpretedGrowing(Interpreted, GrowingMachine):
    pass


class InterpretedPreallocated(Interpreted, PreallocatedMachine):
    pass


MACHINES: dict[str, Any] = dict(growing=InterpretedGrowing, preallocated=InterpretedPreallocated)


def interpret(sequences: str, part: str, *machines: str) -> None:
    from tq_cache import backends
    from tq_cache.backends import triton

    backends._choose = lambda *_: triton  # which no CPU has
    torch.set_num_threads(1)
    for machine in machines:
        run(MACHINES[machine], int(sequences), int(part), steps=5)
        print_line(machine)


@pytest.mark.slow
def test_kernels_keep_a_list_of_tokens():
    assert len(run_script(__file__, "interpret", "5", "0", *MACHINES, interpret=True)) == len(MACHINES)


if __name__ == "__main__":
    interpret(*sys.argv[2:])
