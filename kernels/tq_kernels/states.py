"""What every kernel takes: the packed keys, or values, of one layer, as plain tensors and numbers.

Kernels take NamedTuples, whose fields Triton keeps, nested ones too: `strides.key.scale.head`.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from .launch import Signature, aligned, check_devices, signatures

BLOCK_TOKENS = 64
E4M3, E5M2, INT8 = (0, 0), (5, 0), (1, 0)  # in place of a table, for codes of 8 bits

# How the stored factor follows from a vector (`tq_cache.formats.presets.Format.scale`).
PER_HEAD, NORM, UNBIASED, MIN_MAX, LARGEST, EXACT = range(6)


class Code(NamedTuple):
    """How codes become numbers: eight table bytes as two 32-bit words; of 8 bits no table, but E4M3, E5M2 or INT8."""

    bits: int
    table: tuple[int, int]


class PairSteps(NamedTuple):
    """Strides to the next sequence and to the next head."""

    batch: int
    head: int


class TokenSteps(NamedTuple):
    """Strides to the next sequence, head and token of vectors [B, H, T, D]."""

    batch: int
    head: int
    token: int


class PackedStrides(NamedTuple):
    """Of what `Packed` holds.  Attention steps through zeros as through scales, `States.check` sees to that."""

    packed: PairSteps
    scale: PairSteps
    zero: PairSteps | None = None


class Packed(NamedTuple):
    """Packed states as attention reads them: `scale` per token, or float32 [B, H_kv, 1, 1] (float8); zeros or None."""

    packed: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None


class Transform(NamedTuple):
    """From the model's vectors to those that are coded: (x - center) / smooth @ rotation.T, each of them or None."""

    rotation: torch.Tensor | None
    smooth: torch.Tensor | None
    center: torch.Tensor | None


class PackedKeys(NamedTuple):
    """Packed keys as attention reads them: `Packed` without a zero, and what brings queries to them."""

    transform: Transform
    packed: torch.Tensor
    scale: torch.Tensor


class Tensors(NamedTuple):
    """The tensors of `States`, as the kernels take them that write."""

    packed: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    center: torch.Tensor | None
    smooth: torch.Tensor | None
    head_scale: torch.Tensor | None
    rotation: torch.Tensor | None


class Coding(NamedTuple):
    """How vectors are coded.

    bits:       8, 4, 3 or 2; 16 of what is not coded, of any dtype
    rule:       PER_HEAD (float8), NORM, UNBIASED (both rotated), MIN_MAX (not rotated, with a zero), LARGEST (rotated,
                int8) or EXACT (not coded)
    magnitudes: half of the symmetric codebook, ascending, exact in e4m3; empty for 8 bits and 16
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
        return self.rule in (NORM, UNBIASED, LARGEST)

    def head_dim(self, block: int) -> int:
        """Of blocks of so many bytes, or elements where they are exact."""
        return block // BLOCK_TOKENS if self.exact else block // (8 * self.bits)

    @property
    def exact(self) -> bool:
        """Whether elements stay in the model's dtype."""
        return self.rule == EXACT

    @property
    def code(self) -> Code:
        """Of what is coded."""
        assert not self.exact
        if self.rule == LARGEST:
            return Code(8, INT8)
        if self.bits == 8:
            return Code(8, E5M2 if self.exponent == 5 else E4M3)
        return Code(self.bits, code_table(self.magnitudes))


class _States(NamedTuple):
    packed: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    center: torch.Tensor | None
    smooth: torch.Tensor | None
    head_scale: torch.Tensor | None
    rotation: torch.Tensor | None
    coding: Coding


