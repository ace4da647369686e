"""Packed keys and values of one layer in one flat buffer of host memory, so that one copy brings all of them.

    | key: packed | scale | zero | value: packed | scale | zero |    uint8, every part at a multiple of 256 bytes

What a format lacks takes nothing.  Calibration is not in it: that stays on the device.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from ..formats.packing import BLOCK_TOKENS
from ..formats.states import PackedStates

Pair = tuple[PackedStates, PackedStates]

_ALIGN = 256


def parts(pair: Pair) -> list[torch.Tensor]:
    """Codes, scales and zeros of a pair, in the order above."""
    return [x for states in pair for x in (states.packed, states.scale, states.zero) if x is not None]


def flat_bytes(pair: Pair) -> int:
    """Bytes that a pair takes in a flat buffer."""
    return sum(_aligned(x.nbytes) for x in parts(pair))


class HostStates:
    """A copy of packed keys and values in host memory, with room for `capacity` tokens; on return it has been made.

    device: where they are read; for a CUDA device the buffer is pinned
    buffer: uint8 [bytes], as above
    pair:   the states in it, with the calibration of those that were copied
    """

    def __init__(self, pair: Pair, capacity: int, device: torch.device) -> None:
        shapes = _with_room(pair[0], capacity), _with_room(pair[1], capacity)
        self.device = device
        with torch.inference_mode(False), torch.no_grad():
            pinned = device.type == "cuda"
            self.buffer = torch.empty(flat_bytes(shapes), dtype=torch.uint8, device="cpu", pin_memory=pinned)
            self.pair = self._laid_out(shapes, self.buffer)
            for own, held in zip(parts(self.pair), parts(pair), strict=True):
                own[:, :, : held.shape[2]].copy_(held)
                own[:, :, held.shape[2] :].zero_()  # as all room for coming tokens

    def in_buffer(self, buffer: torch.Tensor) -> Pair:
        """The states that a copy of this one's buffer holds."""
        return self._laid_out(self.pair, buffer)

    @staticmethod
    def _laid_out(shapes: Pair, buffer: torch.Tensor) -> Pair:
        start = 0

        def place(like: torch.Tensor) -> torch.Tensor:
            nonlocal start
            part = buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)
            start += _aligned(like.nbytes)
            return part

        key, value = shapes
        return _map_parts(key, place), _map_parts(value, place)


def _with_room(states: PackedStates, capacity: int) -> PackedStates:
    """Shapes and dtypes (tensors on the meta device) of the same states with room for `capacity` tokens."""

    def shape(x: torch.Tensor) -> torch.Tensor:
        size = capacity // BLOCK_TOKENS if x is states.packed else capacity
        return torch.empty(*x.shape[:2], size, *x.shape[3:], dtype=x.dtype, device="meta")

    return _map_parts(states, shape)


def _map_parts(states: PackedStates, function: Callable[[torch.Tensor], torch.Tensor]) -> PackedStates:
    scale, zero = states.scale, states.zero
    packed = function(states.packed)  # in this order
    scale = None if scale is None else function(scale)
    return replace(states, packed=packed, scale=scale, zero=None if zero is None else function(zero))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
