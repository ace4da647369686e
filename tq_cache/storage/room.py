"""Room of preallocated memory: how much of what a call may ask for is reserved, and how more follows."""

import os
from typing import NamedTuple

import torch

from .preallocated import PreallocatedStorage, _copy

LEAST_ROOM = 1024  # tokens


class Room(NamedTuple):
    """Tokens per sequence that there is memory for, those there may be (`limit`), and why these are not the same."""

    tokens: int
    limit: int
    reason: str = ""

    def __str__(self) -> str:
        """In words, for a report."""
        text = f"room for {self.tokens:,} tokens per sequence"
        return f"{text}, of {self.limit:,} asked for ({self.reason}): it grows with the tokens" if self.reason else text


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device without swapping; None where nobody says."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def reserved_room(limit: int, least: int, positions: int | None, token_bytes: int, device: torch.device) -> Room:
    """How much of `limit` to reserve before a call's first token: at least `least`.

    positions:   those that the model was made for; a call that says 10**6 tokens seldom means it
    token_bytes: of one token of all sequences; half of the free memory is left to what a forward pass takes
    """
    free = free_bytes(device)
    fits = None if free is None else free // 2 // token_bytes
    bounds = [(positions, f"the model has {positions:,} positions")] if positions else []
    bounds += [(fits, "half of the free memory")] if fits is not None else []
    most, reason = min(bounds, default=(limit, ""))
    tokens = -(-max(most, least, LEAST_ROOM) // LEAST_ROOM) * LEAST_ROOM
    return Room(limit, limit) if tokens >= limit else Room(tokens, limit, reason)


def more_room(room: Room, needed: int, token_bytes: int, device: torch.device | None) -> Room:
    """Room for `needed` tokens at least, and twice what there was, since each size is a compilation.

    Where twice does not fit into the free memory of the device, it is as much as takes half of that.

    device: None while nothing is held yet, so that nothing is compiled: then no more than needed
    """
    most = room.tokens * 2 if device is not None else needed
    if device is not None and (free := free_bytes(device)) is not None:
        most = min(most, room.tokens + free // 2 // token_bytes)
    tokens = min(-(-max(most, needed) // LEAST_ROOM) * LEAST_ROOM, room.limit)
    return Room(tokens, room.limit, room.reason if tokens < room.limit else "")


def tokens_after(storage: PreallocatedStorage, known: int | None, count: int) -> int:
    """Tokens held once `count` more have come, or a bound that still fits; `known`: at most so many are held.

    Waits for the device where such a bound does not fit, or there is none.
    """
    if known is not None and known + count <= storage.max_length:
        return known + count
    return storage.length + count


def resize(storage: PreallocatedStorage, max_length: int, residual_length: int) -> None:
    """Move a storage to memory for `max_length` tokens: bits are copied, no token is quantized again.

    Waits for the device.  Changes nothing if there is no memory.
    """
    states, before = storage.states, (storage.max_length, storage.residual_length)
    calibration, provisional = storage.calibration, storage._provisional
    if states is not None:
        view = storage.view()
        storage._see(states, view.length)
    storage.max_length, storage.residual_length = max_length, residual_length
    if states is None or calibration is None:
        return
    try:
        storage.adopt(view, calibration)
    except BaseException:
        storage.states, storage._provisional = states, provisional
        storage.max_length, storage.residual_length = before
        raise
    assert storage.calibration is not None
    _copy(storage.calibration, calibration)  # also one that nothing is packed by yet
    storage._provisional = provisional
