"""One layer's keys and values: sinks, packed blocks and the newest tokens, with every operation a cache needs.

    order of tokens   | sinks         | packed                                | tail                 |
    held in           | model's dtype | codes in blocks, scales               | model's dtype        |
    how many          | sink_tokens   | the rest, packed once, never again    | up to residual_length|

Memory grows by an eighth at a time, at most 8,192 tokens; the tail is a buffer that is written in place.  With a
residual_length of at least a block, whole blocks are packed at a time.  Operations other than `append` move bits: no
token is ever quantised twice.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from types import ModuleType

import torch

from .. import backends
from ..backends.quantizers import measures
from ..formats.packing import BLOCK_TOKENS
from ..formats.presets import Format, Preset, Role
from ..formats.rotation import check_head_dim
from ..formats.states import Calibration, KVView, PackedStates, map_tensors, tensors

# A residual_length with which nothing is ever packed.
UNLIMITED = 2**62


def round_up(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


class LayerStorage:
    """Keys and values of one layer.

    preset:          formats, centring, smoothing
    residual_length: up to so many newest tokens stay in the model's dtype; 0 packs all at once
    sink_tokens:     so many first tokens stay in the model's dtype
    backend:         see `backends`
    given_scales:    float8 scales that are not measured, by role, [1] or [H_kv]
    """

    def __init__(
        self,
        preset: Preset,
        residual_length: int,
        sink_tokens: int,
        backend: str,
        given_scales: Mapping[Role, torch.Tensor] | None = None,
    ) -> None:
        self.preset = preset
        self.given_scales = dict(given_scales or {})
        self.residual_length = residual_length
        self.sink_tokens = sink_tokens
        self.backend = backend
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

    # ------------------------------------------------------------------------------------------------- reading

    @property
    def length(self) -> int:
        """Tokens held."""
        sinks = 0 if self.sink_keys is None else self.sink_keys.shape[2]
        return sinks + self.packed_length + self.tail_length

    @property
    def batch_size(self) -> int | None:
        """Sequences held, None before the first token."""
        return None if self.tail_keys is None else self.tail_keys.shape[0]

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the newest tokens, None before the first token."""
        return None if self.tail_keys is None else self.tail_keys.dtype

    @property
    def elements(self) -> int:
        """Elements of all keys and values held."""
        if self.tail_keys is None or self.tail_values is None:
            return 0
        batch, heads, _, key_dim = self.tail_keys.shape
        return batch * heads * self.length * (key_dim + self.tail_values.shape[3])

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor held, room for coming tokens included."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def view(self) -> KVView:
        """Everything held, as it is now; raises ValueError on an empty storage."""
        if self.tail_keys is None or self.tail_values is None:
            raise ValueError("expected a storage with tokens, got an empty one; append first")
        return self._view(self.tail_keys[:, :, : self.tail_length], self.tail_values[:, :, : self.tail_length])

    def _view(self, keys: torch.Tensor, values: torch.Tensor) -> KVView:
        packed = self.packed_length > 0
        return KVView(
            keys,
            values,
            self.packed_length,
            self.key if packed else None,
            self.value if packed else None,
            self.sink_keys,
            self.sink_values,
            self.backend,
        )

    def _tensors(self) -> list[torch.Tensor]:
        exact = (self.sink_keys, self.sink_values, self.tail_keys, self.tail_values)
        packed = [tensor for states in (self.key, self.value) if states is not None for tensor in tensors(states)]
        return [tensor for tensor in exact if tensor is not None] + packed

    # ------------------------------------------------------------------------------------------------- writing

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> KVView:
        """Add tokens, [B, H_kv, T, D] each, and return what attention over them should read.

        In that view the new tokens and the tail before them are still exact, also those that get packed here.
        Raises ValueError, before anything changes, when the shapes do not fit each other or what is held.
        """
        held = None if self.tail_keys is None or self.tail_values is None else (self.tail_keys, self.tail_values)
        check_states(keys, values, held)
        if held is None and self.residual_length < UNLIMITED:
            check_packable(keys, values, self.given_scales)
        end = self.tail_length + keys.shape[2]
        if held is not None and end <= self._most_kept:  # most steps: the new tokens go behind the tail, that is all
            self._make_room(end)
            tail = self._with_tail(keys, values)
            self.tail_length = end
            return self._view(*tail)
        # Buffers outlive an inference_mode block, in which plain tensors could not be written again outside it.
        with torch.inference_mode(False), torch.no_grad():
            view = self._view(*self._with_tail(keys, values))
            self._settle(view.keys.detach(), view.values.detach())
        return view

    @property
    def _most_kept(self) -> int:
        """Tokens that a tail may hold before some are packed."""
        return self.residual_length + (self.sink_tokens if self.sink_keys is None else 0)

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
            run = backends.implementation(self.backend, keys, values)
            run.append(keys, values, self.tail_keys, self.tail_values, start)
            return self.tail_keys.narrow(2, 0, end), self.tail_values.narrow(2, 0, end)
        if start == 0:
            return keys, values
        held_keys, held_values = self.tail_keys[:, :, :start], self.tail_values[:, :, :start]
        return torch.cat([held_keys, keys], dim=2), torch.cat([held_values, values], dim=2)

    def _settle(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Pack what is too much of a tail, keep the rest as the new one."""
        waiting = self.sink_tokens if self.sink_keys is None else 0
        surplus = keys.shape[2] - self._most_kept
        count = 0
        if surplus > 0:
            # Whole blocks where there are enough tokens, so that blocks fill once and stay aligned.
            end = min(round_up(self.packed_length + surplus), self.packed_length + keys.shape[2] - waiting)
            count = end - self.packed_length
            if waiting:
                self.sink_keys, self.sink_values = keys[:, :, :waiting].clone(), values[:, :, :waiting].clone()
            keys, values = keys[:, :, waiting:], values[:, :, waiting:]
            self._pack(keys, values, count)
        # New buffers, since a view of the old ones may still be read.
        self.tail_length = keys.shape[2] - count
        self.tail_keys, self.tail_values = (self._buffer(x[:, :, count:], x.shape[2] - count) for x in (keys, values))

    def _buffer(self, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """A copy of a tail with room for `tokens` and, up to what a tail ever holds, for coming ones."""
        most = self.residual_length + self.sink_tokens + 1
        more = 0 if self.tail_keys is None else growth(tokens)
        room = min(most, round_up(tokens + 1 + more))
        buffer = x.new_zeros(*x.shape[:2], room, x.shape[3])
        buffer[:, :, : x.shape[2]] = x
        return buffer

    def _pack(self, keys: torch.Tensor, values: torch.Tensor, count: int) -> None:
        """Store the first `count` tokens behind the packed ones; the first time, all of them are calibrated on."""
        run = backends.implementation(self.backend, keys, values)
        if self.packed_length == 0:
            key, value = calibrate_pair(run, self.preset, keys, values, self.given_scales)
            self.key = self._empty("key", keys, count, key)
            self.value = self._empty("value", values, count, value)
        assert self.key is not None and self.value is not None
        end = self.packed_length + count
        if end > self.key.capacity:
            capacity = round_up(max(end, self.key.capacity + growth(self.key.capacity)))
            self.key, self.value = _grown(self.key, capacity), _grown(self.value, capacity)
        run.store_pair(self.key, self.value, keys[:, :, :count], values[:, :, :count], self.packed_length)
        self.packed_length = end

    def _empty(self, role: Role, like: torch.Tensor, count: int, calibration: Calibration) -> PackedStates:
        fmt = self.preset.key if role == "key" else self.preset.value
        return PackedStates.empty(role, fmt, like, round_up(count), calibration)

    # -------------------------------------------------------------------------------------------- whole tokens

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens.  Raises ValueError unless there are so many."""
        if not 0 <= length <= self.length:
            raise ValueError(f"expected to keep 0 to {self.length} tokens, got {length}")
        if length == 0:
            self.clear()
            return
        removed = self.length - length
        from_tail = min(removed, self.tail_length)
        from_packed = min(removed - from_tail, self.packed_length)
        from_sinks = removed - from_tail - from_packed
        self.tail_length -= from_tail
        self.packed_length -= from_packed
        if from_sinks and self.sink_keys is not None and self.sink_values is not None:
            self.sink_keys, self.sink_values = self.sink_keys[:, :, :-from_sinks], self.sink_values[:, :, :-from_sinks]

    # --------------------------------------------------------------------------------------- whole sequences

    def select(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices` (int64, may repeat; or bool) in that order."""
        self._map(lambda tensor: tensor[indices.to(tensor.device)])

    def repeat(self, repeats: int) -> None:
        """Every sequence `repeats` times, one behind the other."""
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def to(self, device: torch.device | str) -> None:
        """Move everything; does not wait for the copies."""
        self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
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


def not_padding(values: torch.Tensor) -> torch.Tensor:
    """Which tokens calibration may count, bool [B, 1, T, 1]: all but a leading run of equal ones.

    A cache is not told where a batch is padded.  But padding on the left sees only padding and values carry no
    position, so padded tokens all have the same values; a run of two or more is left out, unless it is all there is.
    """
    first = values[:, :, :1]
    distance = torch.linalg.vector_norm(values - first, torch.inf, dim=(1, 3))
    tolerance = 0.02 * first.abs().amax(dim=(1, 3))
    run = (distance <= tolerance).cumprod(dim=1).bool()  # [B, T], true for the first token unless it is NaN
    padding = run & (run.sum(dim=1, keepdim=True) > 1) & ~run.all(dim=1, keepdim=True)
    return ~padding[:, None, :, None]


def check_packable(keys: torch.Tensor, values: torch.Tensor, given_scales: Mapping[Role, torch.Tensor]) -> None:
    """Raise ValueError unless keys and values [B, H_kv, T, D] have a head_dim and KV heads that can be packed."""
    check_head_dim(keys.shape[3])
    check_head_dim(values.shape[3])
    for role, scale in given_scales.items():
        if scale.numel() not in (1, keys.shape[1]):
            raise ValueError(
                f"expected a scale of {role}s with 1 or {keys.shape[1]} elements (KV heads), got {scale.numel()}"
            )


def check_states(keys: torch.Tensor, values: torch.Tensor, held: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """Raise ValueError unless new keys and values fit each other and those held."""
    olds = (None, None) if held is None else ((held[0].shape, held[0].dtype), (held[1].shape, held[1].dtype))
    _check_shapes((keys.shape, keys.dtype), (values.shape, values.dtype), *olds)


_Described = tuple[torch.Size, torch.dtype]


@lru_cache(maxsize=1024)  # every step of every layer asks the same
def _check_shapes(
    keys: _Described, values: _Described, held_keys: _Described | None, held_values: _Described | None
) -> None:
    if len(keys[0]) != 4 or len(values[0]) != 4 or keys[0][:3] != values[0][:3]:
        raise ValueError(
            "expected keys and values [batch, num_kv_heads, tokens, head_dim] that differ at most in head_dim, "
            f"got {list(keys[0])} and {list(values[0])}"
        )
    for held, new, name in ((held_keys, keys, "keys"), (held_values, values, "values")):
        if held is None:
            continue
        (old_shape, old_dtype), (shape, dtype) = held, new
        if (old_shape[:2], old_shape[3]) != (shape[:2], shape[3]):
            raise ValueError(
                f"expected {name} of batch {old_shape[0]}, {old_shape[1]} KV heads and head_dim {old_shape[3]}, "
                f"as this cache holds, got {list(shape)}; use a new cache, reset() or batch_select_indices()"
            )
        if old_dtype != dtype:
            raise ValueError(
                f"expected {name} in {old_dtype}, as this cache holds, got {dtype}; "
                "run every step in one dtype (autocast on for all, or for none), or reset() the cache"
            )


def calibrate_pair(
    run: ModuleType,
    preset: Preset,
    keys: torch.Tensor,
    values: torch.Tensor,
    given_scales: Mapping[Role, torch.Tensor],
) -> tuple[Calibration, Calibration]:
    """Calibration of keys and of values on the first tokens, [B, H_kv, T, D] each."""
    formats: tuple[tuple[Role, torch.Tensor, Format, float], ...] = (
        ("key", keys, preset.key, preset.smooth),
        ("value", values, preset.value, 0.0),
    )
    measured = any(measures(fmt, preset.center, smooth, given_scales.get(role)) for role, _, fmt, smooth in formats)
    counts = not_padding(values) if measured else None
    key, value = (
        run.calibrate(x, fmt, preset.center, smooth, counts, given_scales.get(role)) for role, x, fmt, smooth in formats
    )
    return key, value
