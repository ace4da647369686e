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
    "fp8_e5m2/int8", "tq2/exact", "nc3/fp8_e5m2", "tail and sinks", "mask of heads", "noise", "queries", "all",
    "nothing packed", "chosen", "20 heads", "512, no rotary part",
)  # fmt: skip
HALVES = ("tail and sinks", "20 heads", "chosen")  # in float16 too, heads on M
HALF = torch.float16


def interpret(kind: str, *names: str) -> None:
    torch.set_num_threads(1)
    for name in names:
        if kind == "static":
            masks = ("", "rows", "noise")
            print_line(name, False, "torch.float32", *compare_static(STATIC[name], False, masks=masks))
            if takes_rows(STATIC[name]):
                print_line(
                    name, True, "torch.float16", *compare_static(STATIC[name], True, dtype=HALF, masks=masks[1:])
                )
            continue
        # Tokens as rows are for 16-bit queries.
        forms = [(False, torch.float32)] + [(True, HALF)] * takes_rows(CASES[name])
        for rows, dtype in forms + [(False, HALF)] * (kind == "all" or name in HALVES):
            print_line(name, rows, str(dtype), *compare(CASES[name], rows, dtype=dtype))


def check(kind, names):
    lines = run_script(__file__, "interpret", kind, *names, interpret=True)
    assert {line[0] for line in lines} == set(names)
    assert {line[1] for line in lines} == {False, True}  # both forms
    for line in lines:
        assert all(share <= 1 for share in line[3:]), line


def test_interpreted_equals_float64():
    check("few", FAST)


def test_interpreted_static_layer_equals_float64():
    check("static", FAST_STATIC)


@pytest.mark.slow
def test_interpreted_equals_float64_in_all_cases():
    check("all", CASES)


@pytest.mark.slow
def test_interpreted_static_layer_equals_float64_in_all_cases():
    check("static", [name for name in STATIC if name not in FAST_STATIC])


if __name__ == "__main__":
    interpret(*sys.argv[2:])
