"""What the tests of the update kernel share: steps of a preallocated layer, by the kernel and by the reference."""

from dataclasses import dataclass

import torch
from error_budget import seeded

from tq_cache.backends import reference
from tq_cache.formats.presets import PRESETS
from tq_cache.hf.graph_ops import flatten
from tq_cache.storage.preallocated import PreallocatedStorage


@dataclass(frozen=True)
class Case:
    """A preallocated layer of `most` tokens, `first` at once and then `steps`, one by one."""

    preset: str = "tq4"
    residual_length: int = 64
    sink_tokens: int = 0
    first: int = 126
    steps: int = 7
    most: int = 132
    dims: tuple[int, int] = (64, 80)
    heads: int = 2

    def storage(self) -> PreallocatedStorage:
        return PreallocatedStorage(PRESETS[self.preset], self.residual_length, self.sink_tokens, self.most, "reference")


# One block is packed, the last step finds no room; then every residual length and number of sinks, over three blocks
# and a ring that wraps, from a chunk that leaves sinks free, or ends with them.
CASES = {name: Case(name) for name in ("fp8_e5m2", "k8v4", "3bit_nc", "tq4", "tq2")} | {
    f"{residual} and {sinks}": Case(
        *(preset, residual, sinks), first=max(sinks - 1, 1), steps=residual + 200, most=residual + 198, dims=(32, 48),
        heads=1,
    )
    for preset, residual, sinks in (
        ("tq4", 0, 0), ("tq2", 0, 1), ("k8v4", 0, 4), ("tq4", 64, 1), ("fp8_e4m3", 64, 4), ("tq3", 128, 4),
    )
}  # fmt: skip
CASES["fewer than sinks"] = Case(sink_tokens=140)
CASES["never packed"] = Case(residual_length=192, sink_tokens=4)
FAST = ("fp8_e5m2", "k8v4", "3bit_nc", "tq4", "0 and 4", "64 and 4", "fewer than sinks")


def differences(case, device="cpu", dtype=torch.float32, step=None):
    """Shares of exact elements, of bytes of packed tokens and of scales that differ after steps over a full ring.

    A code at a tie may come out on the other side, and takes the scale of its token along: of scales only those count
    that are more than there are bytes of codes that differ.

    step: `update_preallocated` by another way than a call of it
    """
    from tq_cache.backends.triton import update_preallocated

    step = step or update_preallocated
    ours, theirs = case.storage(), case.storage()
    generator = seeded(0)

    def tokens(count):
        return [torch.randn(2, case.heads, count, dim, generator=generator).to(device, dtype) for dim in case.dims]

    first = tokens(case.first)
    for storage in (ours, theirs):
        storage.append(*first)
    for number in range(1, case.steps + 1):
        new = tokens(1)
        step(ours.states, *new)
        reference.update_preallocated(theirs.states, *new)
        # Counted, and nothing is left of the tickets.
        assert ours.states.num_tokens.item() == min(case.first + number, case.most)
    assert ours.length == theirs.length == min(case.first + case.steps, case.most)
    found, bytes_off = [], 0
    for mine, other in zip(flatten(ours.states).buffers, flatten(theirs.states).buffers, strict=True):
        if mine.dim() == 3:  # scales, behind their codes
            unit = torch.finfo(mine.dtype).eps
            off = max(0, int((~torch.isclose(mine, other, rtol=unit, atol=0.0)).sum()) - bytes_off)
        else:
            off = bytes_off = int((mine.float() != other.float()).sum())
        found.append(off / max(mine.numel(), 1))
    exact = 2 + 2 * (case.sink_tokens > 0)
    return max(found[:exact]), max(found[exact:])
