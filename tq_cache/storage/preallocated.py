"""Storage that is allocated once, at fixed addresses (drawn in `formats.states.PreallocatedStates`)."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..formats.packing import BLOCK_TOKENS
from ..formats.presets import Preset, Role
from ..formats.states import KVView, PreallocatedStates, packed_length_of, tensors
from .base import LayerStorage, round_up
from .checks import check_room


class PreallocatedStorage(LayerStorage):
    """See `LayerStorage`; room for `max_length` tokens.

    The first `sink_tokens` stay in the model's dtype.  With a residual_length of max_length nothing is ever packed.
    Chunks of any length are added by `append`, which waits for the device; single tokens by the backend's
    `update_preallocated` on `states`, which does not, after `admit`.  Calibration happens on the first chunk, since it
    must be done before a graph is captured.
    """

    def __init__(
        self,
        preset: Preset,
        residual_length: int,
        sink_tokens: int,
        max_length: int,
        backend: str,
        given_scales: Mapping[Role, torch.Tensor] | None = None,
    ) -> None:
        if residual_length < 0 or residual_length % BLOCK_TOKENS:
            raise ValueError(
                f"expected a residual_length that is a multiple of {BLOCK_TOKENS}, or 0, with max_cache_len, "
                f"got {residual_length}"
            )
        super().__init__(preset, residual_length, backend, given_scales)
        self.sink_tokens = sink_tokens
        self.max_length = max_length
        self.states: PreallocatedStates | None = None
        # The device counts tokens; what Python knows of that count spares asking it.  At most so many are held by what
        # was admitted: None once a graph may have added some; and by what was announced: None where graphs announce.
        self._admitted: int | None = 0
        self._announced: int | None = 0

    @property
    def length(self) -> int:
        """Tokens held; waits for the device."""
        return 0 if self.states is None else int(self.states.num_tokens)

    @property
    def newest(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The ring, [B, H_kv, slots, D] each; None before the first token."""
        return None if self.states is None else (self.states.ring_keys, self.states.ring_values)

    def view(self) -> KVView:
        """Everything held, as it is now; raises ValueError on an empty storage.  Waits for the device."""
        if self.states is None:
            raise ValueError("expected a storage with tokens, got an empty one; append first")
        return self.states.view()

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor held."""
        return [] if self.states is None else list(tensors(self.states))

    # ------------------------------------------------------------------------------------------------- writing

    def admit(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise ValueError, changing nothing, unless these tokens fit what is held, and there is room for them.

        In a graph the operations check shapes, and nobody asks for room: there a step without any writes nothing, and
        the next one outside raises.
        """
        if torch.compiler.is_compiling():
            self._admitted = None
            return
        super().admit(keys, values)
        if keys.is_cuda and torch.cuda.is_current_stream_capturing():
            self._admitted = None
            return
        count = keys.shape[2]
        if self._admitted is None or self._admitted + count > self.max_length:
            held = self.length
            check_room(held, count, self.max_length)
            self._admitted = None if self._admitted is None else held
        if self._admitted is not None:
            self._admitted += count
        if self._announced is not None:
            self._announced += count

    def announce(self, count: int) -> None:
        """Raise ValueError unless there is room for `count` tokens that come next, maybe in a graph, which cannot."""
        if torch.compiler.is_compiling():
            self._announced = None
            return
        if self._announced is None or self._announced + count > self.max_length:
            held = self.length
            check_room(held, count, self.max_length)
            self._announced = None if self._announced is None else held
        if self._announced is not None:
            self._announced += count

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> KVView:
        with torch.inference_mode(False), torch.no_grad():
            if self.states is None:
                old = KVView(keys[:, :, :0], values[:, :, :0], backend=self.backend)
            else:
                old = self.states.view()  # waits for the device, once
            length = old.length + keys.shape[2]
            states = self.states if self.states is not None and old.length else self._start(keys, values)
            has_sinks = 0 < old.length >= states.sink_tokens  # so that all that comes is of the tail
            if has_sinks and states.packed_length(length) == 0:  # nothing wraps: no copy of what is held
                self._settle(states, keys.detach(), values.detach(), old.length)
                return states.view(length)
            if old.tail_keys.shape[2]:
                keys, values = torch.cat([old.tail_keys, keys], dim=2), torch.cat([old.tail_values, values], dim=2)
            self._settle(states, keys.detach(), values.detach(), length - keys.shape[2])
        return replace(old, tail_keys=keys, tail_values=values)

    def _settle(self, states: PreallocatedStates, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Tokens from `start` on, from which on none is packed, to their places; packs those too many for the ring."""
        length, sinks = start + keys.shape[2], states.sink_tokens
        waiting = max(min(length, sinks) - start, 0)  # tokens that there is a place for among the sinks
        if states.sink_keys is not None and states.sink_values is not None and waiting:
            states.sink_keys[:, :, start : start + waiting] = keys[:, :, :waiting]
            states.sink_values[:, :, start : start + waiting] = values[:, :, :waiting]
            keys, values = keys[:, :, waiting:], values[:, :, waiting:]
        first = max(start - sinks, 0)
        count = max(states.packed_length(length) - first, 0)
        if count:
            oldest = keys[:, :, :count], values[:, :, :count]
            self._backend(keys, values).store_pair(states.key, states.value, *oldest, first)
        slots = torch.arange(first + count, first + keys.shape[2], device=keys.device) % states.ring_slots
        states.ring_keys[:, :, slots] = keys[:, :, count:]
        states.ring_values[:, :, slots] = values[:, :, count:]
        states.num_tokens.fill_(length)

    def _start(self, keys: torch.Tensor, values: torch.Tensor) -> PreallocatedStates:
        """Calibrate on the first chunk, and allocate where nothing is yet."""
        keys, values = keys.detach(), values.detach()
        calibration = self._calibrate(keys, values)
        if self.states is not None:
            for states, new in zip((self.states.key, self.states.value), calibration, strict=True):
                for held, tensor in zip(tensors(states.calibration), tensors(new), strict=True):
                    held.copy_(tensor)
            return self.states

        def room(x: torch.Tensor, tokens: int) -> torch.Tensor:
            return x.new_zeros(*x.shape[:2], tokens, x.shape[3])

        most, sinks = max(self.max_length - self.sink_tokens, 1), self.sink_tokens  # most that are no sinks
        slots = min(self.residual_length + BLOCK_TOKENS, round_up(most))
        capacity = packed_length_of(self.max_length, self.residual_length, self.sink_tokens)
        key, value = self._unwritten(keys, values, capacity, calibration)
        num_tokens = torch.zeros((), dtype=torch.int64, device=keys.device)
        self.states = PreallocatedStates(
            *(key, value, room(keys, slots), room(values, slots), num_tokens),
            *(self.residual_length, self.max_length, self.backend),
            *(room(x, sinks) if sinks else None for x in (keys, values)),
        )
        for tensor in tensors(self.states):
            torch._dynamo.mark_static_address(tensor)
        return self.states

    # -------------------------------------------------------------------------------- whole tokens and sequences

    def clear(self) -> None:
        """Forget every token, and keep the memory."""
        if self.states is not None:
            self.states.num_tokens.zero_()
        self._admitted = None if self._admitted is None else 0
        self._announced = None if self._announced is None else 0

    def crop(self, length: int) -> None:
        """Raises NotImplementedError unless nothing, or everything, is removed."""
        if length == 0:
            self.clear()
        elif length != self.length:
            raise NotImplementedError("a preallocated cache cannot be cropped; leave max_cache_len out, or reset()")

    def select(self, indices: torch.Tensor) -> None:
        """The sequences `indices`, in that order; raises NotImplementedError unless they are as many as there are."""
        if self.states is None:
            return
        held = self.states.ring_keys.shape[0]
        wanted = int(indices.sum()) if indices.dtype == torch.bool else len(indices)
        if wanted != held:
            raise NotImplementedError(
                f"expected as many sequences as a preallocated cache holds ({held}), got {wanted}; "
                "leave max_cache_len out"
            )
        with torch.inference_mode(False), torch.no_grad():
            for tensor in self.tensors():
                if tensor is not self.states.num_tokens:
                    tensor.copy_(tensor[indices.to(tensor.device)])

    def repeat(self, repeats: int) -> None:
        """Raises NotImplementedError: there is no room for more sequences."""
        raise NotImplementedError("a preallocated cache cannot take more sequences; leave max_cache_len out")

    def to(self, device: torch.device | str) -> None:
        """Raises NotImplementedError: the addresses are fixed."""
        raise NotImplementedError("a preallocated cache cannot be moved; leave max_cache_len or offloading out")
