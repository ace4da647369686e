"""Sequences of random operations (`random_operations`) on a CUDA device: the kernels, and captured steps."""

import pytest
import torch
from error_budget import Roundings
from random_operations import CacheMachine
from random_rules import GrowingMachine
from random_ways import CompiledMachine, OffloadedMachine, PreallocatedMachine, run

from tq_cache import TurboQuantCache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Cuda(CacheMachine):
    """On a GPU, by the kernels."""

    device, kernels = "cuda", True
    dtypes = (torch.bfloat16, torch.float32)

    def roundings(self, by_sdpa):
        return Roundings.of_kernels(self.now.dtype, float8=True)


class CudaGrowing(Cuda, GrowingMachine):
    pass


class CudaPreallocated(Cuda, PreallocatedMachine):
    pass


class CudaOffloaded(Cuda, OffloadedMachine):
    cache_class = TurboQuantCache


class CudaCaptured(Cuda, CompiledMachine):
    """Steps in CUDA graphs."""

    dtypes = (torch.bfloat16,)
    compiles = dict(fullgraph=True, mode="reduce-overhead")


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize(
    ("machine", "sequences"), [(CudaGrowing, 400), (CudaPreallocated, 300), (CudaOffloaded, 100), (CudaCaptured, 200)]
)
def test_a_cache_is_a_list_of_tokens_on_a_gpu(machine, sequences, part):
    run(machine, sequences, part, shrinks=False)  # a GPU's time is dear: shorten what fails on a CPU
