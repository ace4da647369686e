"""What every kernel takes: the packed keys, or values, of one layer, as plain tensors and numbers."""

from functools import lru_cache
from typing import NamedTuple

import torch

BLOCK_TOKENS = 64
E4M3, E5M2 = (0, 0), (5, 0)  # in place of a table, for codes of 8 bits

# How the stored factor follows from a vector (`tq_cache.presets.Format.scale`).
PER_HEAD, NORM, UNBIASED, LEAST_SQUARES, MIN_MAX = range(5)


class Coding(NamedTuple):
    """How vectors are coded.

    bits:       8, 4, 3 or 2
    rule:       PER_HEAD (float8), NORM, UNBIASED, LEAST_SQUARES (rotated) or MIN_MAX (not rotated, with a zero)
    magnitudes: half of the symmetric codebook, ascending, exact in e4m3; empty for float8
    unit:       what makes the codebook fit data of variance 1
    exponent:   exponent bits of the float8 format: 4 (e4m3) or 5 (e5m2)
    """

    bits: int
    rule: int
    magnitudes: tuple[float, ...] = ()
    unit: float = 1.0
    exponent: int = 4

    @property
    def rotated(self) -> bool:
        return self.rule in (NORM, UNBIASED, LEAST_SQUARES)

    @property
    def code(self) -> tuple[int, tuple[int, int]]:
        """(bits, the eight table bytes as two 32-bit words); (8, E4M3) or (8, E5M2) for float8."""
        if self.bits == 8:
            return 8, E5M2 if self.exponent == 5 else E4M3
        return self.bits, code_table(self.magnitudes)


class States(NamedTuple):
    """Packed keys, or values.

    packed:     uint8 [B, H_kv, blocks, 8 * D * bits], contiguous in the last two dimensions, bits as drawn in
                `tq_cache/packing.py`
    scale:      float16 [B, H_kv, blocks * 64], contiguous in the last dimension, or None (float8)
    zero:       float16, likewise (MIN_MAX), or None
    center:     float32 [B, H_kv, 1, D] contiguous, or None
    smooth:     float32 [B, H_kv, 1, D] contiguous (keys), or None
    head_scale: float32 [B, H_kv, 1, 1] contiguous (float8), or None
    rotation:   float32 [D, D] contiguous (rotated rules), or None: Hadamard matrices of the powers of two that add up
                to D, largest first, times a diagonal of signs; x @ rotation.T rotates row vectors
    """

    packed: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    center: torch.Tensor | None
    smooth: torch.Tensor | None
    head_scale: torch.Tensor | None
    rotation: torch.Tensor | None
    coding: Coding

    @property
    def head_dim(self) -> int:
        return self.packed.shape[3] // (8 * self.coding.bits)

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return self.packed.shape[2] * BLOCK_TOKENS

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        """(scale,) or (scale, zero) as kernels read them: float16 per token, or float32 [B, H_kv, 1, 1] for float8."""
        scale = self.head_scale if self.scale is None else self.scale
        assert scale is not None
        return (scale,) if self.zero is None else (scale, self.zero)

    @property
    def layout(self) -> "Layout":
        """All that `check` looks at."""
        packed, absent = self.packed, tuple(x is None for x in self[1:7])
        return Layout(packed.shape, packed.stride(), absent, self.coding.bits, self.coding.rule)

    def check(self, tokens: int) -> None:
        """Raise ValueError unless the tensors fit each other and have room for `tokens`."""
        self.layout.check(tokens)


class Layout(NamedTuple):
    """Shape and strides of packed bytes, which of the other tensors are None, and how they are coded."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    absent: tuple[bool, ...]
    bits: int
    rule: int

    @property
    def head_dim(self) -> int:
        return self.shape[3] // (8 * self.bits)

    def check(self, tokens: int) -> None:
        """See `States.check`."""
        blocks, size = self.shape[2:]
        if self.head_dim % 16 or size != 8 * self.head_dim * self.bits or self.strides[2:] != (size, 1):
            raise ValueError(
                f"expected blocks of 8 * D * {self.bits} bytes, D a multiple of 16, contiguous in the last two "
                f"dimensions, got {list(self.shape)} with strides {self.strides}"
            )
        if tokens > blocks * BLOCK_TOKENS:
            raise ValueError(f"expected room for {tokens} tokens, got {blocks} blocks of {BLOCK_TOKENS}")
        absent = dict(zip(States._fields[1:7], self.absent, strict=True))
        wanted = {
            "scale": self.rule != PER_HEAD,
            "zero": self.rule == MIN_MAX,
            "head_scale": self.rule == PER_HEAD,
            "rotation": self.rule in (NORM, UNBIASED, LEAST_SQUARES),
        }
        for name, needed in wanted.items():
            if needed == absent[name]:
                raise ValueError(f"expected {'a' if needed else 'no'} {name} with rule {self.rule}, got the opposite")


@lru_cache(maxsize=64)
def no_states(batch: int, kv_heads: int, head_dim: int, device: torch.device) -> States:
    """States without a token."""
    packed = torch.empty(batch, kv_heads, 0, 64 * head_dim, dtype=torch.uint8, device=device)
    scale = torch.ones(batch, kv_heads, 1, 1, device=device)
    return States(packed, None, None, None, None, scale, None, Coding(8, PER_HEAD))


@lru_cache
def code_table(magnitudes: tuple[float, ...]) -> tuple[int, int]:
    """The eight table bytes of a symmetric codebook whose magnitudes are exact in e4m3, as two 32-bit words.

    Eight magnitudes (4 bits) keep their sign apart; four or two (3 or 2 bits) are followed by their negatives.
    """
    values = magnitudes if len(magnitudes) == 8 else (*magnitudes, *(-m for m in magnitudes))
    codes = torch.tensor(values, dtype=torch.float8_e4m3fn).view(torch.uint8).tolist()
    codes += [0] * (8 - len(codes))
    return int.from_bytes(codes[:4], "little"), int.from_bytes(codes[4:], "little")
