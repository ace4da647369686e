"""The update kernel of a preallocated layer on a CUDA device, against the reference."""

import pytest
import torch
from kernel_harness import DTYPES
from update_cases import CASES, Case, differences

from tq_cache.formats.presets import PRESETS
from tq_cache.storage.preallocated import PreallocatedStorage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("preset", PRESETS)
def test_cuda_writes_what_the_reference_writes(preset, dtype):
    exact, packed = differences(Case(preset, sink_tokens=4, first=130, most=136, dims=(128, 64)), "cuda", DTYPES[dtype])
    assert exact == 0 and packed < 2e-3, (exact, packed)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", CASES)
def test_cuda_steps_through_sinks_and_packings(name, captured):
    """Token by token, also as one captured step that is replayed."""
    from tq_cache.backends.triton import update_preallocated

    graph, held = torch.cuda.CUDAGraph(), []

    def step(states, *new):
        if not captured or not held:
            update_preallocated(states, *new)  # the first one compiles
            held.extend(new)
            return
        for place, x in zip(held, new, strict=False):
            place.copy_(x)
        if len(held) == 2:
            with torch.cuda.graph(graph):
                update_preallocated(states, *held[:2])
            held.append(None)
        graph.replay()

    exact, packed = differences(CASES[name], "cuda", torch.bfloat16, step)
    assert exact == 0 and packed < 2e-3, (exact, packed)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_cuda_counts_each_token_once(captured):
    """More programs than fit at once, one launch after the other: late ones must not read the count of the next."""
    from tq_cache.backends.triton import update_preallocated

    def tokens(count, first):
        """Tokens that are their number, so that one in the wrong slot is seen."""
        number = torch.arange(first, first + count, device="cuda", dtype=torch.float32)
        return number[:, None].expand(256, 16, -1, 64).contiguous()

    storage = PreallocatedStorage(PRESETS["tq4"], 64, 4, 320, "reference")
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
    first, newest = torch.arange(4, device="cuda"), torch.arange(196, 320, device="cuda")
    for sinks, ring in ((states.sink_keys, states.ring_keys), (states.sink_values, states.ring_values)):
        assert torch.equal(sinks, first.float()[:, None].expand_as(sinks))
        found = ring[:, :, (newest - 4) % ring.shape[2]]
        assert torch.equal(found, newest.float()[:, None].expand_as(found))
