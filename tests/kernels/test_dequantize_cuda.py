"""The dequantise kernel on a CUDA device, against float64."""

from dataclasses import replace

import pytest
import torch
from dequantize_cases import ALL, Case, run_kernel
from error_budget import dequantize_budget, relative_error
from kernel_harness import DTYPES

from tq_cache.backends import quantizers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def check_on_gpu(case: Case, dtype: torch.dtype) -> None:
    """The error is what the roundings come to, against float64."""
    states, length = case.states("cuda"), case.length
    expected = quantizers.dequantize(states, length, torch.float64)
    assert relative_error(run_kernel(states, length, dtype), expected) <= dequantize_budget(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("role, name", ALL)
def test_on_gpu(role, name, dtype):
    check_on_gpu(Case(role, name, dim=128, length=5000, batch=2, calibrated=True), DTYPES[dtype])


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 256])
@pytest.mark.parametrize("role, name", [("key", "tq3"), ("key", "fp8_e5m2"), ("value", "tq4"), ("value", "uniform4")])
def test_head_dims(role, name, dim):
    check_on_gpu(replace(Case(role, name, dim=dim, calibrated=True), length=1000), torch.float32)
