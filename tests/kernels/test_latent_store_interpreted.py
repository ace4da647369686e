"""Latents and rotary keys, stored, read back and updated in Triton's interpreter, against the reference; what is refused.

`python tests/kernels/test_latent_store_interpreted.py interpret KIND NAME ...` prints a line per case.
"""

import sys

import pytest
import torch
from kernel_harness import print_line, run_script
from latent_store_cases import CASES, Case, compare, read_share
from quantize_cases import check


def interpret(kind: str, *names: str) -> None:
    torch.set_num_threads(1)
    for name in names:
        if kind == "store":
            print_line(name, compare(CASES[name]))
        elif kind == "read":
            print_line(name, *(read_share(CASES[name], "cpu", dtype) for dtype in (torch.float32, torch.float16)))


def test_interpreter_stores_what_the_reference_stores():
    lines = run_script(__file__, "interpret", "store", *CASES, interpret=True)
    assert [name for name, _ in lines] == list(CASES)
    for _, result in lines:
        check(result, few=True)


def test_interpreter_reads_what_the_reference_reads():
    lines = run_script(__file__, "interpret", "read", *CASES, interpret=True)
    assert [line[0] for line in lines] == list(CASES)
    for name, *shares in lines:
        assert max(shares) <= 1, (name, shares)


if __name__ == "__main__":
    interpret(*sys.argv[2:])
