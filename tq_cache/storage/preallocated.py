"""One layer's keys and values in memory that is allocated once, at fixed addresses (drawn in `static_parts`)."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from .. import backends
from ..formats.packing import BLOCK_TOKENS
from ..formats.presets import Preset, Role
from ..formats.states import KVView, PackedStates, tensors
from ..formats.static_parts import StaticParts, StaticSpec, packed_tokens
from .growing import calibrate_pair, check_packable, check_states, round_up


class StaticStorage:
    """Room for `max_length` tokens, of which up to `residual_length` newest stay in the model's dtype.

    With a residual_length of max_length nothing is ever packed.  Chunks of any length are added by `append`, which
    waits for the device; single tokens by `compiled.update` on `parts`, which does not.  Calibration happens on the
    first chunk, since it must be done before a graph is captured.
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
        self.spec = StaticSpec(preset, residual_length, max_length, backend)
        self.given_scales = dict(given_scales or {})
        self.parts: StaticParts | None = None
        # The device counts tokens.  There are at most so many, unless a graph adds some, of which Python hears nothing.
        self._at_most: int | None = 0

    @property
    def length(self) -> int:
        """Tokens held; waits for the device."""
        return 0 if self.parts is None else int(self.parts.total)

    @property
    def batch_size(self) -> int | None:
        """Sequences held, None before the first token."""
        return None if self.parts is None else self.parts.held[0].shape[0]

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the newest tokens, None before the first token."""
        return None if self.parts is None else self.parts.held[0].dtype

    @property
    def elements(self) -> int:
        """Elements of all keys and values held; waits for the device."""
        if self.parts is None:
            return 0
        keys, values = self.parts.ring
        return keys.shape[0] * keys.shape[1] * self.length * (keys.shape[3] + values.shape[3])

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held, room for coming tokens included."""
        return 0 if self.parts is None else sum(t.nbytes for t in (*self.parts.held, *self.parts.calibration))

    def admit(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise ValueError, changing nothing, unless these tokens fit what is held, and there is room for them.

        In a graph the operations check shapes, and nobody asks for room: there a step without any writes nothing, and
        the next one outside raises.
        """
        if torch.compiler.is_compiling():
            self._at_most = None
            return
        check_states(keys, values, None if self.parts is None else self.parts.ring)
        if keys.is_cuda and torch.cuda.is_current_stream_capturing():
            self._at_most = None
            return
        count, most = keys.shape[2], self.spec.max_length
        if self._at_most is not None and self._at_most + count <= most:
            self._at_most += count
            return
        held = self.length
        if held + count > most:
            raise ValueError(
                f"expected at most max_cache_len = {most} tokens, got {held} held and {count} new; "
                "make the cache with a larger max_cache_len"
            )
        self._at_most = None if self._at_most is None else held + count

    def view(self) -> KVView:
        """Everything held, as it is now; raises ValueError on an empty storage.  Waits for the device."""
        if self.parts is None:
            raise ValueError("expected a storage with tokens, got an empty one; append first")
        return self.parts.view()

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> KVView:
        """Add tokens, [B, H_kv, T, D] each; see `LayerStorage.append`.

        Raises ValueError, before anything changes, also when there is no room.
        """
        self.admit(keys, values)
        if self.parts is None:
            check_packable(keys, values, self.given_scales)
        with torch.inference_mode(False), torch.no_grad():
            if self.parts is None:
                old = KVView(keys[:, :, :0], values[:, :, :0], backend=self.spec.backend)
            else:
                old = self.parts.view()  # waits for the device, once
            length, total = old.length, old.length + keys.shape[2]
            if length == 0:
                self._start(keys.detach(), values.detach())
            elif total <= self.spec.residual_length:  # nothing is packed or wraps: no copy of what is held
                return self._append_in_place(old, keys.detach(), values.detach(), total)
            else:
                keys, values = torch.cat([old.keys, keys], dim=2), torch.cat([old.values, values], dim=2)
            view = replace(old, keys=keys, values=values)
            self._settle(keys.detach(), values.detach(), old.packed_length, total)
        return view

    def _append_in_place(self, old: KVView, keys: torch.Tensor, values: torch.Tensor, total: int) -> KVView:
        assert self.parts is not None
        ring_keys, ring_values = self.parts.ring
        ring_keys[:, :, old.length : total] = keys
        ring_values[:, :, old.length : total] = values
        self.parts.total.fill_(total)
        return replace(old, keys=ring_keys[:, :, :total], values=ring_values[:, :, :total])

    def _settle(self, keys: torch.Tensor, values: torch.Tensor, packed: int, total: int) -> None:
        """Pack what is too much for the ring, write the rest there."""
        assert self.parts is not None
        count = packed_tokens(total, self.spec.residual_length) - packed
        if count:
            run, (key, value) = backends.implementation(self.spec.backend, keys, values), self.parts.states()
            run.store_pair(key, value, keys[:, :, :count], values[:, :, :count], packed)
        ring_keys, ring_values = self.parts.ring
        slots = torch.arange(packed + count, total, device=keys.device) % ring_keys.shape[2]
        ring_keys[:, :, slots] = keys[:, :, count:]
        ring_values[:, :, slots] = values[:, :, count:]
        self.parts.total.fill_(total)

    def _start(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Calibrate on the first chunk, and allocate where nothing is yet."""
        run = backends.implementation(self.spec.backend, keys, values)
        pair = calibrate_pair(run, self.spec.preset, keys, values, self.given_scales)
        calibration = [tensor for part in pair for tensor in tensors(part)]
        if self.parts is not None:
            for held, new in zip(self.parts.calibration, calibration, strict=True):
                held.copy_(new)
            return
        buffers = []
        for x in (keys, values):
            slots = min(self.spec.residual_length + BLOCK_TOKENS, round_up(self.spec.max_length))
            buffers.append(x.new_zeros(*x.shape[:2], slots, x.shape[3]))
        capacity = packed_tokens(self.spec.max_length, self.spec.residual_length)
        formats: dict[Role, torch.Tensor] = {"key": keys, "value": values}
        for (role, x), measured in zip(formats.items(), pair, strict=True):
            fmt = self.spec.preset.key if role == "key" else self.spec.preset.value
            states = PackedStates.empty(role, fmt, x, capacity, measured)
            buffers += [tensor for tensor in (states.packed, states.scale, states.zero) if tensor is not None]
        total = torch.zeros((), dtype=torch.int64, device=keys.device)
        self.parts = StaticParts(self.spec.text, buffers, [tensor.contiguous() for tensor in calibration], total)
        for tensor in (*buffers, *self.parts.calibration, total):
            torch._dynamo.mark_static_address(tensor)

    def clear(self) -> None:
        """Forget every token, and keep the memory."""
        if self.parts is not None:
            self.parts.total.zero_()
        self._at_most = None if self._at_most is None else 0

    def crop(self, length: int) -> None:
        """Raises NotImplementedError unless nothing, or everything, is removed."""
        if length == 0:
            self.clear()
        elif length != self.length:
            raise NotImplementedError("a preallocated cache cannot be cropped; leave max_cache_len out, or reset()")

    def select(self, indices: torch.Tensor) -> None:
        """The sequences `indices`, in that order; raises NotImplementedError unless they are as many as there are."""
        if self.parts is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            for tensor in (*self.parts.held, *self.parts.calibration):
                new = tensor[indices.to(tensor.device)]
                if new.shape != tensor.shape:
                    raise NotImplementedError(
                        f"expected as many sequences as a preallocated cache holds ({tensor.shape[0]}), "
                        f"got {new.shape[0]}; leave max_cache_len out"
                    )
                tensor.copy_(new)

    def repeat(self, repeats: int) -> None:
        """Raises NotImplementedError: there is no room for more sequences."""
        raise NotImplementedError("a preallocated cache cannot take more sequences; leave max_cache_len out")

    def to(self, device: torch.device | str) -> None:
        """Raises NotImplementedError: the addresses are fixed."""
        raise NotImplementedError("a preallocated cache cannot be moved; leave max_cache_len or offloading out")
