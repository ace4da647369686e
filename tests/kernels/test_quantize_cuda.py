"""Quantise and append on a CUDA device, against the reference."""

from itertools import cycle

import pytest
import torch
from kernel_harness import DTYPES
from quantize_cases import CASES, Case, append_case, check, codes, compare, states_like, store_kernel

from tq_cache.backends import reference
from tq_cache.formats.presets import PRESETS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LONG = [(name, dim) for name in PRESETS for dim in (64, 80, 96, 128, 256)]
GPU_CASES = [(name, case, dtype) for name, case in CASES.items() for dtype in DTYPES] + [
    (f"{name}, {dim}, long", Case(name, dim, batch=2, heads=16, ends=(777, 778, 3000), damage=True), dtype)
    for (name, dim), dtype in zip(LONG, cycle(DTYPES), strict=False)
]


@pytest.mark.parametrize(
    ("case", "dtype"), [pytest.param(*rest, id=name + ", " + rest[1]) for name, *rest in GPU_CASES]
)
def test_cuda_stores_what_the_reference_stores(case, dtype):
    check(compare(case, "cuda", DTYPES[dtype]), few=case.ends[-1] < 1000)


def test_cuda_appends():
    assert append_case("cuda")


def test_cuda_stores_beyond_two_to_the_31_elements():
    """Row strides so large that int32 offsets would wrap."""
    memory = torch.empty(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    x = memory.as_strided((1, 1, 65, 64), (0, 0, 2**25, 1))
    x.copy_(torch.randn(1, 1, 65, 64))
    states, _ = Case("tq4", ends=(65,)).make("key", "cuda", torch.bfloat16)
    value, values = Case("tq4", ends=(65,)).make("value", "cuda", torch.bfloat16)
    wanted = states_like(states)
    store_kernel([(states, x), (value, values)], 0)
    reference.store(wanted, x, 0)
    assert torch.equal(codes(states, 65), codes(wanted, 65))
