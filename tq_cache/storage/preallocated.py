"""Storage that is allocated once, at fixed addresses (drawn in `formats.states.PreallocatedStates`)."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..backends.calibration import calibrate_pair
from ..formats.packing import BLOCK_TOKENS
from ..formats.presets import Preset, Role
from ..formats.states import Calibration, KVView, PreallocatedStates, packed_length_of, tensors
from .base import LayerStorage, round_up
from .checks import check_room
from .flat import parts


class PreallocatedStorage(LayerStorage):
    """See `LayerStorage`; room for `max_length` tokens.

    With a residual_length of max_length nothing is ever packed.  `append` adds chunks of any length and waits for the
    device; after `admit`, the backend's `update_preallocated` on `states` adds single tokens and does not.

    Nothing waits for its calibration, since the next step may be in a graph: what must be packed is packed by a
    provisional one, and again from the same tokens once attention shows its queries.  Calibrations are written in
    place, where a graph sees them, the last time before the first step that packs (`before_step`).
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
        super().__init__(preset, residual_length, sink_tokens, backend, given_scales)
        self.max_length = max_length
        self.states: PreallocatedStates | None = None
        # The length that an update brought which packed by a provisional calibration; None: nothing is packed so.
        self._provisional: int | None = None
        # A length up to which calibration saw what was packed, and how many steps at most came since.
        self._seen_length, self._steps = 0, 0
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

    def renew(self, keys: torch.Tensor, values: torch.Tensor) -> PreallocatedStates:
        """Where nothing is held: memory for such tokens, in place of that there is."""
        self.states = None  # freed before there is more
        with torch.inference_mode(False), torch.no_grad():
            return self._allocate(keys, values)

    @property
    def waits(self) -> bool:
        """Never."""
        return False

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

    def before_step(self) -> None:
        """A single token comes, maybe in a graph.  Calibrate on the ring if the step packs its oldest block and nobody
        did; may be called more than once a step.  Waits for the device where it may be so far, else not."""
        if torch.compiler.is_compiling():
            return
        states = self.states
        if self.first_tokens.done or states is None or not self.packs:
            return
        if states.ring_keys.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._steps += 1
        if states.packed_length(self._seen_length + self._steps) == states.packed_length(self._seen_length):
            return
        length = int(states.num_tokens)
        self._see(states, length)
        if states.packed_length(length + 1) > states.packed_length(length) and not self.first_tokens.done:
            with torch.inference_mode(False), torch.no_grad():
                self._calibrate(states, states.view(length))
        self._seen_length = length + 1  # with the one that comes

    def _see(self, states: PreallocatedStates, length: int) -> None:
        """So many tokens are held: what a graph packed unseen keeps the calibration that it met."""
        if states.packed_length(length) > states.packed_length(self._seen_length):
            self.first_tokens.accept()
        self._seen_length, self._steps = length, 0

    @property
    def packs(self) -> bool:
        """Whether tokens are ever packed here."""
        return packed_length_of(self.max_length, self.residual_length, self.sink_tokens) > 0

    def _calibrate(self, states: PreallocatedStates, view: KVView) -> None:
        """Calibrate to pack the oldest of what is exact in a view; by queries, if they are known or never come."""
        if self._provisional is not None:  # whose queries did not come
            self.first_tokens.accept()
            self._provisional = None
        if self.first_tokens.done:
            return
        if self.first_tokens.awaits:
            if not view.packed_length:
                self._measure(states, view, None)
            self._provisional = view.length
            return
        packs = states.packed_length(view.length) - view.packed_length
        self._measure(states, view, max(packs, BLOCK_TOKENS))

    def _measure(self, states: PreallocatedStates, view: KVView, packs: int | None) -> None:
        """Write a calibration by what is exact in a view, to pack its oldest `packs` tokens with; None: a passing one.

        Where tokens are packed, only that of sequences which begin.
        """
        keys, values = self._packable(states, view)
        held, first = (states.key.calibration, states.value.calibration), states.sink_tokens + view.packed_length
        if packs is None:
            _copy(held, self.first_tokens.provisional(keys, values, first))
        elif view.packed_length:
            self.first_tokens.calibrate(keys, values, first, packs, held, must=True)
        elif (new := self.first_tokens.calibrate(keys, values, first, packs, None, must=True)) is not None:
            _copy(held, new)

    def _packable(self, states: PreallocatedStates, view: KVView) -> tuple[torch.Tensor, torch.Tensor]:
        """What is exact in a view, without tokens that there is a place for among the sinks."""
        sinks = states.sink_tokens - view.sink_length
        return view.tail_keys[:, :, sinks:].detach(), view.tail_values[:, :, sinks:].detach()

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> KVView:
        with torch.inference_mode(False), torch.no_grad():
            states = self.states or self._allocate(keys, values)
            old = states.view()  # waits for the device, once
            length = old.length + keys.shape[2]
            self._see(states, old.length)
            self._seen_length = length
            has_sinks = 0 < old.length >= states.sink_tokens  # so that all that comes is of the tail
            if has_sinks and states.packed_length(length) == 0:  # nothing wraps: no copy of what is held
                self._settle(states, keys.detach(), values.detach(), old.length)
                return states.view(length)
            if old.tail_keys.shape[2]:
                keys, values = torch.cat([old.tail_keys, keys], dim=2), torch.cat([old.tail_values, values], dim=2)
            view = replace(old, tail_keys=keys, tail_values=values)
            if states.packed_length(length) > old.packed_length:
                self._calibrate(states, view)
            self._settle(states, keys.detach(), values.detach(), length - keys.shape[2])
        return view

    def _observed(self, view: KVView) -> None:
        """Pack again what a provisional calibration packed; where nothing is packed yet, keep one ready."""
        states = self.states
        if states is None or not self.packs:
            return
        if self._provisional == view.length:
            self._provisional = None
            count = states.packed_length(view.length) - view.packed_length
            self._measure(states, view, count)
            keys, values = (x[:, :, :count] for x in self._packable(states, view))
            self._backend(keys, values).store_pair(states.key, states.value, keys, values, view.packed_length)
        elif not states.packed_length(view.length) and view.length > states.sink_tokens:
            self._measure(states, view, None)

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

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> PreallocatedStates:
        """All memory, beside such keys and values, with a neutral calibration."""
        one_key, one_value = (x.new_zeros(*x.shape[:2], 1, x.shape[3]) for x in (keys, values))
        nothing = torch.zeros(keys.shape[0], 1, 1, 1, dtype=torch.bool, device=keys.device)
        calibration = calibrate_pair(self.preset, one_key, one_value, self.given_scales, nothing)

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

    # ------------------------------------------------------------------------------------- as it was elsewhere

    @property
    def calibration(self) -> tuple[Calibration, Calibration] | None:
        return None if self.states is None else (self.states.key.calibration, self.states.value.calibration)

    def adopt(self, view: KVView, calibration: tuple[Calibration, Calibration] | None) -> None:
        length, own = view.length, packed_length_of(view.length, self.residual_length, self.sink_tokens)
        check_room(0, length, self.max_length)
        if view.packed_length and (own < view.packed_length or view.sink_length != self.sink_tokens):
            raise ValueError(
                f"expected at most {own} of {length} tokens packed and {self.sink_tokens} sinks with max_cache_len, "
                f"got {view.packed_length} and {view.sink_length}; leave max_cache_len out, or load all tokens"
            )
        with torch.inference_mode(False), torch.no_grad():
            keys, values, end = view.tail_keys, view.tail_values, view.packed_length
            start = end + view.sink_length
            states, self._provisional = self._allocate(keys, values), None
            if calibration is not None and (view.packed_length or self.first_tokens.done):
                _copy((states.key.calibration, states.value.calibration), calibration)
            if view.key is not None and view.value is not None:
                sides = (states.key, states.value), (view.key, view.value)
                blocks = (parts((key.tokens(0, end), value.tokens(0, end))) for key, value in sides)
                for place, x in zip(*blocks, strict=True):
                    place.copy_(x)
            if view.sink_keys is not None and view.sink_values is not None:
                if view.packed_length and states.sink_keys is not None and states.sink_values is not None:
                    states.sink_keys.copy_(view.sink_keys)
                    states.sink_values.copy_(view.sink_values)
                else:  # fewer tokens than a block: sinks are the first of them again
                    keys, values = (
                        torch.cat(pair, dim=2) for pair in ((view.sink_keys, keys), (view.sink_values, values))
                    )
                    view, start = replace(view, sink_keys=None, sink_values=None), 0
            if own > view.packed_length:  # a growing storage waited for more tokens or queries
                self._calibrate(states, replace(view, tail_keys=keys, tail_values=values))
            self._settle(states, keys, values, start)
        self._seen_length, self._steps = length, 0
        self._admitted = self._announced = length

    # -------------------------------------------------------------------------------- whole tokens and sequences

    def clear(self) -> None:
        """Forget every token, and keep the memory."""
        if self.states is not None:
            self.states.num_tokens.zero_()
            self.states.key.packed[:, :, :2].zero_()  # kernels read latents by two blocks: no NaN beside the first one
        self._provisional, self._seen_length, self._steps = None, 0, 0
        self.first_tokens.clear()
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
        self.first_tokens.map(lambda tensor: tensor[indices.to(tensor.device)])
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


def _copy(held: tuple[Calibration, Calibration], new: tuple[Calibration, Calibration]) -> None:
    """In place, so that the addresses stay."""
    for old, fresh in zip(held, new, strict=True):
        for tensor, other in zip(tensors(old), tensors(fresh), strict=True):
            tensor.copy_(other)
