"""The update kernel of a preallocated layer, compiled for every target.

`python tests/kernels/test_update_compiled.py compile TARGET NAME ...` prints a line per dtype and preset.
"""

import sys

import pytest
import torch
from kernel_harness import DTYPES, TARGETS, compile_launch, device_of, empty_states, print_line, run_script

from tq_cache.formats.presets import PRESETS


def compile_all(target, *presets):
    from tq_kernels.store.update import update_launch

    for dtype in DTYPES:
        for name in presets:
            preset, states = PRESETS[name], []
            for role, fmt in (("key", preset.key), ("value", preset.value)):
                states.append(empty_states(role, fmt, 128))
            token, ring, sinks = (torch.empty(2, 2, n, 128, dtype=DTYPES[dtype], device="meta") for n in (1, 192, 4))
            count = torch.empty((), dtype=torch.int64, device="meta")
            exact = token, token, *states, ring, ring
            launch = update_launch(*exact, count, 128, 384, (sinks, sinks), device_of(target))
            print_line(dtype, name, compile_launch(launch, target).metadata.num_warps)


def check_compiled(target, *presets):
    assert len(run_script(__file__, "compile", target, *presets)) == len(DTYPES) * len(presets)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for_every_target(target):
    check_compiled(target, "tq3")


if __name__ == "__main__":
    compile_all(*sys.argv[2:])
