"""The update kernel of a preallocated layer on a CUDA device, against the reference."""

import pytest
import torch
from kernel_harness import DTYPES
from update_cases import differences

from tq_cache.formats.presets import PRESETS
from tq_cache.storage.preallocated import PreallocatedStorage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("preset", PRESETS)
def test_cuda_writes_what_the_reference_writes(preset, dtype):
    shares = differences(preset, "cuda", DTYPES[dtype], dims=(128, 64))
    assert shares[:2] == [0, 0] and max(shares) < 2e-3, shares


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_cuda_counts_each_token_once(captured):
    """More programs than fit at once, one launch after the other: late ones must not read the count of the next."""
    from tq_cache.backends.triton import update_preallocated

    def tokens(count, first):
        """Tokens that are their number, so that one in the wrong slot is seen."""
        number = torch.arange(first, first + count, device="cuda", dtype=torch.float32)
        return number[:, None].expand(256, 16, -1, 64).contiguous()

    storage = PreallocatedStorage(PRESETS["tq4"], 64, 320, "reference")
    storage.append(tokens(10, 0), tokens(10, 0))
    states, step = storage.states, tokens(1, 0)

    def update():
        update_preallocated(states, step, step)
        step.add_(1)

    step.fill_(10)
    update()
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            update()
    for _ in range(350):
        graph.replay() if captured else update()
    assert states.num_tokens.item() == 320  # full; a later count would be larger, or hold tickets
    newest = torch.arange(192, 320, device="cuda")
    for ring in (states.ring_keys, states.ring_values):
        found = ring[:, :, newest % ring.shape[2]]
        assert torch.equal(found, newest.float()[:, None].expand_as(found))
