"""Sequences of random operations, on every way to hold tokens: see `random_operations`, of seeds `random_ways.run`."""

import pytest
from random_rules import GrowingMachine
from random_ways import EnabledMachine, OffloadedMachine, PreallocatedMachine, run

# Sequences by default, and in each of PARTS of the slow tests.
MACHINES = {
    GrowingMachine: (120, 1000),
    PreallocatedMachine: (80, 700),
    OffloadedMachine: (50, 400),
    EnabledMachine: (50, 400),
}
PARTS = 8


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_a_cache_is_a_list_of_tokens(machine):
    run(machine, MACHINES[machine][0])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 1 + PARTS))
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_a_cache_is_a_list_of_tokens_for_long(machine, part):
    run(machine, MACHINES[machine][1], part)
