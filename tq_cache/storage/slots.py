"""Two slots in the memory of one device, in which offloaded layers take turns, and the stream that fills them.

    compute stream   attention i-1 | wait: i is here | attention i        | wait: i+1 is here | attention i+1
    copy stream      copy of i     | wait: i-1 is read | copy of i+1      | wait: i is read   | copy of i+2
    slots            0: i-1, 1: i                      | 0: i+1, 1: i                         | 0: i+1, 1: i+2

Waits are for events on the device, in both directions; the host waits for nothing.  A slot is filled when its turn
comes, or before, by what attention is about to read next.  On a device without streams (tests, on a CPU) copies are
made at once.
"""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch

from .flat import HostStates, Pair

SLOTS = 2


@dataclass(eq=False)
class _Slot:
    """What is, or is about to be, in a slot: the first `length` tokens of `host`, once `ready` has happened.

    pairs: states in the buffer, by what they are a copy of; the same objects at every turn, since kernels keep plans
    """

    buffer: torch.Tensor | None = None
    host: HostStates | None = None
    length: int = 0
    ready: torch.cuda.Event | None = None
    pairs: WeakKeyDictionary[HostStates, Pair] = field(default_factory=WeakKeyDictionary)


class Slots:
    """See above.

    size:   bytes of a slot, those of the largest buffer that was brought
    copies: so many were started
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.size = 0
        self.copies = 0
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots = [_Slot() for _ in range(SLOTS)]  # the one whose turn is longest ago first

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return sum(0 if slot.buffer is None else slot.buffer.nbytes for slot in self._slots)

    def bring(self, host: HostStates, length: int) -> Pair:
        """The first `length` tokens of `host` on the device, for what the current stream does before the next call."""
        slot = self._holding(host, length) or self._fetch(host, length)
        self._slots.remove(slot)
        self._slots.append(slot)
        if slot.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(slot.ready)
        return slot.pairs[host]

    def send_for(self, host: HostStates, length: int) -> None:
        """Start to copy what is read next, unless it is here, to the slot that is not read now."""
        if self._holding(host, length) is None:
            self._fetch(host, length)

    def written(self, host: HostStates, start: int) -> None:
        """Tokens from `start` on have changed on the host."""
        for slot in self._slots:
            if slot.host is host:
                slot.length = min(slot.length, start)

    def forget(self, host: HostStates) -> None:
        """It is not read any more."""
        for slot in self._slots:
            if slot.host is host:
                slot.host = None

    def _holding(self, host: HostStates, length: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.host is host and slot.length >= length), None)

    def _fetch(self, host: HostStates, length: int) -> _Slot:
        slot = self._slots[0]
        # Outside inference mode: else a slot could not be written outside it later.
        with torch.inference_mode(False), torch.no_grad():
            self.size = max(self.size, host.buffer.nbytes)
            if slot.buffer is None or slot.buffer.nbytes < self.size:
                self._allocate(slot)
            assert slot.buffer is not None
            into = slot.buffer[: host.buffer.numel()]
            if self.stream is None:
                into.copy_(host.buffer)
            else:
                # All that reads the slot has been launched: attention of the layer whose turn was before.
                self.stream.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(self.stream):
                    into.copy_(host.buffer, non_blocking=True)
                slot.ready = self.stream.record_event()
            if host not in slot.pairs:
                slot.pairs[host] = host.in_buffer(slot.buffer)
        slot.host, slot.length = host, length
        self.copies += 1
        return slot

    def _allocate(self, slot: _Slot) -> None:
        if slot.buffer is not None:  # given back before more is taken
            slot.pairs.clear()
            slot.buffer = slot.host = None
            if self.stream is not None:
                self.stream.synchronize()  # the allocator keeps what `record_stream` was told of till then
        slot.buffer = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        if self.stream is not None:
            slot.buffer.record_stream(self.stream)  # a copy may be under way when the cache is dropped
