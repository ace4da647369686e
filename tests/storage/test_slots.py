"""Slots on streams that only keep account: what waits for what, without a device."""

from contextlib import contextmanager

import pytest
import torch
from storages import make_storage, tokens

from tq_cache.storage.flat import HostStates
from tq_cache.storage.slots import Slots

CPU = torch.device("cpu")


class Stream:
    """Its operations are numbered; `seen` are those, of each stream, that are over before what comes next."""

    def __init__(self, name: str) -> None:
        self.name, self.seen = name, {name: 0}

    def launch(self) -> tuple[str, int]:
        """An operation."""
        self.seen[self.name] += 1
        return self.name, self.seen[self.name]

    def follows(self, operation: tuple[str, int]) -> bool:
        """Whether what comes next begins after this operation."""
        name, number = operation
        return self.seen.get(name, 0) >= number

    def record_event(self) -> dict[str, int]:
        return dict(self.seen)

    def wait_event(self, event: dict[str, int]) -> None:
        for name, number in event.items():
            self.seen[name] = max(self.seen.get(name, 0), number)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


@pytest.mark.parametrize("layers", (1, 2, 3, 6))
@pytest.mark.parametrize("in_order", (True, False), ids=["in order", "any order"])
def test_copies_and_kernels_wait_for_each_other(layers, in_order, generator, monkeypatch):
    """No slot is read before it is filled, nor filled before what read it last is over."""
    storage = make_storage("tq4")
    storage.append(*tokens(generator, 200))
    pair = storage.key, storage.value
    hosts = [HostStates(pair, storage.key.capacity, CPU) for _ in range(layers)]
    slots, compute, copies = Slots(CPU), Stream("compute"), Stream("copy")
    for extra in range(2):  # both have their buffers
        slots.bring(HostStates(pair, storage.key.capacity + 64 * extra, CPU), 128)
        slots.bring(HostStates(pair, storage.key.capacity + 64, CPU), 128)
    reads: dict[int, list[tuple[str, int]]] = {}
    filled: dict[int, tuple[str, int]] = {}

    @contextmanager
    def on(stream):
        slot = id(slots._slots[0].buffer)
        assert stream is copies and all(stream.follows(read) for read in reads.get(slot, []))
        yield
        filled[slot] = stream.launch()

    monkeypatch.setattr(slots, "stream", copies)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    for turn in range(60):
        place = turn % layers if in_order else int(torch.randint(0, layers, (), generator=generator))
        if turn % 17 == 5:
            slots.written(hosts[place], 64)  # so that it is copied again
        here = slots.bring(hosts[place], 128)
        slot = id(slots._slots[-1].buffer)
        assert here[0].packed.untyped_storage().data_ptr() == slots._slots[-1].buffer.data_ptr()
        assert compute.follows(filled[slot])
        following = hosts[(place + 1) % layers]
        if following is not hosts[place]:
            slots.send_for(following, 128)
        assert slot == id(slots._slots[-1].buffer)  # what is about to be read stays
        reads.setdefault(slot, []).append(compute.launch())  # attention
    assert copies.seen["copy"] == slots.copies - 4 > 0
