"""What `benchmarks/latent.py` compares with, and by, is right: its kernel as vLLM's, its views, errors and verdicts.

The verdicts of `latent_step.py`, too.
"""

import sys
from pathlib import Path

import pytest
import torch
from kernel_harness import print_line, run_script

from tq_cache.backends import reference

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
# Heads, tokens, splits (of 33 some have no token), whether tiles are loaded twice, whether they are float8.
KERNELS = [
    (16, 96, 4, False, False),
    (20, 112, 3, True, False),
    (5, 64, 33, False, True),
    (20, 80, 4, True, True),
]


def kernels() -> None:
    """Relative errors of the kernel as vLLM's, on float16, which the interpreter computes with exactly."""
    from baseline_mla import SCALING, GroupedMLA, Problem

    from tq_cache.formats.states import KVView

    for heads, tokens, splits, twice, float8 in KERNELS:
        problem = Problem.random(2, heads, tokens, "cpu", torch.float16)
        joint = problem.joint
        held = (joint * 8).to(torch.float8_e4m3fn) if float8 else joint
        if float8:
            joint = held.double() / 8
        latents, keys = joint[:, None].double().split([512, 64], dim=-1)
        query = problem.content.double(), problem.rotary.double()
        expected, _ = reference.attend_latents(*query, KVView(latents, keys), None, SCALING)
        out = GroupedMLA(problem.query, held, splits, 1 / 8 if float8 else 1.0, twice)()
        print_line(((out.double() - expected).norm() / expected.norm()).item())


def plain() -> None:
    """Relative errors of PyTorch's, both ways of SDPA on the one backend that there is without a GPU."""
    from baseline_mla import SCALING, Problem, matmuls, sdpa
    from torch.nn.attention import SDPBackend

    problem = Problem.random(2, 5, 100, "cpu")
    problem = Problem(*(x.double() for x in vars(problem).values()))
    expected = torch.softmax(problem.query @ problem.joint[:, None].mT * SCALING, -1) @ problem.joint[:, None, :, :512]
    outs = [sdpa(SDPBackend.MATH, rows, problem.query, problem.joint) for rows in (False, True)]
    outs.append(matmuls(problem.query, problem.joint))
    print_line(*[((out - expected).norm() / expected.norm()).item() for out in outs])


def rows() -> None:
    """Errors of the reference in the benchmark's own comparison; whether views hold the problem; verdicts on a row."""
    from latent import NAMES, SCALING, Problem, dequantized, errors, make_row, make_view, rotary_states, verdicts

    def attend(*query_and_view):
        return reference.attend_latents(*query_and_view, None, SCALING)[0]

    problem = Problem.random(1, 4, 300, "cpu")
    view = make_view(NAMES["tq4"], problem, rotary_states(problem))
    latents, keys = dequantized(view)
    same = torch.equal(keys, problem.keys) and torch.equal(latents[:, :, -64:], problem.latents[:, :, -64:])
    print_line(errors(view, 4, attend), same and view.length == 300)
    times = dict(absorbed=80.0, matmul=None, sdpa_efficient=900.0, vllm_bf16=200.0, vllm_fp8=30.0, layer=2400.0)
    problem = Problem(*[torch.empty(8, 16, 1, 0, device="meta")] * 4, torch.empty(8, 32768, 0, device="meta"))
    row = make_row("tq4", problem, 32.0, 32 * 10**6, times, 4000.0)
    print_line(row, verdicts([row]), make_row("bf16", problem, 80.0, 1, times, 4000.0)["baseline"])


def steps() -> None:
    """Verdicts on steps; on a cache whose steps were not compiled there is none."""
    from latent_step import verdicts

    made = [("DynamicCache", "eager", 8, 32768, 200.0), ("tq3", "eager", 8, 32768, 5.0)]
    made += [("tq4", "compiled", 1, 1024, 3.0), ("tq4", "compiled", 1, 32768, 3.6), ("tq4", "compiled", 8, 32768, 25.0)]
    names = ("cache", "mode", "batch", "tokens", "ms_per_step")
    print_line(verdicts([dict(zip(names, values, strict=True)) for values in made]))


pytestmark = pytest.mark.slow  # the interpreter, for a kernel that only a benchmark runs


@pytest.fixture(scope="module")
def lines():
    return run_script(__file__, interpret=True)


def test_the_kernel_as_vllms_is_right(lines):
    unit = torch.finfo(torch.float16).eps / 2  # of the output, and of weights as operands
    assert len(lines) == len(KERNELS) + 4
    for case, (error,) in zip(KERNELS, lines, strict=False):
        assert error < 2 * unit, case


def test_pytorchs_are_right(lines):
    assert len(lines[-4]) == 3 and max(lines[-4]) < 1e-12


def test_errors_and_views(lines):
    errors, same = lines[-3]
    assert same
    unit = torch.finfo(torch.bfloat16).eps / 2
    assert 0 < errors["error"] < unit < 2 * errors["absorbed_error"] < 10 * unit
    assert unit / 2 < errors["expanded_error"] < 5 * unit


def test_rows_and_verdicts(lines):
    row, verdicts, baseline = lines[-2]
    assert (row["heads"], row["batch"], row["tokens"]) == (16, 8, 32768)
    assert (row["baseline"], row["baseline_us"], row["ratio"]) == ("absorbed", 80.0, 2.5)
    assert row["packed_gb_s"] == 1000 and baseline == "sdpa_efficient" and "matmul_us" not in row
    ends = [verdict.rpartition(": ")[2] for verdict in verdicts]
    assert ends == ["ok", "ok", "ok", "MISSED by 7%"]  # 38 us, half of ours on bf16, layer / 60, vLLM's on float8


def test_verdicts_on_steps(lines):
    (found,) = lines[-1]
    assert [line.split(": ")[1:] for line in found] == [
        ["1.20x of 1,024, at most 1.3x", "ok"],
        ["8.0x, at least 10x", "MISSED"],
    ]


if __name__ == "__main__":
    sys.path.insert(0, BENCHMARKS)
    torch.manual_seed(0)
    kernels()
    plain()
    rows()
    steps()