class States(_States):
    """Packed keys, or values.

    packed:     uint8 [B, H_kv, blocks, 8 * D * bits], contiguous in the last two dimensions, bits as drawn in
                `tq_cache/formats/packing.py`; EXACT in the model's dtype, [B, H_kv, blocks, 64 * D], token after token
    scale:      float16 [B, H_kv, blocks * 64], contiguous in the last dimension, or None (float8, EXACT)
    zero:       float16, likewise (MIN_MAX), or None
    center:     float32 [B, H_kv, 1, D] contiguous, or None
    smooth:     float32 [B, H_kv, 1, D] contiguous (keys), or None
    head_scale: float32 [B, H_kv, 1, 1] contiguous (float8), or None
    rotation:   float32 [D, D] contiguous (rotated rules), or None: Hadamard matrices of the powers of two that add up
                to D, largest first, times a diagonal of signs; x @ rotation.T rotates row vectors
    """

    @property
    def head_dim(self) -> int:
        return self.coding.head_dim(self.packed.shape[3])

    @property
    def capacity(self) -> int:
        """Tokens there is room for."""
        return self.packed.shape[2] * BLOCK_TOKENS

    @cached_property
    def tensors(self) -> Tensors:
        return Tensors(*self[:7])

    @cached_property
    def read(self) -> Packed:
        """What attention reads of it, where it is coded."""
        scale = self.head_scale if self.scale is None else self.scale
        assert scale is not None
        return Packed(self.packed, scale, self.zero)

    @cached_property
    def transform(self) -> Transform:
        return Transform(self.rotation, self.smooth, self.center)

    @cached_property
    def read_as_keys(self) -> PackedKeys:
        return PackedKeys(self.transform, *self.read[:2])

    @cached_property
    def layout(self) -> "Layout":
        """All that a launch depends on but the addresses."""
        strides = tuple(None if x is None else x.stride() for x in self.tensors)
        factors, device = signatures(*self.tensors[1:]), self.packed.device
        return _layout(
            self.packed.shape, strides, aligned(*self.tensors), self.coding, self.packed.dtype, factors, device
        )

    def check(self, tokens: int) -> None:
        """Raise ValueError unless the tensors fit each other and have room for `tokens`."""
        self.layout.check(tokens)


@dataclass(frozen=True, eq=False)
class Layout:
    """Shape of packed bytes, of each of the tensors the strides and the alignment (None if there is none), the coding,
    the dtype of what is packed; all about the tensors but these bytes; the device (None where there is no token).

    Equal ones are one object, so that looking up what was worked out for one is cheap.
    """

    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...] | None, ...]
    aligned: tuple[bool | None, ...]
    coding: Coding
    dtype: torch.dtype = torch.uint8
    factors: tuple[Signature | None, ...] = ()
    device: torch.device | None = None

    @property
    def head_dim(self) -> int:
        return self.coding.head_dim(self.shape[3])

    @property
    def blocks(self) -> int:
        return self.shape[2]

    @property
    def smoothed(self) -> bool:
        return self.strides[4] is not None

    @property
    def stored_strides(self) -> PackedStrides:
        """Of packed bytes, scales and zeros, 0 where there are none."""
        return PackedStrides(*(PairSteps(*(0, 0) if x is None else x[:2]) for x in self.strides[:3]))

    @property
    def read_strides(self) -> PackedStrides:
        """Of `States.read`."""
        packed, scale, head_scale = self.strides[0], self.strides[1], self.strides[5]
        factor = head_scale if scale is None else scale
        assert packed is not None and factor is not None
        return PackedStrides(PairSteps(*packed[:2]), PairSteps(*factor[:2]))

    def check(self, tokens: int) -> None:
        """See `States.check`."""
        rule = self.coding.rule
        self._check_blocks()
        if tokens > self.blocks * BLOCK_TOKENS:
            raise ValueError(f"expected room for {tokens} tokens, got {self.blocks} blocks of {BLOCK_TOKENS}")
        given = dict(zip(Tensors._fields, self.strides, strict=True))
        wanted = {
            "scale": rule not in (PER_HEAD, EXACT),
            "zero": rule == MIN_MAX,
            "head_scale": rule == PER_HEAD,
            "rotation": self.coding.rotated,
        }
        for name, needed in wanted.items():
            if needed != (given[name] is not None):
                raise ValueError(f"expected {'a' if needed else 'no'} {name} with rule {rule}, got the opposite")
        self._check_factors(given["scale"], given["zero"])

    def _check_blocks(self) -> None:
        """EXACT ones may be empty: not every layer has rotary keys."""
        size, strides, bits = self.shape[3], self.strides[0], self.coding.bits
        assert strides is not None
        step = BLOCK_TOKENS if self.coding.exact else 8 * bits
        contiguous = strides[2:] == (size, 1) or (self.coding.exact and not size)
        if self.head_dim % 16 or size != step * self.head_dim or not contiguous:
            unit = "64 * D elements" if self.coding.exact else f"8 * D * {bits} bytes"
            raise ValueError(
                f"expected blocks of {unit}, D a multiple of 16, contiguous in the last two dimensions, "
                f"got {list(self.shape)} with strides {strides}"
            )
        if (self.dtype == torch.uint8) == self.coding.exact:
            raise ValueError(f"expected packed bytes in uint8, exact elements in another dtype, got {self.dtype}")

    def _check_factors(self, scale: tuple[int, ...] | None, zero: tuple[int, ...] | None) -> None:
        """Kernels step through scales and zeros alike, and through all else as it is contiguous."""
        check_devices(self, *self.factors)
        pair, dim = tuple(self.shape[:2]), self.head_dim
        tokens, vector = (*pair, self.blocks * BLOCK_TOKENS), (*pair, 1, dim)
        shapes = (tokens, tokens, vector, vector, (*pair, 1, 1), (dim, dim))
        for name, x, shape in zip(Tensors._fields[1:], self.factors, shapes, strict=bool(self.factors)):
            dtype = torch.float16 if shape is tokens else torch.float32
            if x is not None and not _is(x, shape, dtype, contiguous=shape is not tokens):
                raise ValueError(
                    f"expected {name} {list(shape)} in {dtype}, contiguous, "
                    f"got {list(x.shape)} in {x.dtype} with strides {x.strides}"
                )
        for factor in (scale, zero):
            if factor is not None and factor[2:] != (1,):
                raise ValueError(f"expected scale and zero contiguous in the last dimension, got strides {factor}")
        if scale is None or zero is None:
            return
        if any(size > 1 and a != b for size, a, b in zip(self.shape, scale[:2], zero[:2], strict=False)):
            raise ValueError(f"expected a zero with the strides of its scale, {scale}, got {zero}; copy it into such")


