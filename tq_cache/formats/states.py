"""The packed parts of one layer as plain tensors: what storage owns, attention reads and kernels take."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from .packing import BLOCK_TOKENS, packed_bytes
from .presets import Format, Role

Parts = TypeVar("Parts", bound="Calibration | PackedStates | KVView")


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

    packed: uint8 [B, H_kv, blocks, bytes of a block]; see `packing` for the bits
    scale:  float16 [B, H_kv, blocks * BLOCK_TOKENS], or None (float8 formats with one per head)
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
        block_bytes = BLOCK_TOKENS * packed_bytes(head_dim, fmt.bits)

        def factors(wanted: bool) -> torch.Tensor | None:
            if not wanted:
                return None
            return torch.zeros(batch, heads, capacity, dtype=torch.float16, device=like.device)

        packed = torch.zeros(batch, heads, capacity // BLOCK_TOKENS, block_bytes, dtype=torch.uint8, device=like.device)
        return cls(role, fmt, head_dim, packed, factors(fmt.scale != "per_head"), factors(fmt.has_zero), calibration)

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
    """Keys and values of one layer at one moment, in order: sinks, packed tokens, newest tokens.

    sink_keys, sink_values: [B, H_kv, n, D] in the model's dtype, or None
    key, value:             packed states, of which the first `packed_length` tokens count, or None
    keys, values:           [B, H_kv, T, D], the newest tokens in the model's dtype, those of this update included
    backend:                who computes on it, see `backends`
    """

    keys: torch.Tensor
    values: torch.Tensor
    packed_length: int = 0
    key: PackedStates | None = None
    value: PackedStates | None = None
    sink_keys: torch.Tensor | None = None
    sink_values: torch.Tensor | None = None
    backend: str = "auto"

    @property
    def sink_length(self) -> int:
        return 0 if self.sink_keys is None else self.sink_keys.shape[2]

    @property
    def length(self) -> int:
        """Tokens in all."""
        return self.sink_length + self.packed_length + self.keys.shape[2]

    @property
    def is_exact(self) -> bool:
        """Whether the newest tokens, in the model's dtype, are all there is."""
        return self.packed_length == 0 and self.sink_length == 0


def map_tensors(parts: Parts, function: Callable[[torch.Tensor], torch.Tensor]) -> Parts:
    """A copy with `function` applied to every tensor of `parts`, also inside the parts it holds."""
    changes: dict[str, Any] = {}
    for field in fields(parts):
        value = getattr(parts, field.name)
        if isinstance(value, torch.Tensor):
            changes[field.name] = function(value)
        elif isinstance(value, (Calibration, PackedStates)):
            changes[field.name] = map_tensors(value, function)
    return replace(parts, **changes)


def tensors(parts: "Calibration | PackedStates | KVView") -> Iterator[torch.Tensor]:
    """Every tensor of `parts`, also inside the parts it holds."""
    for field in fields(parts):
        value = getattr(parts, field.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (Calibration, PackedStates)):
            yield from tensors(value)
