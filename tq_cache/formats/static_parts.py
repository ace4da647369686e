"""A preallocated layer as flat tensors at fixed addresses.

    tokens    | packed: the oldest, whole blocks   | ring: the newest, in the model's dtype               |
    where     | the first `packed_tokens(total)`   | token i in slot i % (residual_length + BLOCK_TOKENS)  |

How many tokens are packed follows from how many there are, so one count, `total`, says it all and can stay on the
device.  A block is packed when the token comes for which the ring of `residual_length` has no room.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from .packing import BLOCK_TOKENS
from .presets import Preset, Role, get_format
from .states import Calibration, KVView, PackedStates


def packed_tokens(total: int, residual_length: int) -> int:
    """How many of `total` tokens are packed."""
    return -(-max(total - residual_length, 0) // BLOCK_TOKENS) * BLOCK_TOKENS


@dataclass(frozen=True)
class StaticParts:
    """Keys and values of one layer at fixed addresses.

    spec:        `StaticSpec.text`
    held:        ring of keys, ring of values [B, H_kv, residual_length + BLOCK_TOKENS, D] in the model's dtype; packed
                 codes, scales and zeros of keys, then of values, those that the formats have
    calibration: center, smooth and scale of keys, then of values, those that the preset has
    total:       int64 [], tokens held
    """

    spec: str
    held: list[torch.Tensor]
    calibration: list[torch.Tensor]
    total: torch.Tensor

    @property
    def ring(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.held[0], self.held[1]

    def states(self) -> tuple[PackedStates, PackedStates]:
        """The packed keys and values; the tensors are shared."""
        preset = StaticSpec.parse(self.spec).preset
        held, calibration = iter(self.held[2:]), iter(self.calibration)
        roles: tuple[Role, Role] = ("key", "value")
        key, value = (
            PackedStates(
                role,
                fmt,
                ring.shape[3],
                next(held),
                None if fmt.scale == "per_head" else next(held),
                next(held) if fmt.has_zero else None,
                Calibration(
                    next(calibration) if preset.center else None,
                    next(calibration) if preset.smooth and role == "key" else None,
                    next(calibration) if fmt.scale == "per_head" else None,
                ),
            )
            for role, fmt, ring in zip(roles, (preset.key, preset.value), self.ring, strict=True)
        )
        return key, value

    def view(self) -> KVView:
        """The same tokens as any other cache has them; waits for the device."""
        spec, total = StaticSpec.parse(self.spec), int(self.total)
        packed = packed_tokens(total, spec.residual_length)
        size = self.held[0].shape[2]
        first, last = packed % size, packed % size + total - packed
        slots: slice | torch.Tensor = slice(first, last)
        if last > size:
            slots = torch.arange(packed, total, device=self.held[0].device) % size
        key, value = self.states() if packed else (None, None)
        return KVView(self.held[0][:, :, slots], self.held[1][:, :, slots], packed, key, value, backend=spec.backend)


@dataclass(frozen=True)
class StaticSpec:
    """What does not change over the life of a layer."""

    preset: Preset
    residual_length: int
    max_length: int
    backend: str

    @property
    def text(self) -> str:
        """As the operations take it, who know no classes."""
        preset = self.preset
        formats = f"{preset.key.name} {preset.value.name} {int(preset.center)} {preset.smooth}"
        return f"{formats} {self.residual_length} {self.max_length} {self.backend}"

    @staticmethod
    @lru_cache
    def parse(text: str) -> "StaticSpec":
        key, value, center, smooth, residual, length, backend = text.split()
        preset = Preset(text, get_format("key", key), get_format("value", value), center == "1", float(smooth))
        return StaticSpec(preset, int(residual), int(length), backend)
