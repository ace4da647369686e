"""Latents and rotary keys on a CUDA device, stored, read back and updated, against the reference."""

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from kernel_harness import DTYPES
from latent_store_cases import CASES, LATENT_FORMATS, ROTARY_FORMATS, STEPS, Case, Steps, compare, read_share
from quantize_cases import check, states_like
from update_cases import differences

from tq_cache.backends import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LONG = {
    f"{latent}, {rank}, long": Case(latent, rotary, rank, dim, 3, (777, 778, 3000), damage=True)
    for (latent, rank), rotary, dim in zip(
        product(LATENT_FORMATS, (128, 256, 512)), cycle(ROTARY_FORMATS), cycle((64, 32, 64)), strict=False
    )
} | {"no rotary part, long": Case("tq4", "exact", 512, 0, 2, (1000, 5000))}
ALL = CASES | LONG


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_cuda_stores_what_the_reference_stores(name, dtype):
    check(compare(ALL[name], "cuda", DTYPES[dtype]), few=ALL[name].ends[-1] < 1000)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL)
def test_cuda_reads_what_the_reference_reads(name, dtype):
    assert read_share(ALL[name], "cuda", DTYPES[dtype]) <= 1


def test_cuda_stores_32768_tokens():
    check(compare(Case("tq4", "int8", 512, 64, 2, (32768,)), "cuda", torch.bfloat16), few=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LATENT_FORMATS)
def test_cuda_updates_as_the_reference_does(name, dtype):
    case = Steps(name, sink_tokens=4, first=130, most=136, dims=(512, 64), rotary="int8")
    exact, packed = differences(case, "cuda", DTYPES[dtype])
    assert exact == 0 and packed < 2e-3, (exact, packed)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", STEPS)
def test_cuda_steps_through_sinks_and_packings(name, captured):
    """Token by token, also as one captured step that is replayed."""
    case = replace(STEPS[name], dims=(512, STEPS[name].dims[1]))
    exact, packed = differences(case, "cuda", torch.bfloat16, captured_step() if captured else None)
    assert exact == 0 and packed < 2e-3, (exact, packed)


def captured_step():
    """`update_preallocated`, from its second call on the replay of a graph."""
    from tq_cache.backends.triton import update_preallocated

    graph, held = torch.cuda.CUDAGraph(), []

    def step(states, *new):
        if not held:
            update_preallocated(states, *new)  # compiles
            held.extend(new)
            return
        for place, x in zip(held, new, strict=False):
            place.copy_(x)
        if len(held) == 2:
            with torch.cuda.graph(graph):
                update_preallocated(states, *held[:2])
            held.append(None)
        graph.replay()

    return step


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_cuda_counts_each_token_once(captured):
    """More programs than fit at once, one launch after the other: late ones must not read the count of the next."""

    def tokens(count, first, width):
        """Tokens that are their number, so that one in the wrong slot is seen."""
        number = torch.arange(first, first + count, device="cuda", dtype=torch.float32)
        return number[:, None].expand(512, 1, -1, width).contiguous()

    storage = Steps("tq4", 64, 4, most=320, rotary="int8", dims=(512, 64)).storage()
    storage.append(tokens(10, 0, 512), tokens(10, 0, 64))
    states, new, step = storage.states, (tokens(1, 0, 512), tokens(1, 0, 64)), captured_step()
    if not captured:
        from tq_cache.backends.triton import update_preallocated as step
    for number in range(10, 360):
        step(states, *[x.fill_(number) for x in new])
    assert states.num_tokens.item() == 320  # full; a later count would be larger, or hold tickets
    first, newest = torch.arange(4, device="cuda"), torch.arange(196, 320, device="cuda")
    for sinks, ring in ((states.sink_keys, states.ring_keys), (states.sink_values, states.ring_values)):
        assert torch.equal(sinks, first.float()[:, None].expand_as(sinks))
        found = ring[:, :, (newest - 4) % ring.shape[2]]
        assert torch.equal(found, newest.float()[:, None].expand_as(found))


def test_cuda_stores_beyond_two_to_the_31_elements():
    """Row strides so large that int32 offsets would wrap."""
    memory = torch.empty(2**31 + 2**21, dtype=torch.bfloat16, device="cuda")
    x = memory.as_strided((1, 1, 65, 512), (0, 0, 2**25, 1))
    x.copy_(torch.randn(1, 1, 65, 512))
    (latent, _), (rotary, rotary_keys) = Case("tq4", rank=512, ends=(65,)).make("cuda", torch.bfloat16)
    wanted = states_like(latent)
    from tq_cache.backends.triton import store_pair

    store_pair(latent, rotary, x, rotary_keys, 0)
    reference.store(wanted, x, 0)
    different = (latent.packed != wanted.packed)[:, :, 0].float().mean()
    assert different < 1e-3, different
