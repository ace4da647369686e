"""What the tests of the update kernel share: steps of a preallocated layer, by the kernel and by the reference."""

import torch
from error_budget import seeded

from tq_cache.backends import reference
from tq_cache.formats.presets import PRESETS
from tq_cache.hf.graph_ops import flatten
from tq_cache.storage.preallocated import PreallocatedStorage


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
