"""The keys and values of one layer as plain tensors: what storage owns, attention reads and kernels take."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from .packing import BLOCK_TOKENS, packed_bytes
from .presets import Format, Role
from .rotation import is_packable


@dataclass(frozen=True)
class Calibration:
    """What is measured, or given, once, when a layer's first tokens are packed, and holds for all of them (float32).

    center: [B, H_kv, 1, D], subtracted from every vector, or None
    smooth: [B, H_kv, 1, D], divides every key (the query is multiplied by it), or None
    scale:  [B, H_kv, 1, 1], the factor of float8 formats (those with one per head), or None
    """

    center: torch.Tensor | None = None
    smooth: torch.Tensor | None = None
    scale: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class PackedStates:
    """The packed keys, or values, of one layer, with room for a whole number of blocks.

    packed: uint8 [B, H_kv, blocks, bytes of a block]; see `packing` for the bits.  Of the exact format, in the model's
            dtype, [B, H_kv, blocks, BLOCK_TOKENS * D], token after token
    scale:  float16 [B, H_kv, blocks * BLOCK_TOKENS], or None (exact, and float8 formats with one per head)
    zero:   float16, likewise, or None
    """

    role: Role
    format: Format
    head_dim: int
    packed: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    calibration: Calibration

    @classmethod
    def empty(
        cls, role: Role, fmt: Format, like: torch.Tensor, capacity: int, calibration: Calibration
    ) -> "PackedStates":
        """Unwritten states for `capacity` tokens (a multiple of BLOCK_TOKENS) beside `like` [B, H_kv, T, D]."""
        batch, heads, _, head_dim = like.shape
        size, dtype = BLOCK_TOKENS * head_dim, like.dtype
        if not fmt.exact:
            never = capacity == 0 and not is_packable(head_dim)  # of such vectors none is ever packed
            size, dtype = 0 if never else BLOCK_TOKENS * packed_bytes(head_dim, fmt.bits), torch.uint8

        def factors(wanted: bool) -> torch.Tensor | None:
            if not wanted:
                return None
            return torch.zeros(batch, heads, capacity, dtype=torch.float16, device=like.device)

        packed = torch.zeros(batch, heads, capacity // BLOCK_TOKENS, size, dtype=dtype, device=like.device)
        scaled = fmt.scale not in ("per_head", "exact")
        return cls(role, fmt, head_dim, packed, factors(scaled), factors(fmt.has_zero), calibration)

    @property
    def by_channel(self) -> bool:
        """Whether blocks are packed channel by channel (`packing`)."""
        return self.role == "value"

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return self.packed.shape[2] * BLOCK_TOKENS

    def tokens(self, start: int, end: int) -> "PackedStates":
        """A view of tokens start .. end; `start` must be the first token of a block, `end` is rounded up to one.

        The tokens behind `end` in its block are whatever was there."""
        blocks = slice(start // BLOCK_TOKENS, -(-end // BLOCK_TOKENS))
        span = slice(start, blocks.stop * BLOCK_TOKENS)
        return replace(
            self,
            packed=self.packed[:, :, blocks],
            scale=None if self.scale is None else self.scale[:, :, span],
            zero=None if self.zero is None else self.zero[:, :, span],
        )


@dataclass(frozen=True)
class KVView:
    """Keys and values of one layer at one moment, in order: sink tokens, packed tokens, tail.

    sink_keys, sink_values: the first tokens, [B, H_kv, n, D] in the model's dtype, or None
    key, value:             packed states, of which the first `packed_length` tokens count, or None
    tail_keys, tail_values: [B, H_kv, n, D], the newest tokens in the model's dtype, those of this update included
    backend:                who computes on it, see `backends`
    observe:                to be shown the queries [B, H_q, S, D] of the newest tokens and their mask before attention,
                            for which calibration waits, or (None, None) where they are not to be had; None: no need.
                            A third argument, [B, H_q, S', D] to [B, H_q, S', rank], makes queries of latents of some, a
                            fourth is the group of processes that have other heads' queries of the same latents
    bring:                  where key and value are in host memory: gives them on the device, to be read at once, see
                            `on_device`; None: they are there
    """

    tail_keys: torch.Tensor
    tail_values: torch.Tensor
    packed_length: int = 0
    key: PackedStates | None = None
    value: PackedStates | None = None
    sink_keys: torch.Tensor | None = None
    sink_values: torch.Tensor | None = None
    backend: str = "auto"
    observe: Callable[..., None] | None = None
    bring: Callable[[], tuple[PackedStates, PackedStates]] | None = None

    def on_device(self) -> "KVView":
        """The same, for what is launched before another view is asked for this: its packed tokens may then be gone."""
        if self.bring is None:
            return self
        key, value = self.bring()
        return replace(self, key=key, value=value, bring=None)

    @property
    def sink_length(self) -> int:
        return 0 if self.sink_keys is None else self.sink_keys.shape[2]

    @property
    def length(self) -> int:
        """Tokens in all."""
        return self.sink_length + self.packed_length + self.tail_keys.shape[2]

    @property
    def is_exact(self) -> bool:
        """Whether the tail is all there is."""
        return self.packed_length == 0 and self.sink_length == 0


def packed_length_of(num_tokens: int, residual_length: int, sink_tokens: int) -> int:
    """How many of `num_tokens` are packed: whole blocks of what is neither a sink nor one of the newest.

    tokens    | first sink_tokens | whole blocks of 64    | up to 63, not yet a block | newest residual_length |
    held as   | model's dtype     | packed: so many       | model's dtype             | model's dtype          |
    """
    return max(num_tokens - sink_tokens - residual_length, 0) // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass(frozen=True, eq=False)
class PreallocatedStates:
    """Keys and values of one layer at fixed addresses.

        tokens    | sinks: the first   | packed: whole blocks        | ring: all others, in the model's dtype |
        how many  | sink_tokens        | `packed_length_of`          | up to residual_length + 63             |
        where     | token i in place i | i - sink_tokens in place of | i - sink_tokens in slot                |
                  |                    | its number                  | (i - sink_tokens) % ring_slots         |

    How many tokens are packed follows from how many there are, so one count says it all and can stay on the device.  A
    block is packed in the step that brings the ring (residual_length + 64)th token: the newest residual_length stay.

    key, value:             packed states with room for all tokens that can be packed
    ring_keys, ring_values: [B, H_kv, residual_length + BLOCK_TOKENS, D]; no more slots than blocks of max_length have
    num_tokens:             int64 [], tokens held, at most max_length
    backend:                who computes on it, see `backends`
    sink_keys, sink_values: [B, H_kv, sink_tokens, D], or None where there are none
    """

    key: PackedStates
    value: PackedStates
    ring_keys: torch.Tensor
    ring_values: torch.Tensor
    num_tokens: torch.Tensor
    residual_length: int
    max_length: int
    backend: str
    sink_keys: torch.Tensor | None = None
    sink_values: torch.Tensor | None = None

    @property
    def ring_slots(self) -> int:
        return self.ring_keys.shape[2]

    @property
    def sink_tokens(self) -> int:
        """Room for so many."""
        return 0 if self.sink_keys is None else self.sink_keys.shape[2]

    def packed_length(self, num_tokens: int) -> int:
        """How many of so many tokens are packed here."""
        return packed_length_of(num_tokens, self.residual_length, self.sink_tokens)

    def view(self, length: int | None = None) -> KVView:
        """The same tokens as any other layer has them; waits for the device, unless told how many there are."""
        length = int(self.num_tokens) if length is None else length
        packed, sinks = self.packed_length(length), min(length, self.sink_tokens)
        end = length - sinks
        first = packed % self.ring_slots
        last = first + end - packed
        slots: slice | torch.Tensor = slice(first, last)
        if last > self.ring_slots:
            slots = torch.arange(packed, end, device=self.ring_keys.device) % self.ring_slots
        key, value = (self.key, self.value) if packed else (None, None)
        sink_keys, sink_values = (
            None if x is None or not sinks else x[:, :, :sinks] for x in (self.sink_keys, self.sink_values)
        )
        tail = self.ring_keys[:, :, slots], self.ring_values[:, :, slots]
        return KVView(*tail, packed, key, value, sink_keys, sink_values, self.backend)


# Any of the classes above that hold tensors, themselves or in parts.
States = TypeVar("States", bound="Calibration | PackedStates | KVView | PreallocatedStates")


def map_tensors(states: States, function: Callable[[torch.Tensor], torch.Tensor]) -> States:
    """A copy with `function` applied to every tensor of `states`, also inside the parts it holds."""
    changes: dict[str, Any] = {}
    for field in fields(states):
        value = getattr(states, field.name)
        if isinstance(value, torch.Tensor):
            changes[field.name] = function(value)
        elif isinstance(value, (Calibration, PackedStates)):
            changes[field.name] = map_tensors(value, function)
    return replace(states, **changes)


def tensors(states: "Calibration | PackedStates | KVView | PreallocatedStates") -> Iterator[torch.Tensor]:
    """Every tensor of `states`, also inside the parts it holds."""
    for field in fields(states):
        value = getattr(states, field.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (Calibration, PackedStates)):
            yield from tensors(value)
