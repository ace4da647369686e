"""The update kernel of a preallocated layer: interpreted and on CUDA against the reference, and compiled."""

import sys

import pytest
import torch
from error_budget import seeded
from kernel_harness import DTYPES, TARGETS, compile_launch, device_of, empty_states, print_line, run_script

from tq_cache.backends import reference
from tq_cache.formats.presets import PRESETS
from tq_cache.hf.graph_ops import flatten
from tq_cache.storage.preallocated import PreallocatedStorage

NAMES = ("fp8_e5m2", "k8v4", "3bit_nc", "tq4")


def differences(preset, device="cpu", dtype=torch.float32, dims=(64, 80)):
    """Shares of ring elements, of bytes of packed tokens and of scales that differ after steps over a full ring."""
    from tq_cache.backends.triton import update_preallocated

    ours, theirs = (PreallocatedStorage(PRESETS[preset], 64, 132, "reference") for _ in range(2))
    generator = seeded(0)

    def tokens(count):
        return [torch.randn(2, 2, count, dim, generator=generator).to(device, dtype) for dim in dims]

    first = tokens(126)
    for storage in (ours, theirs):
        storage.append(*first)
    for step in range(7):  # the third packs a block, the last finds no room
        step_tokens = tokens(1)
        update_preallocated(ours.states, *step_tokens)
        reference.update_preallocated(theirs.states, *step_tokens)
        assert ours.states.num_tokens.item() == min(127 + step, 132)  # counted, and nothing is left of the tickets
    assert ours.length == theirs.length == 132
    found = []
    for mine, other in zip(flatten(ours.states).buffers, flatten(theirs.states).buffers, strict=True):
        mine, other = mine.float(), other.float()
        close = torch.isclose(mine, other, rtol=1e-3) if mine.dim() == 3 else mine == other
        found.append((~close).float().mean().item())
    return found


def interpret(*names):
    torch.set_num_threads(1)
    for name in names:
        print_line(name, *differences(name))


def test_interpreted_equals_reference():
    lines = run_script(__file__, "interpret", *NAMES, interpret=True)
    assert [line[0] for line in lines] == list(NAMES)
    for name, *shares in lines:
        assert shares[:2] == [0, 0], name  # the ring is copied
        assert max(shares) < 2e-3, (name, shares)  # codes of elements between two, at most


def compile_all(target, *presets):
    from tq_kernels.store.update import update_launch

    for dtype in DTYPES:
        for name in presets:
            preset, states = PRESETS[name], []
            for role, fmt in (("key", preset.key), ("value", preset.value)):
                states.append(empty_states(role, fmt, 128))
            token, ring = (torch.empty(2, 2, n, 128, dtype=DTYPES[dtype], device="meta") for n in (1, 192))
            count = torch.empty((), dtype=torch.int64, device="meta")
            launch = update_launch(token, token, *states, ring, ring, count, 128, 384, device_of(target))
            print_line(dtype, name, compile_launch(launch, target).metadata.num_warps)


def check_compiled(target, *presets):
    assert len(run_script(__file__, "compile", target, *presets)) == len(DTYPES) * len(presets)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for_every_target(target):
    check_compiled(target, "tq3")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("preset", PRESETS)
def test_cuda_writes_what_the_reference_writes(preset, dtype):
    shares = differences(preset, "cuda", DTYPES[dtype], dims=(128, 64))
    assert shares[:2] == [0, 0] and max(shares) < 2e-3, shares


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]](*sys.argv[2:])
