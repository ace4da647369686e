"""Attention to latents in Triton's interpreter against float64; and what is refused.

`python tests/kernels/test_latent_decode_interpreted.py interpret KIND NAME ...` prints a line per case and form.
"""

import sys

import pytest
import torch
from kernel_harness import print_line, run_script
from latent_decode_cases import CASES, FAST_STATIC, STATIC, compare, compare_static, takes_rows

# Every number of bits, every rotary format, every rank, both forms, and every feature, once.
FAST = (
    "fp8_e5m2/int8", "tq2/exact", "tail and sinks", "many splits", "many splits, not rotated", "padding, floats", "all",
    "nothing packed", "chosen",
)  # fmt: skip
HALVES = ("chosen",)  # in float16 too, heads on M
HALF = torch.float16


def interpret(kind: str, *names: str) -> None:
    torch.set_num_threads(1)
    for name in names:
        case = CASES.get(name) or STATIC[name]
        # Tokens as rows are for 16-bit queries.
        forms = [(False, torch.float32)] + [(True, HALF)] * takes_rows(case)
        if kind == "all" or name in HALVES:
            forms += [(False, HALF)]
        for rows, dtype in forms:
            if name in CASES:
                shares = compare(case, rows, dtype=dtype)
            else:
                masks = ("", "rows", "noise") if kind == "all" else ("rows",) if rows else ("noise",)
                shares = compare_static(case, rows, dtype=dtype, masks=masks)
            print_line(name, rows, *shares)


def check(kind, names):
    lines = run_script(__file__, "interpret", kind, *names, interpret=True)
    assert {line[0] for line in lines} == set(names)
    assert {line[0] for line in lines if line[1]} == {x for x in names if takes_rows(CASES.get(x) or STATIC[x])}
    for line in lines:
        assert all(share <= 1 for share in line[2:]), line


def test_interpreted_equals_float64():
    """In one process, since to start one takes longer than most cases."""
    check("few", (*FAST, *FAST_STATIC))


@pytest.mark.slow
def test_interpreted_equals_float64_in_all_cases():
    check("all", CASES)


@pytest.mark.slow
def test_interpreted_static_layer_equals_float64_in_all_cases():
    check("all", STATIC)


if __name__ == "__main__":
    interpret(*sys.argv[2:])
