"""Storage that grows: sink tokens, packed blocks and the tail, in as much memory as they need.

    order of tokens   | sink tokens   | packed                                | tail                        |
    held in           | model's dtype | codes in blocks, scales               | model's dtype               |
    how many          | sink_tokens   | whole blocks, packed once             | residual_length, and those  |
                      |               |                                       | that do not fill a block    |

Until they are calibrated on (`first_tokens`), more tokens stay in the tail.  Memory grows by an eighth at a time, at
most 8,192 tokens; the tail is a buffer that is written in place.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..formats.packing import BLOCK_TOKENS
from ..formats.presets import Preset, Role
from ..formats.states import Calibration, KVView, PackedStates, map_tensors, tensors
from .base import LayerStorage, round_up

# A residual_length with which nothing is ever packed.
UNLIMITED = 2**62


class GrowingStorage(LayerStorage):
    """See `LayerStorage`.

    residual_length: with UNLIMITED nothing is ever packed
    """

    def __init__(
        self,
        preset: Preset,
        residual_length: int,
        sink_tokens: int,
        backend: str,
        given_scales: Mapping[Role, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(preset, residual_length, sink_tokens, backend, given_scales)
        self.clear()

    def clear(self) -> None:
        """Forget everything, also dtype, shapes and calibration."""
        self.key: PackedStates | None = None
        self.value: PackedStates | None = None
        self.sink_keys: torch.Tensor | None = None
        self.sink_values: torch.Tensor | None = None
        self.tail_keys: torch.Tensor | None = None  # buffers with room for more than tail_length tokens
        self.tail_values: torch.Tensor | None = None
        self.packed_length = 0
        self.tail_length = 0
        self._moved: torch.cuda.Event | None = None  # when the copies of `to` are made; None: nobody need wait
        self.first_tokens.clear()

    # ------------------------------------------------------------------------------------------------- reading

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._settled + self.tail_length

    @property
    def _settled(self) -> int:
        """Sink tokens and packed ones."""
        return self.packed_length + (0 if self.sink_keys is None else self.sink_keys.shape[2])

    @property
    def newest(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The buffers of the tail, [B, H_kv, room, D] each; None before the first token."""
        if self.tail_keys is None or self.tail_values is None:
            return None
        return self.tail_keys, self.tail_values

    @property
    def packs(self) -> bool:
        """Whether tokens are ever packed here."""
        return self.residual_length < UNLIMITED

    def view(self) -> KVView:
        """Everything held, as it is now; raises ValueError on an empty storage."""
        if self.tail_keys is None or self.tail_values is None:
            raise ValueError("expected a storage with tokens, got an empty one; append first")
        self._await_copies(self.tail_keys.device)
        return self._view(self.tail_keys[:, :, : self.tail_length], self.tail_values[:, :, : self.tail_length])

    def _view(self, tail_keys: torch.Tensor, tail_values: torch.Tensor) -> KVView:
        packed = self.packed_length > 0
        return KVView(
            tail_keys,
            tail_values,
            self.packed_length,
            self.key if packed else None,
            self.value if packed else None,
            self.sink_keys,
            self.sink_values,
            self.backend,
        )

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor held."""
        exact = (self.sink_keys, self.sink_values, self.tail_keys, self.tail_values)
        packed = [tensor for states in (self.key, self.value) if states is not None for tensor in tensors(states)]
        return [tensor for tensor in exact if tensor is not None] + packed

    # ------------------------------------------------------------------------------------------------- writing

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> KVView:
        self._await_copies(keys.device)
        end = self.tail_length + keys.shape[2]
        if self.tail_keys is not None and end <= self._most_exact:  # most steps: behind the tail, that is all
            self._make_room(end)
            tail = self._with_tail(keys, values)
            self.tail_length = end
            return self._view(*tail)
        # Buffers outlive an inference_mode block, in which plain tensors could not be written again outside it.
        with torch.inference_mode(False), torch.no_grad():
            view = self._view(*self._with_tail(keys, values))
            self._settle(view.tail_keys.detach(), view.tail_values.detach())
        return view

    @property
    def _most_exact(self) -> int:
        """Tokens that a tail holds before some are packed, unless they wait."""
        return self.residual_length + BLOCK_TOKENS - 1 + (self.sink_tokens if self.sink_keys is None else 0)

    @property
    def waits(self) -> bool:
        """Whether tokens that are to be packed wait for their calibration."""
        return self.tail_length > self._most_exact

    def _observed(self, view: KVView) -> None:
        if self.waits and self.tail_keys is not None and self.tail_values is not None:
            self._settle(self.tail_keys[:, :, : self.tail_length], self.tail_values[:, :, : self.tail_length])

    def _make_room(self, tokens: int) -> None:
        """Larger buffers, unless `tokens` fit into those there are.  Views of the old ones stay as they are."""
        if self.tail_keys is None or self.tail_values is None or tokens <= self.tail_keys.shape[2]:
            return
        with torch.inference_mode(False), torch.no_grad():
            self.tail_keys = self._buffer(self.tail_keys[:, :, : self.tail_length], tokens)
            self.tail_values = self._buffer(self.tail_values[:, :, : self.tail_length], tokens)

    def _with_tail(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tail with the new tokens behind it: in its buffer while there is room, else beside it."""
        start, end = self.tail_length, self.tail_length + keys.shape[2]
        if self.tail_keys is None or self.tail_values is None:
            return keys, values
        if end <= self.tail_keys.shape[2]:
            self._backend(keys, values).append(keys, values, self.tail_keys, self.tail_values, start)
            return self.tail_keys.narrow(2, 0, end), self.tail_values.narrow(2, 0, end)
        if start == 0:
            return keys, values
        held_keys, held_values = self.tail_keys[:, :, :start], self.tail_values[:, :, :start]
        return torch.cat([held_keys, keys], dim=2), torch.cat([held_values, values], dim=2)

    def _settle(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Pack the whole blocks that are too much of a tail, keep the rest as the new one."""
        sinks = self.sink_tokens if self.sink_keys is None else 0
        surplus = keys.shape[2] - sinks - self.residual_length
        count = (self.packed_length + surplus) // BLOCK_TOKENS * BLOCK_TOKENS - self.packed_length
        if count > 0 and self._calibrated_on(keys[:, :, sinks:], values[:, :, sinks:], self._settled + sinks, count):
            if sinks:
                self.sink_keys, self.sink_values = keys[:, :, :sinks].clone(), values[:, :, :sinks].clone()
            keys, values = keys[:, :, sinks:], values[:, :, sinks:]
            self._pack(keys[:, :, :count], values[:, :, :count])
        else:
            count = 0
        # New buffers, since a view of the old ones may still be read.
        self.tail_length = keys.shape[2] - count
        self.tail_keys, self.tail_values = (self._buffer(x[:, :, count:], x.shape[2] - count) for x in (keys, values))

    def _buffer(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """A copy of a tail with room for `tokens` and, up to what a tail ever holds, for coming ones."""
        most = self.residual_length + self.sink_tokens + BLOCK_TOKENS
        more = 0 if self.tail_keys is None else growth(tokens)
        room = max(tokens, min(most, round_up(tokens + 1 + more)))
        buffer = x.new_zeros(*x.shape[:2], room, x.shape[3])
        buffer[:, :, : x.shape[2]] = x
        return buffer

    def _calibrated_on(self, keys: torch.Tensor, values: torch.Tensor, first: int, packs: int) -> bool:
        """Whether of these exact tokens, `first` and later ones, so many can be packed; see `FirstTokens.calibrate`."""
        if self.first_tokens.done:
            return True
        held = None
        if self.key is not None and self.value is not None:
            held = self.key.calibration, self.value.calibration
        calibration = self.first_tokens.calibrate(keys, values, first, packs, held)
        if calibration is not None and held is None:
            self.key, self.value = self._unwritten(keys, values, 0, calibration)
        return calibration is not None

    def _pack(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store tokens behind the packed ones."""
        assert self.key is not None and self.value is not None
        end = self.packed_length + keys.shape[2]
        if end > self.key.capacity:
            capacity = round_up(max(end, self.key.capacity + growth(self.key.capacity)))
            self.key, self.value = _grown(self.key, capacity), _grown(self.value, capacity)
        self._backend(keys, values).store_pair(self.key, self.value, keys, values, self.packed_length)
        self.packed_length = end

    # ------------------------------------------------------------------------------------- as it was elsewhere

    @property
    def calibration(self) -> tuple[Calibration, Calibration] | None:
        return None if self.key is None or self.value is None else (self.key.calibration, self.value.calibration)

    def adopt(self, view: KVView, calibration: tuple[Calibration, Calibration] | None) -> None:
        with torch.inference_mode(False), torch.no_grad():
            sink_keys, sink_values, keys, values = view.sink_keys, view.sink_values, view.tail_keys, view.tail_values
            key, value = view.key, view.value
            if not view.packed_length and sink_keys is not None and sink_values is not None:
                keys, values = torch.cat([sink_keys, keys], dim=2), torch.cat([sink_values, values], dim=2)
                sink_keys = sink_values = None  # which they become with the first block
            if not view.packed_length and calibration is not None and self.first_tokens.done:
                key, value = self._unwritten(keys, values, 0, calibration)
            self.key, self.value, self.packed_length = key, value, view.packed_length
            self.sink_keys, self.sink_values = sink_keys, sink_values
            self.tail_keys = self.tail_values = None
            self.tail_length = keys.shape[2]
            self.tail_keys, self.tail_values = (self._buffer(x, x.shape[2]) for x in (keys, values))

    # -------------------------------------------------------------------------------------------- whole tokens

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens.  Raises ValueError unless there are so many."""
        if not 0 <= length <= self.length:
            raise ValueError(f"expected to keep 0 to {self.length} tokens, got {length}")
        if length == 0:
            self.clear()
            return
        if self.tail_keys is not None:
            self._await_copies(self.tail_keys.device)
        removed = self.length - length
        from_tail = min(removed, self.tail_length)
        from_packed = min(removed - from_tail, self.packed_length)
        from_sinks = removed - from_tail - from_packed
        self.tail_length -= from_tail
        self.packed_length -= from_packed
        if from_sinks and self.sink_keys is not None and self.sink_values is not None:
            # Into the tail, so that those that come complete them.
            keys, values = self.sink_keys[:, :, :-from_sinks], self.sink_values[:, :, :-from_sinks]
            self.sink_keys = self.sink_values = None
            with torch.inference_mode(False), torch.no_grad():
                self.tail_keys, self.tail_values = (self._buffer(x, x.shape[2]) for x in (keys, values))
            self.tail_length = keys.shape[2]

    # --------------------------------------------------------------------------------------- whole sequences

    def select(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices` (int64, may repeat; or bool) in that order."""
        self._map(lambda tensor: tensor[indices.to(tensor.device)])
        self.first_tokens.map(lambda tensor: tensor[indices.to(tensor.device)])

    def repeat(self, repeats: int) -> None:
        """Every sequence `repeats` times, one behind the other."""
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))
        self.first_tokens.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def to(self, device: torch.device | str) -> None:
        """Move everything by copies on the current stream, for which the host does not wait.

        Whatever uses the tokens next does, on whatever stream.
        """
        device = torch.device(device)
        if self.tail_keys is None or self.tail_keys.device == device:
            return
        on = self.tail_keys.device if device.type == "cpu" else device  # whose stream makes the copies
        self._await_copies(on)
        self._map(lambda tensor: tensor.to(device, non_blocking=True))
        if on.type == "cuda":
            self._moved = torch.cuda.current_stream(on).record_event()

    def _await_copies(self, device: torch.device) -> None:
        """Before tokens are used on a device, by its current stream: what `to` copies, on any stream, is there."""
        if self._moved is None:
            return
        moved, self._moved = self._moved, None
        if device.type != "cuda":
            moved.synchronize()
            return
        stream = torch.cuda.current_stream(device)
        stream.wait_event(moved)
        for tensor in self.tensors():
            if tensor.is_cuda:
                tensor.record_stream(stream)  # or its memory might be given away while it is read here

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which no event can be part of."""
        if self.tail_keys is not None:
            self._await_copies(self.tail_keys.device)
        return dict(self.__dict__)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.tail_keys is not None:
            self._await_copies(self.tail_keys.device)
        with torch.inference_mode(False), torch.no_grad():
            for name in ("sink_keys", "sink_values", "tail_keys", "tail_values"):
                tensor = getattr(self, name)
                setattr(self, name, None if tensor is None else function(tensor))
            self.key = None if self.key is None else map_tensors(self.key, function)
            self.value = None if self.value is None else map_tensors(self.value, function)


def growth(tokens: int) -> int:
    """By how many tokens memory for so many grows at least: an eighth, up to 8,192."""
    return min(tokens // 8, 8192)


def _grown(states: PackedStates, capacity: int) -> PackedStates:
    """The same states with room for `capacity` tokens."""

    def grow(tensor: torch.Tensor | None, size: int) -> torch.Tensor | None:
        if tensor is None:
            return None
        larger = tensor.new_zeros(*tensor.shape[:2], size, *tensor.shape[3:])
        larger[:, :, : tensor.shape[2]] = tensor
        return larger

    packed = grow(states.packed, capacity // BLOCK_TOKENS)
    assert packed is not None
    return replace(states, packed=packed, scale=grow(states.scale, capacity), zero=grow(states.zero, capacity))
