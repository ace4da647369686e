"""The prefill kernels on a CUDA device, against attention in float64."""

from dataclasses import replace

import pytest
import torch
from error_budget import assert_within
from kernel_harness import DTYPES
from prefill_cases import CASES, FORMATS, Case, expect, run_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_cudnn = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs Hopper's cuDNN attention"
)
BIG = Case(heads=8, queries=300, dim=128, packed=5096, exact=400)


def check_on_gpu(case: Case, dtype: torch.dtype = torch.bfloat16) -> None:
    """The error is what the roundings of the kernels come to, against float64; no other attention is asked."""
    query, view = case.query("cuda", dtype), case.view("cuda", dtype)
    options = case.options(view.length, "cuda")
    assert_within(*run_kernel(case, query, view, **options), expect(query, view, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("preset", FORMATS)
def test_tiles(preset, dtype):
    check_on_gpu(replace(BIG, preset=preset, segments=False), DTYPES[dtype])


@needs_cudnn
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("preset", FORMATS)
def test_segments(preset, dtype, monkeypatch):
    monkeypatch.setattr("tq_kernels.prefill.tuning.SEGMENT", 2048)
    check_on_gpu(replace(BIG, preset=preset, segments=True), DTYPES[dtype])


@needs_cudnn
def test_more_segments_than_are_merged_at_a_time(monkeypatch):
    monkeypatch.setattr("tq_kernels.prefill.tuning.SEGMENT", 2048)
    check_on_gpu(replace(BIG, packed=6 * 2048 + 70, segments=True))


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    case = CASES[name]
    check_on_gpu(replace(case, queries=70, exact=90, packed=case.packed and 2348))


@pytest.mark.parametrize("dim, value_dim", [(64, 64), (80, 80), (96, 64), (256, 256), (192, 128)])
@pytest.mark.parametrize("preset", ["fp8_e4m3", "4bit_nc", "tq3"])
def test_head_dims(preset, dim, value_dim):
    check_on_gpu(Case(preset, dim=dim, value_dim=value_dim, queries=300, packed=3000, exact=400))


@pytest.mark.parametrize("preset", ["fp8_e4m3", "tq3"])
def test_wide_float32(preset):
    check_on_gpu(Case(preset, dim=256, queries=40, packed=300, exact=50), torch.float32)


@pytest.mark.parametrize("heads, kv_heads", [(7, 7), (14, 2), (16, 1)])
def test_groups(heads, kv_heads):
    check_on_gpu(Case("tq4", heads=heads, kv_heads=kv_heads, dim=128, packed=3000, queries=33, exact=40))


@pytest.mark.parametrize("segments", [False, pytest.param(True, marks=needs_cudnn)])
@pytest.mark.parametrize("dim", [128, 256])
def test_runs_are_equal(dim, segments):  # a merge in place once was a race
    case = Case("tq4", dim=dim, queries=300, packed=3000, exact=400, segments=segments)
    query, view = case.query("cuda", torch.bfloat16), case.view("cuda", torch.bfloat16)
    first, *others = (run_kernel(case, query, view, **case.options(view.length, "cuda"))[0] for _ in range(10))
    assert all(torch.equal(first, other) for other in others)
