"""NaN in keys and values, on a GPU: it comes out where it is seen, and nowhere else; none of what left stays."""

import pytest
import torch
from nan_cases import CASES, compare

from tq_cache.backends import reference
from tq_cache.formats.presets import resolve_preset
from tq_cache.storage.preallocated import PreallocatedStorage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", CASES)
def test_nan_is_seen_or_hidden(name):
    assert compare(CASES[name], "cuda", torch.bfloat16) < 0.02


@pytest.mark.parametrize("preset", ["tq4", "4bit_nc", "fp8_e4m3", "tq2"])
def test_nan_does_not_outlive_a_reset(preset):
    """A preallocated layer full of NaN is used again: what a captured graph or `enable` does between calls."""
    from tq_cache.backends.triton import attend_preallocated

    storage = PreallocatedStorage(resolve_preset(preset), 64, 4, 1024, "triton")
    keys, values = (torch.full((2, 2, 1000, 128), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    storage.append(keys, values)
    storage.clear()
    keys, values = (torch.randn(2, 2, 300, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    storage.append(keys, values)
    query = torch.randn(2, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    out = attend_preallocated(query, storage.states, None, 0.08)
    expected = reference.attend_preallocated(query, storage.states, None, 0.08)
    assert (out - expected).norm() < 0.02 * expected.norm()
