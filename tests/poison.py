"""NaN wherever nothing was written: in what a launcher allocates, and in a storage behind its last token."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tq_cache.backends import reference
from tq_cache.formats.packing import BLOCK_TOKENS
from tq_cache.formats.states import PackedStates
from tq_cache.storage.growing import GrowingStorage
from tq_cache.storage.preallocated import PreallocatedStorage


@contextmanager
def empty_is_nan() -> Iterator[None]:
    """`torch.empty` and its like are filled with NaN, and with the largest integer.

    Not with TQ_LEAVE_EMPTY=1: then a tool looks for what is read unwritten (`scripts/sanitize.sh`).
    """
    if os.environ.get("TQ_LEAVE_EMPTY") == "1":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def poison_room(storage: GrowingStorage | PreallocatedStorage) -> None:
    """Fill all room of a storage that holds no token with NaN, and with bytes 0xFF, which are NaN in float8."""
    if isinstance(storage, GrowingStorage):
        key, value, length = storage.key, storage.value, storage.packed_length
        for buffer in storage.newest or ():
            buffer[:, :, storage.tail_length :] = torch.nan
    else:
        states = storage.states
        view = states.view()
        key, value, length = states.key, states.value, view.packed_length
        exact = view.length - view.sink_length - length
        free = torch.arange(length + exact, length + states.ring_slots, device=key.packed.device) % states.ring_slots
        for ring in (states.ring_keys, states.ring_values):
            ring[:, :, free] = torch.nan
        for sinks in (states.sink_keys, states.sink_values):
            if sinks is not None:
                sinks[:, :, view.sink_length :] = torch.nan
    # Of a preallocated layer of latents the second block holds no NaN while there is but one, see its `clear`.
    spared = isinstance(storage, PreallocatedStorage) and storage.preset.holds_latents
    for states in (key, value):
        if states is not None:
            poison_states(states, length, 2 if spared and states is key else 0)


def poison_states(states: PackedStates, length: int, spared: int = 0) -> None:
    """The same in packed states behind their first `length` tokens, and the first `spared` blocks."""
    first = max(-(-length // BLOCK_TOKENS), spared)
    if length % BLOCK_TOKENS:  # the bits of a block that holds some tokens are the quantiser's to write
        shape = (*states.packed.shape[:2], BLOCK_TOKENS - length % BLOCK_TOKENS, states.head_dim)
        dtype = states.packed.dtype if states.format.exact else torch.float32
        reference.store(states, torch.full(shape, torch.nan, dtype=dtype, device=states.packed.device), length)
    states.packed.view(torch.uint8)[:, :, first:] = 0xFF
    for factor in (states.scale, states.zero):
        if factor is not None:
            factor[:, :, first * BLOCK_TOKENS :] = torch.nan
