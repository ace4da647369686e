"""Quantise and append in Triton's interpreter against the reference; and what they refuse.

`python tests/kernels/test_quantize_interpreted.py interpret` prints a line per case.
"""

import pytest
import torch
from kernel_harness import print_line, run_script
from quantize_cases import CASES, ROLES, Case, append_case, check, compare


def interpret() -> None:
    torch.set_num_threads(1)
    for name, case in CASES.items():
        print_line(name, compare(case))
    print_line("append", append_case())


@pytest.fixture(scope="module")
def interpreted():
    return dict(run_script(__file__, "interpret", interpret=True))


@pytest.mark.parametrize("name", CASES)
def test_interpreter_stores_what_the_reference_stores(interpreted, name):
    check(interpreted[name], few=True)


def test_interpreter_appends(interpreted):
    assert interpreted["append"]


# --- Refused ----------------------------------------------------------------------------------------------------------


def small(**changes):
    from tq_cache.backends.triton import states_of

    pairs = [Case("tq4", ends=(64,)).make(role, "cpu", torch.float32) for role in ROLES]
    arguments = dict(zip(("key", "value"), (states_of(states) for states, _ in pairs), strict=True))
    return arguments | {"keys": pairs[0][1], "values": pairs[1][1], "start": 0} | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"keys": torch.zeros(1, 1, 64, 80)}, r"expected \[1, 1, 64, 64\].*got torch.float32 \[1, 1, 64, 80\]"),
        ({"keys": torch.zeros(1, 1, 64, 64).double()}, "one of .*got torch.float64"),
        ({"values": torch.zeros(1, 1, 3, 64)}, r"got torch.float32 \[1, 1, 3, 64\]"),
        ({"keys": torch.zeros(1, 1, 64, 64).mT}, "stride 1"),
        ({"start": 65}, "room for 129 tokens"),
        ({"start": -1}, "start >= 0, got -1"),
        ({"keys": None}, "one without the other"),
    ],
)
def test_quantize_says_what_does_not_fit(changes, words):
    quantize = pytest.importorskip("tq_kernels.store.quantize").quantize
    arguments = small(**changes)
    with pytest.raises(ValueError, match=words):
        quantize(**arguments)
    assert (arguments["key"].packed == 255).all() and (arguments["value"].packed == 255).all()


@pytest.mark.parametrize("start", [-1, 6])
def test_append_says_what_does_not_fit(start):
    append = pytest.importorskip("tq_kernels.store.append").append
    x, tail = torch.zeros(1, 1, 4, 64), torch.zeros(1, 1, 9, 64)
    with pytest.raises(ValueError, match=f"start {start}"):
        append(x, x, tail, tail, start)


if __name__ == "__main__":
    interpret()