def _is(x: Signature, shape: tuple[int, ...], dtype: torch.dtype, contiguous: bool) -> bool:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    fits = all(size <= 1 or own == step for size, own, step in zip(shape, x.strides, reversed(steps), strict=False))
    return tuple(x.shape) == shape and x.dtype == dtype and (fits or not contiguous)


_layout = lru_cache(maxsize=256)(Layout)


def check_count(num_tokens: Signature) -> None:
    """Raise ValueError unless this is a number of tokens on the device."""
    if num_tokens.shape or num_tokens.dtype != torch.int64:
        raise ValueError(f"expected num_tokens [] in torch.int64, got {list(num_tokens.shape)} in {num_tokens.dtype}")


def check_ring(max_length: int | None, residual_length: int, num_sinks: int, capacity: int, slots: int) -> None:
    """Raise ValueError unless `max_length` tokens have room: sinks, `capacity` of packed ones, a ring of whole blocks.

    See `PreallocatedStates` in `tq_cache/formats/states.py`.  None: as many as there is room for.
    """
    others = 0 if max_length is None else max(max_length - num_sinks, 0)
    packed = max(others - residual_length, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    if slots % BLOCK_TOKENS or slots < min(residual_length + BLOCK_TOKENS, others) or packed > capacity:
        raise ValueError(
            f"expected room for {packed} packed tokens and a ring of whole blocks for {residual_length} and a block, "
            f"got {capacity} and {slots} slots, for max_length {max_length}"
        )


@lru_cache(maxsize=64)
def no_layout(batch: int, kv_heads: int, head_dim: int) -> Layout:
    """The layout of states without a token."""
    size, one, none = 64 * head_dim, (kv_heads, 1, 1, 1), (None,) * 4
    return Layout((batch, kv_heads, 0, size), ((0, 0, size, 1), *none, one, None), (None,) * 7, Coding(8, PER_HEAD))


@lru_cache
def code_table(magnitudes: tuple[float, ...]) -> tuple[int, int]:
    """The eight table bytes of a symmetric codebook whose magnitudes are exact in e4m3, as two 32-bit words.

    Eight magnitudes (4 bits) keep their sign apart; four or two (3 or 2 bits) are followed by their negatives.
    """
    values = magnitudes if len(magnitudes) == 8 else (*magnitudes, *(-m for m in magnitudes))
    codes = torch.tensor(values, dtype=torch.float8_e4m3fn).view(torch.uint8).tolist()
    codes += [0] * (8 - len(codes))
    return int.from_bytes(codes[:4], "little"), int.from_bytes(codes[4:], "little")
