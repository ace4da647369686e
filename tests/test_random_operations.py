"""Random operations on every way to hold tokens: see `random_operations`; of seeds, `random_ways.run`."""

import pytest
from random_rules import GrowingMachine
from random_ways import CompiledMachine, EnabledMachine, OffloadedMachine, PreallocatedMachine, run

# Sequences by default, 300 in all, and in each of the PARTS of the slow tests: 8 parts are 20,000, and take 7 minutes.
SEQUENCES = {
    GrowingMachine: (110, 1100),
    PreallocatedMachine: (70, 600),
    OffloadedMachine: (50, 300),
    EnabledMachine: (50, 400),
    CompiledMachine: (20, 100),
}
PARTS = 2
every_machine = pytest.mark.parametrize("machine", SEQUENCES, ids=lambda machine: machine.__name__)


@every_machine
def test_a_cache_is_a_list_of_tokens(machine):
    run(machine, SEQUENCES[machine][0])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 1 + PARTS))
@every_machine
def test_a_cache_is_a_list_of_tokens_for_long(machine, part):
    run(machine, SEQUENCES[machine][1], part)
