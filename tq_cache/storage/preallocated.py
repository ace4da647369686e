"""Storage that is allocated once, at fixed addresses (drawn in `formats.states.PreallocatedStates`)."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..backends.calibration import calibrate_pair
from ..formats.packing import BLOCK_TOKENS
from ..formats.presets import Preset, Role
from ..formats.states import KVView, PreallocatedStates, packed_length_of, tensors
from .base import LayerStorage, round_up
from .checks import check_room


class PreallocatedStorage(LayerStorage):
    """See `LayerStorage`; room for `max_length` tokens.

    With a residual_length of max_length nothing is ever packed.  Chunks of any length are added by `append`, which
    waits for the device; single tokens by the backend's `update_preallocated` on `states`, which does not, after
    `admit`.  Calibration happens on the first chunk, since it must be done before a graph is captured.
    """

    def __init__(
        self,
        preset: Preset,
        residual_length: int,
        max_length: int,
        backend: str,
        given_scales: Mapping[Role, torch.Tensor] | None = None,
    ) -> None:
        if residual_length < BLOCK_TOKENS or residual_length % BLOCK_TOKENS:
            raise ValueError(
                f"expected a residual_length that is a multiple of {BLOCK_TOKENS} with max_cache_len, "
                f"got {residual_length}"
            )
        super().__init__(preset, residual_length, 0, backend, given_scales)
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

    @property
    def waits(self) -> bool:
        """Whether tokens that are to be packed wait for their calibration."""
        return False

    def _pack_waiting(self) -> None:
        pass

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
            if old.length == 0:
                self._start(keys.detach(), values.detach())
            elif length <= self.residual_length:  # nothing is packed or wraps: no copy of what is held
                return self._append_in_place(old, keys.detach(), values.detach(), length)
            else:
                keys, values = torch.cat([old.tail_keys, keys], dim=2), torch.cat([old.tail_values, values], dim=2)
            self._settle(keys.detach(), values.detach(), old.packed_length, length)
        return replace(old, tail_keys=keys, tail_values=values)

    def _append_in_place(self, old: KVView, keys: torch.Tensor, values: torch.Tensor, length: int) -> KVView:
        assert self.states is not None
        ring_keys, ring_values = self.states.ring_keys, self.states.ring_values
        ring_keys[:, :, old.length : length] = keys
        ring_values[:, :, old.length : length] = values
        self.states.num_tokens.fill_(length)
        return replace(old, tail_keys=ring_keys[:, :, :length], tail_values=ring_values[:, :, :length])

    def _settle(self, keys: torch.Tensor, values: torch.Tensor, packed: int, length: int) -> None:
        """Pack what is too much for the ring, write the rest there."""
        states = self.states
        assert states is not None
        count = packed_length_of(length, self.residual_length) - packed
        if count:
            oldest = keys[:, :, :count], values[:, :, :count]
            self._backend(keys, values).store_pair(states.key, states.value, *oldest, packed)
        slots = torch.arange(packed + count, length, device=keys.device) % states.ring_slots
        states.ring_keys[:, :, slots] = keys[:, :, count:]
        states.ring_values[:, :, slots] = values[:, :, count:]
        states.num_tokens.fill_(length)

    def _start(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Calibrate on the first chunk, and allocate where nothing is yet."""
        calibration = calibrate_pair(self.preset, keys, values, self.given_scales)
        if self.states is not None:
            for states, new in zip((self.states.key, self.states.value), calibration, strict=True):
                for held, tensor in zip(tensors(states.calibration), tensors(new), strict=True):
                    held.copy_(tensor)
            return
        slots = min(self.residual_length + BLOCK_TOKENS, round_up(self.max_length))
        ring_keys, ring_values = (x.new_zeros(*x.shape[:2], slots, x.shape[3]) for x in (keys, values))
        capacity = packed_length_of(self.max_length, self.residual_length)
        key, value = self._unwritten(keys, values, capacity, calibration)
        num_tokens = torch.zeros((), dtype=torch.int64, device=keys.device)
        self.states = PreallocatedStates(
            *(key, value, ring_keys, ring_values, num_tokens), self.residual_length, self.max_length, self.backend
        )
        for tensor in tensors(self.states):
            torch._dynamo.mark_static_address(tensor)

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
