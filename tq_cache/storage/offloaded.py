"""Growing storage whose packed tokens may be in host memory.

    device | sinks and tail, calibration of every layer | packed tokens of layers that fit | slot 0 | slot 1 |
    host   | packed tokens of the others, one pinned flat buffer per layer (`flat`)                          |

Packed tokens do not change, so nothing but new blocks ever goes to the host.  While one layer computes the next one's
buffer is copied to a slot (`slots`).  All layers stay on the device as long as they fit into the budget; as they grow,
one after the other goes, for good, evenly spread, so that there is as much to compute between two copies as can be.

The host waits for what it copies to host memory: the copy is complete when it is used.  PyTorch rounds pinned buffers
up to powers of two.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..formats.packing import BLOCK_TOKENS
from ..formats.states import Calibration, KVView
from .base import round_up
from .flat import HostStates, Pair, flat_bytes, parts
from .growing import GrowingStorage, growth
from .slots import SLOTS, Slots

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGT]i?)?B")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_budget(offloading: str | int) -> int:
    """Bytes that "packed" (0), "8GB", "512MiB" or a number mean.  Raises ValueError or TypeError on anything else."""
    if offloading == "packed":
        return 0
    if isinstance(offloading, int) and not isinstance(offloading, bool):
        budget = offloading
    elif isinstance(offloading, str):
        found = _SIZE.fullmatch(offloading.strip())
        if found is None:
            raise ValueError(
                f"expected offloading as True, 'packed' or bytes like '8GB', '512MiB' or 8_000_000_000, got "
                f"{offloading!r}"
            )
        number, unit = found[1], found[2] or ""
        budget = int(float(number) * (1024 if unit.endswith("i") else 1000) ** _POWERS[unit[:1]])
    else:
        raise TypeError(f"expected offloading as a bool, a string or an int, got {type(offloading).__name__}")
    if budget <= 0:
        raise ValueError(f"expected a budget of more than 0 bytes, got {offloading!r}; offloading='packed' is none")
    return budget


class Turns:
    """The layers of a cache that may go to the host, in the order in which they compute, and the slots of each device.

    budget: bytes on each device of codes, scales and zeros of layers that stay, and of two slots if one has gone; 0:
            none stays.  Two slots are the least that there is
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.layers: list[OffloadedStorage] = []
        self.slots: dict[torch.device, Slots] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slots.nbytes for slots in self.slots.values())

    def device_bytes(self, device: torch.device) -> int:
        """Bytes that the budget is for."""
        here = [layer for layer in self.layers if layer.device == device]
        gone = [layer.host_nbytes for layer in here if layer.host is not None]
        if device in self.slots:
            gone.append(self.slots[device].size)
        return sum(layer.packed_bytes for layer in here if layer.host is None) + SLOTS * max(gone, default=0)

    def make_fit(self, device: torch.device) -> None:
        """Let layers go until what stays fits, after some of it has grown."""
        places = [i for i, x in enumerate(self.layers) if x.device == device and x.host is None and x.packed_bytes]
        places.sort(key=_spread)
        while places and self.device_bytes(device) > self.budget:
            self.layers[places.pop(0)].leave()

    def bring(self, layer: "OffloadedStorage", host: HostStates, length: int) -> Pair:
        """The first `length` tokens of a layer for the current stream to read, until this is called again.

        Then the next layer's are sent for.
        """
        if host.device not in self.slots:
            self.slots[host.device] = Slots(host.device)
        slots = self.slots[host.device]
        pair = slots.bring(host, length)
        after = self._after(layer, host)
        if after is not None:
            assert after.host is not None
            slots.send_for(after.host, after.packed_length)
        return pair

    def _after(self, layer: "OffloadedStorage", host: HostStates) -> "OffloadedStorage | None":
        """The next layer on this device that has gone, from the last on to the first; None if there is no other."""
        place = self.layers.index(layer)
        others = self.layers[place + 1 :] + self.layers[:place]
        gone = (x for x in others if x.host is not None and x.host.device == host.device and x.packed_length)
        return next(gone, None)

    def written(self, host: HostStates, start: int) -> None:
        """Tokens from `start` on have changed."""
        if host.device in self.slots:
            self.slots[host.device].written(host, start)

    def forget(self, host: HostStates) -> None:
        """A layer has other states now, or none; with the last that had gone, the slots go."""
        if host.device not in self.slots:
            return
        self.slots[host.device].forget(host)
        if all(layer.host is None or layer.host.device != host.device for layer in self.layers):
            del self.slots[host.device]

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have slots of their own."""
        return vars(self) | {"slots": {}}


def _spread(place: int) -> str:
    """Sorts 0 to n - 1 so that those that come first are evenly spread: 0, n/2, n/4, 3n/4, n/8 for a power of two."""
    return f"{place:032b}"[::-1]


class OffloadedStorage(GrowingStorage):
    """See `GrowingStorage`, and above.

    turns:     shared by the layers of a cache
    arguments: those of `GrowingStorage`
    """

    def __init__(self, turns: Turns, *arguments: Any) -> None:
        self.turns = turns
        self.host: HostStates | None = None  # then key and value are those in it
        super().__init__(*arguments)
        turns.layers.append(self)

    def clear(self) -> None:
        super().clear()
        self.device: torch.device | None = None  # where it computes, once something is packed
        self._have(None)

    # ------------------------------------------------------------------------------------------------- reading

    @property
    def packed_bytes(self) -> int:
        """Bytes of codes, scales and zeros, room for coming ones included, wherever they are."""
        return 0 if self.key is None or self.value is None else flat_bytes((self.key, self.value))

    @property
    def host_nbytes(self) -> int:
        """Bytes in host memory."""
        return 0 if self.host is None else self.host.buffer.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor on the device, room for coming tokens included; slots are not among them."""
        return super().nbytes - (0 if self.host is None else sum(x.nbytes for x in parts(self.host.pair)))

    def _view(self, tail_keys: torch.Tensor, tail_values: torch.Tensor) -> KVView:
        view = super()._view(tail_keys, tail_values)
        if self.host is None or not self.packed_length:
            return view
        return replace(view, bring=partial(self.turns.bring, self, self.host, self.packed_length))

    # ------------------------------------------------------------------------------------------------- writing

    def _pack(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.device = keys.device
        if self.host is None:
            super()._pack(keys, values)
        else:
            self._pack_to_host(keys, values)
        self.turns.make_fit(keys.device)

    def _pack_to_host(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Pack tokens on the device, and copy the blocks to the host."""
        assert self.host is not None and self.key is not None and self.value is not None
        start, end = self.packed_length, self.packed_length + keys.shape[2]
        first = start // BLOCK_TOKENS * BLOCK_TOKENS  # a block that a crop cut is filled further
        calibration = self.key.calibration, self.value.calibration
        fresh = self._unwritten(keys, values, round_up(end) - first, calibration)
        if first < start:
            for new, held in zip(parts(fresh), self._blocks(first, start), strict=True):
                new[:, :, : held.shape[2]].copy_(held)
        self._backend(keys, values).store_pair(*fresh, keys, values, start - first)
        if end > self.key.capacity:
            capacity = round_up(max(end, self.key.capacity + growth(self.key.capacity)))
            self._have(HostStates(self.host.pair, capacity, self.host.device))
        for held, new in zip(self._blocks(first, end), parts(fresh), strict=True):
            held.copy_(new)
        self.turns.written(self.host, start)
        self.packed_length = end

    def _blocks(self, start: int, end: int) -> list[torch.Tensor]:
        """Parts of the blocks that hold tokens start .. end, see `PackedStates.tokens`."""
        assert self.key is not None and self.value is not None
        return parts((self.key.tokens(start, end), self.value.tokens(start, end)))

    def leave(self) -> None:
        """Packed tokens go to the host, from where they do not come back but to be read."""
        assert self.key is not None and self.value is not None and self.device is not None
        self._have(HostStates((self.key, self.value), self.key.capacity, self.device))

    def _have(self, host: HostStates | None) -> None:
        """Hold these packed tokens, on the host, instead of those held."""
        before, self.host = self.host, host
        if host is not None:
            self.key, self.value = host.pair
        if before is not None:
            self.turns.forget(before)

    # ------------------------------------------------------------------------------------- as it was elsewhere

    def adopt(self, view: KVView, calibration: tuple[Calibration, Calibration] | None) -> None:
        super().adopt(view, calibration)
        self._have(None)
        self.device = None if self.key is None else view.tail_keys.device
        if self.device is not None:
            self.turns.make_fit(self.device)

    # --------------------------------------------------------------------------------------- whole sequences

    def to(self, device: torch.device | str) -> None:
        raise NotImplementedError("a cache with offloading='packed' or a budget moves its packed tokens itself")

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._map(function)
        if self.device is None:
            return
        if self.host is not None:
            self.leave()
        self.turns.make_fit(self.device)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have host memory of their own."""
        return vars(self) | {"host": self.host is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"host": None})
        if state["host"]:
            self.leave()
