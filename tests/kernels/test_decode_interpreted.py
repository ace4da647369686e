"""The decode kernels in Triton's interpreter against `reference.attend`.

`python tests/kernels/test_decode_interpreted.py interpret NAME ...` and `... interpret_static NUMBER ...`, of `STATIC`,
print a line per case.
"""

import sys
from dataclasses import replace

import pytest
import torch
from decode_cases import CASES, EXACT, FAST_STATIC, STATIC, Case, compare_exact, compare_static, expect, run_kernel
from error_budget import Roundings, ratios
from kernel_harness import print_line, run_script

from tq_cache.formats.states import map_tensors

# In the interpreter: every number of bits, and every feature, once.
FAST = ("e5m2", "nc4/uniform4", "tq3/uniform3", "tq2/tq2", "fp8_e4m3/tq3", "padding", "all", "queries", "one token")
LENGTHS = (0, 70, 999)  # of 192 tokens


def compare(case, compute):
    """Shares of the error budgets that the kernels take when they compute in so and so, from float32."""
    import triton.language as tl
    from tq_kernels.tuning import Arithmetic

    operand = {torch.float32: tl.float32, torch.float16: tl.float16}[compute]
    view, query = case.view(), case.query()
    mask, options = case.make_mask(view.length), case.make_options()
    roundings = replace(Roundings.of_reference(torch.float32), operand=torch.finfo(compute).eps / 2)
    out, lse = run_kernel(case, view, query, mask, options, arithmetic=Arithmetic(operand))
    return ratios(out, lse, expect(case, view, query, mask, options, roundings))


def interpret(*names):
    torch.set_num_threads(1)
    for name in names:
        for compute in (torch.float32, torch.float16)[: 1 + (name in ("e5m2", "all"))]:
            print_line(name, str(compute), *compare(CASES[name], compute))


def compare_lengths(*lengths):
    """Shares of the error budgets of sequences of which so many packed tokens count, each by itself."""
    case = Case("tq4", batch=len(lengths), tail=20)
    view, query = case.view(), case.query()
    out, lse = run_kernel(case, view, query, None, {}, lengths=torch.tensor(lengths, dtype=torch.int32))
    found = []
    for row, length in enumerate(lengths):
        this = slice(row, row + 1)
        alone = map_tensors(view, lambda x, this=this: x[this])
        alone = replace(alone, packed_length=min(length, case.tokens))
        expected = expect(case, alone, query[this], None, {}, Roundings.of_kernels(torch.float32))
        found += ratios(out[this], lse[this], expected)
    return found


def interpret_static(*numbers):
    torch.set_num_threads(1)
    for case in (STATIC[int(number)] for number in numbers):
        print_line(case[0], *compare_static(*case))
    for tokens, queries in EXACT:
        print_line(f"exact {tokens}", *compare_exact(tokens, queries))
    print_line("lengths", *compare_lengths(*LENGTHS))


def check_static(first, last):
    lines = run_script(__file__, "interpret_static", *map(str, range(first, last)), interpret=True)
    names = [case[0] for case in STATIC[first:last]] + [f"exact {tokens}" for tokens, _ in EXACT] + ["lengths"]
    assert [line[0] for line in lines] == names
    assert all(share <= 1 for line in lines for share in line[1:]), lines


def test_interpreted_static_layer_equals_reference():
    check_static(0, len(FAST_STATIC))


@pytest.mark.slow
def test_interpreted_static_layer_equals_reference_in_all_cases():
    check_static(len(FAST_STATIC), len(STATIC))


def check_interpreted(names):
    lines = run_script(__file__, "interpret", *names, interpret=True)
    assert {line[0] for line in lines} == set(names)
    for line in lines:
        assert all(share <= 1 for share in line[2:]), line


def test_interpreted_equals_reference():
    check_interpreted(FAST)


@pytest.mark.slow
def test_interpreted_equals_reference_in_all_cases():
    check_interpreted([name for name in CASES if name not in FAST])


if __name__ == "__main__":
    {"interpret": interpret, "interpret_static": interpret_static}[sys.argv[1]](*sys.argv[2:])
