"""Quantise on update: rotate, scale, code, pack and store keys and values, in one launch, in place.

One program = one block of 64 tokens of one (sequence, KV head), keys or values by the last axis of the grid.

A vector of D channels is taken as chunks of 16.  The Hadamard matrix of a power of two is a Kronecker product, so one
16 x 16 dot rotates inside the chunks and butterflies between whole chunks do the rest.  The dot also leaves numbers
where packing wants them: the result is [16, chunks * 64 tokens] and, on an NVIDIA GPU, a thread holds two rows, all
chunks, and neighbouring tokens, so that sums over channels and most of the packing stay inside a thread.  What is not
rotated goes through the same dot with the identity.  Rows are ordered by `_channel`, tokens by `_token`, to that end.
"""

import os
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .primitives import BLOCK_TOKENS, parts

# How the stored factor follows from the vector (`tq_cache.presets.Format`).
PER_HEAD, NORM, UNBIASED, LEAST_SQUARES, MIN_MAX = range(5)
_NORM, _UNBIASED = tl.constexpr(NORM), tl.constexpr(UNBIASED)
_MIN_MAX, _PER_HEAD = tl.constexpr(MIN_MAX), tl.constexpr(PER_HEAD)


LOOP = 1
OPTIONS = {"num_warps": 4}


class Coding(NamedTuple):
    """How vectors of one role are coded: plain numbers only.

    bits:       8, 4, 3 or 2
    rule:       PER_HEAD (float8), NORM, UNBIASED, LEAST_SQUARES (rotated) or MIN_MAX (not rotated, with a zero)
    magnitudes: half of the symmetric codebook, ascending; for float8 empty
    unit:       what makes the codebook fit data of variance 1
    exponent:   exponent bits of the float8 format: 4 (e4m3) or 5 (e5m2)
    """

    bits: int
    rule: int
    magnitudes: tuple[float, ...] = ()
    unit: float = 1.0
    exponent: int = 4


class Side(NamedTuple):
    """Keys, or values, on their way into packed states.

    x:          [B, H_kv, T, D] bfloat16, float16 or float32, any strides but 1 in D; D a multiple of 16
    packed:     uint8 [B, H_kv, blocks, 8 * D * bits], contiguous in the last two dimensions
    scale:      float16 [B, H_kv, blocks * 64], or None (float8)
    zero:       float16, likewise (MIN_MAX), or None
    center:     float32 [B, H_kv, 1, D] contiguous, or None
    smooth:     float32 [B, H_kv, 1, D] contiguous, or None
    head_scale: float32 [B, H_kv, 1, 1] contiguous (float8), or None
    rotation:   [D, D] any float dtype, contiguous (rotated rules), or None: Hadamard matrices of the powers of two that
                add up to D, largest first, times a diagonal of signs; only the signs are read
    """

    x: torch.Tensor | None
    packed: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    center: torch.Tensor | None
    smooth: torch.Tensor | None
    head_scale: torch.Tensor | None
    rotation: torch.Tensor | None
    coding: Coding


# ------------------------------------------------------------------------------------------------ order, rotation


@triton.jit
def _token(n, BITS: tl.constexpr):
    """Token of a block that column `n` of the dot holds; bits of n: 0 and 5 lie in a thread, 1 and 2 across lanes."""
    if BITS == 3 or BITS == 2:
        return (n // 32 * 2 + n % 2) * 16 + n // 8 % 4 * 4 + n // 2 % 4
    else:
        return n


@triton.jit
def _channel(row):
    """Channel of a chunk that row 0..15 of the dot holds: rows r and r + 8, of one thread, are neighbours."""
    return row // 2 % 4 * 4 + row % 2 * 2 + row // 8


@triton.jit
def _mixer(ROTATED: tl.constexpr):
    """[16, 16]: the rows of a Hadamard matrix of +-1, or of the identity, in the order of `_channel`."""
    row, column = _channel(tl.arange(0, 16))[:, None], tl.arange(0, 16)[None, :]
    if ROTATED:
        odd = row & column
        odd ^= odd >> 2
        odd ^= odd >> 1
        return (1 - 2 * (odd & 1)).to(tl.float32)
    else:
        return (row == column).to(tl.float32)


@triton.constexpr_function
def _start(dim, bit):
    """First channel of the rotation's block of 2**bit channels: where the larger blocks end."""
    return (dim >> (bit + 1)) << (bit + 1)


@triton.jit
def _signs(rotation, channel, DIM: tl.constexpr):
    """Signs of the rotation's diagonal: the first row of each Hadamard block has no others."""
    first = tl.zeros_like(channel)
    for bit in tl.static_range(9, 3, -1):  # smaller blocks later
        if (DIM >> bit) & 1:
            first = tl.where(channel >= _start(DIM, bit), _start(DIM, bit), first)
    entry = tl.load(rotation + first * DIM + channel, mask=channel < DIM, other=0)
    return tl.where(entry < 0, -1.0, 1.0)


@triton.jit
def _mix(x, ROTATED: tl.constexpr, TERMS: tl.constexpr):
    """[16, 16] times x [16, N], float32.  TERMS: 0 in float32, 1 as x is, else the bfloat16 parts that x is split in."""
    mixer = _mixer(ROTATED)
    if TERMS == 0:
        return tl.dot(mixer, x.to(tl.float32), input_precision="ieee")
    elif TERMS == 1:
        return tl.dot(mixer.to(x.dtype), x)
    else:
        mixer = mixer.to(tl.bfloat16)
        out = tl.zeros(x.shape, tl.float32)
        for _ in tl.static_range(1, TERMS):  # cut off: a rounded term costs a slow conversion
            bits = x.to(tl.uint32, bitcast=True)
            out = tl.dot(mixer, (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), out)
            x -= (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
        return tl.dot(mixer, x.to(tl.bfloat16), out)


@triton.jit
def _butterfly(r, STAGE: tl.constexpr, DIM: tl.constexpr, CHUNKS: tl.constexpr):
    """Sums and differences of the chunks of r [16, CHUNKS * 64] that are 2**STAGE apart, within the rotation's blocks."""
    pairs = r.reshape(16, CHUNKS >> (STAGE + 1), 2, 64 << STAGE).permute(0, 1, 3, 2)
    low, high = tl.split(pairs)
    mixed = tl.join(low + high, low - high).permute(0, 1, 3, 2).reshape(16, CHUNKS * 64)
    MIXED: tl.constexpr = _start(DIM // 16, STAGE)  # chunks in blocks larger than 2**STAGE
    if MIXED == CHUNKS:
        return mixed
    else:
        return tl.where((tl.arange(0, CHUNKS * 64) // 64 < MIXED)[None, :], mixed, r)


@triton.jit
def _butterflies(r, DIM: tl.constexpr, CHUNKS: tl.constexpr):
    """The Hadamard matrices between the chunks of r [16, CHUNKS * 64]."""
    for stage in tl.static_range(0, 6):
        if DIM // 16 >> (stage + 1) > 0:
            r = _butterfly(r, stage, DIM, CHUNKS)
    if DIM & (DIM - 1):  # else one factor for all, which goes into the scale
        channel = tl.arange(0, CHUNKS * 64) // 64 * 16
        factor = tl.zeros((CHUNKS * 64,), tl.float32)
        for bit in tl.static_range(9, 3, -1):  # smaller blocks later
            if (DIM >> bit) & 1:
                factor = tl.where(channel >= _start(DIM, bit), 2.0 ** (-bit / 2), factor)
        r *= factor[None, :]
    return r


@triton.jit
def _flip(x, sign, PTX: tl.constexpr):
    """16-bit x [64, WIDTH] with the signs of `sign` [WIDTH] on its channels, two at a time."""
    if PTX:
        # Not pure, so that Triton does it where a thread has one channel, not 32; likewise below.
        mask = tl.inline_asm_elementwise(
            "shr.u32 $0, $1, 16; and.b32 $0, $0, 0x8000;", "=r,r", [sign], tl.int32, is_pure=False, pack=1
        )
        pairs = [x.to(tl.int16, bitcast=True), mask.to(tl.int16)[None, :] + tl.zeros(x.shape, tl.int16)]
        flipped = tl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", pairs, tl.int16, is_pure=True, pack=2)
        return flipped.to(x.dtype, bitcast=True)
    else:
        return (x.to(tl.float32) * sign[None, :]).to(x.dtype)


@triton.jit
def _signed_reciprocal(x, sign, PTX: tl.constexpr):
    """sign / x, to 2**-23, of sign +-1.  A division would take ten instructions."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; rcp.approx.ftz.f32 t, $1; mul.f32 $0, t, $2; }", "=f,f,f", [x, sign], tl.float32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return sign / x


@triton.jit
def _rows(
    side, strides, batch, head, token, valid,
    DIM: tl.constexpr, WIDTH: tl.constexpr, ROTATED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Vectors x [64, WIDTH] of the tokens; where they get rotated: centred, smoothed (both: float32) and signed."""
    x, _, _, _, center, smooth, _, rotation = side
    channel = tl.arange(0, WIDTH)
    base = x + batch * strides[0] + head * strides[1] + token.to(tl.int64)[:, None] * strides[2]
    rows = tl.load(base + channel[None, :], mask=valid[:, None] & (channel < DIM)[None, :], other=0)
    if ROTATED:
        pair = (batch * tl.num_programs(1) + head) * DIM
        factor = _signs(rotation, channel, DIM)
        if center is None and smooth is None and rows.dtype != tl.float32:
            rows = _flip(rows, factor, PTX)
        else:
            rows = rows.to(tl.float32)
            if center is not None:
                rows -= tl.load(center + pair + channel, mask=channel < DIM, other=0)[None, :]
            size = tl.full((WIDTH,), 1.0, tl.float32)
            if smooth is not None:
                size = tl.load(smooth + pair + channel, mask=channel < DIM, other=1)
            rows *= _signed_reciprocal(size, factor, PTX)[None, :]
    return rows


# ------------------------------------------------------------------------------------------------ codes and scale


@triton.constexpr_function
def _half2(x):
    """PTX literal of two float16 of value x."""
    size, exponent = abs(x), 15
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1 and exponent > 1:
        size, exponent = size * 2, exponent - 1
    bits = (exponent << 10) + round(size * 1024) - 1024 + (32768 if x < 0 else 0)
    return f"{bits * 65537:#010x}"


@triton.constexpr_function
def _grid(magnitudes):
    """Least power of two that makes the midpoints between the magnitudes integers."""
    grid = 1
    while any((magnitudes[k] + magnitudes[k + 1]) * grid % 2 for k in range(len(magnitudes) - 1)):
        grid *= 2
    return grid


@triton.constexpr_function
def _lines(y, x, last):
    """Slope and offset of lines through every two points; a point left over gets the slope `last`."""
    lines = []
    for j in range(0, len(x), 2):
        slope = (y[j + 1] - y[j]) / (x[j + 1] - x[j]) if j + 1 < len(x) else last
        lines.append((slope, y[j] - slope * x[j]))
    return lines


@triton.constexpr_function
def _nearest_ptx(magnitudes, shift, float8):
    """PTX: four sizes $5..$8 and factors $9..$12 to the indices of their nearest magnitudes, $0, and the values $1..$4.

    $0 holds the indices of sizes 0 and 2 at bits 0 and 16, those of 1 and 3 `shift` bits higher.  The midpoints between
    the magnitudes are multiples of 1 / grid.  size * factor, which includes grid, is rounded up to an
    integer, less one, which float16 holds exactly.  Because midpoints and magnitudes grow ever faster, the index is
    the least of the lines through every two midpoints, rounded, and the value the greatest of those through every two
    magnitudes; or, with `float8` conversions, the value is looked up by a byte-permute.
    """
    count, grid = len(magnitudes), _grid(magnitudes)
    middles = [(magnitudes[k] + magnitudes[k + 1]) / 2 * grid - 0.5 for k in range(count - 1)]
    lines = _lines([k + 0.5 for k in range(count - 1)], middles, 0.6 / (middles[-1] - middles[-2]))
    ptx = "{ .reg .b32 q, i0, i1, c0, c1, l, s, o; .reg .b16 x, y; .reg .f32 u, v; "
    for n in range(2):
        ptx += f"fma.rn.f32 u, ${5 + n}, ${9 + n}, 1023.5; fma.rn.f32 v, ${7 + n}, ${11 + n}, 1023.5; cvt.rn.f16x2.f32 q, v, u; "
        ptx += f"mov.b32 s, {_half2(-1024.0)}; add.rn.f16x2 q, q, s; mov.b32 i{n}, {_half2(count - 0.75)}; "
        for slope, offset in lines:
            ptx += f"mov.b32 s, {_half2(slope)}; mov.b32 o, {_half2(offset)}; "
            ptx += f"fma.rn.f16x2 l, q, s, o; min.f16x2 i{n}, i{n}, l; "
        # Adding 1536 rounds to integers, which are then the last bits.
        ptx += f"mov.b32 s, {_half2(1536.0)}; add.rn.f16x2 i{n}, i{n}, s; "
    ptx += f"and.b32 q, i0, 0x70007; shl.b32 l, i1, {shift}; and.b32 l, l, {0x70007 << shift:#x}; or.b32 $0, q, l; "
    ptx += _values_by_look_up(magnitudes, shift) if float8 else _values_by_lines(magnitudes)
    return ptx + "mov.b32 {x, y}, c0; cvt.f32.f16 $1, x; cvt.f32.f16 $3, y; " + (
        "mov.b32 {x, y}, c1; cvt.f32.f16 $2, x; cvt.f32.f16 $4, y; }"
    )


@triton.constexpr_function
def _values_by_lines(magnitudes):
    """PTX: i0 and i1, two indices each plus 1536, to c0 and c1, two values each."""
    ptx = ""
    for n in range(2):
        ptx += f"mov.b32 s, {_half2(-1536.0)}; add.rn.f16x2 q, i{n}, s; mov.b32 c{n}, 0; "
        for slope, offset in _lines(magnitudes, range(len(magnitudes)), 0.0):
            ptx += f"mov.b32 s, {_half2(slope)}; mov.b32 o, {_half2(offset)}; "
            ptx += f"fma.rn.f16x2 l, q, s, o; max.f16x2 c{n}, c{n}, l; "
    return ptx


@triton.constexpr_function
def _values_by_look_up(magnitudes, shift):
    """PTX: the indices q | l of `_nearest_ptx` to c0 and c1, the values of sizes 0 and 2, and of 1 and 3."""
    table = [0] * 8
    for k in range(len(magnitudes)):
        size, byte = magnitudes[k], 7 << 3  # e4m3: 2**(exponent - 7) * (1 + mantissa / 8)
        while size < 1:
            size, byte = size * 2, byte - 8
        while size >= 2:
            size, byte = size / 2, byte + 8
        table[k] = byte + int(size * 8) - 8
    low = sum(table[k] << (8 * k) for k in range(4))
    high = sum(table[k + 4] << (8 * k) for k in range(4))
    # Selectors in four nibbles: sizes 0, 2, 1, 3.
    ptx = f"shr.u32 o, q, 12; or.b32 q, q, o; shl.b32 l, l, {8 - shift}; shr.u32 o, l, 12; or.b32 l, l, o; or.b32 q, q, l; "
    ptx += f"mov.b32 s, {low:#x}; mov.b32 o, {high:#x}; prmt.b32 q, s, o, q; "
    return ptx + "mov.b32 {x, y}, q; cvt.rn.f16x2.e4m3x2 c0, x; cvt.rn.f16x2.e4m3x2 c1, y; "


@triton.jit
def _nearest4(a, f, MAGNITUDES: tl.constexpr, SHIFT: tl.constexpr, PTX: tl.constexpr):
    """Indices, as in `_nearest_ptx`, and values of the magnitudes nearest to four sizes a >= 0 times four factors f."""
    if PTX and len(MAGNITUDES) > 2:
        zero, grid = tl.zeros_like(a[0]), _grid(MAGNITUDES)
        inputs = [a[0], a[1], a[2], a[3], f[0] * grid + zero, f[1] * grid + zero, f[2] * grid + zero, f[3] * grid + zero]
        return tl.inline_asm_elementwise(
            _nearest_ptx(MAGNITUDES, SHIFT, PTX >= 89), "=r,=f,=f,=f,=f,f,f,f,f,f,f,f,f", inputs,
            (tl.int32, tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        index0, c0 = _nearest(a[0] * f[0], MAGNITUDES)
        index1, c1 = _nearest(a[1] * f[1], MAGNITUDES)
        index2, c2 = _nearest(a[2] * f[2], MAGNITUDES)
        index3, c3 = _nearest(a[3] * f[3], MAGNITUDES)
        return _fields(index0, index1, index2, index3, SHIFT), c0, c1, c2, c3


@triton.jit
def _nearest(size, MAGNITUDES: tl.constexpr):
    index = tl.zeros(size.shape, tl.int32)
    value = tl.full(size.shape, MAGNITUDES[0], tl.float32)
    for k in tl.static_range(1, len(MAGNITUDES)):
        above = size > (MAGNITUDES[k - 1] + MAGNITUDES[k]) / 2
        index = tl.where(above, k, index)
        value = tl.where(above, MAGNITUDES[k], value)
    return index, value


@triton.jit
def _half(x):
    """float16, the largest finite one beyond it, NaN where x is NaN or inf."""
    finite = tl.abs(x) < float("inf")
    return tl.where(finite, tl.clamp(x, -65504.0, 65504.0), float("nan")).to(tl.float16)


@triton.jit
def _divisor(x):
    return tl.where(x == 0, 1.0, x)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _float8(x, EXPONENT: tl.constexpr, NATIVE: tl.constexpr):
    """Byte, int32, of the nearest float8 e4m3 or e5m2: ties to even, saturating, NaN where x is NaN or inf."""
    LIMIT: tl.constexpr = 448.0 if EXPONENT == 4 else 57344.0
    if NATIVE:
        x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
        return x.to(tl.float8e4nv if EXPONENT == 4 else tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
    finite = tl.abs(x) < float("inf")
    bits = tl.clamp(tl.where(finite, x, 0.0), -LIMIT, LIMIT).to(tl.int32, bitcast=True)
    sign, size = (bits >> 24) & 128, bits & 0x7FFFFFFF
    # Subnormals are rounded by adding a number whose last bit is their step, the others as integers.
    ANCHOR: tl.constexpr = (2 - (1 << (EXPONENT - 1)) + EXPONENT - 7 + 23 + 127) << 23
    anchor = tl.full((), ANCHOR, tl.int32).to(tl.float32, bitcast=True)
    small = (size.to(tl.float32, bitcast=True) + anchor).to(tl.int32, bitcast=True) - ANCHOR
    SHIFT: tl.constexpr = 16 + EXPONENT  # mantissa bits that go
    REBIAS: tl.constexpr = (128 - (1 << (EXPONENT - 1))) << 23
    large = (size - REBIAS + (1 << (SHIFT - 1)) - 1 + ((size >> SHIFT) & 1)) >> SHIFT
    return tl.where(finite, tl.where(size < REBIAS + (1 << 23), small, large) | sign, 127)


# ---------------------------------------------------------------------------------------- four codes of one thread


@triton.jit
def _split4(x):
    """Four tensors of x [.., 2, 2]: the last dimension counts ones, the one before it twos."""
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _spread(x, VALUE: tl.constexpr):
    """x [64], one number per token, beside the tensors of `_fours`."""
    if VALUE:
        x0, x1, x2, x3 = _split4(x.reshape(2, 16, 2).permute(1, 0, 2))
        return x0[None, None, :], x1[None, None, :], x2[None, None, :], x3[None, None, :]
    else:
        x = x[None, None, :]
        return x, x, x, x


@triton.jit
def _per_token(x0, x1, x2, x3, VALUE: tl.constexpr):
    """Sums of the tensors of `_fours` over channels: [64]."""
    if VALUE:
        even = tl.join(tl.sum(tl.sum(x0, 1), 0), tl.sum(tl.sum(x2, 1), 0))
        odd = tl.join(tl.sum(tl.sum(x1, 1), 0), tl.sum(tl.sum(x3, 1), 0))
        return tl.join(even, odd).permute(1, 0, 2).reshape(64)
    else:
        return tl.sum(tl.sum(x0 + x1 + x2 + x3, 1), 0)


@triton.jit
def _fours(r, BITS: tl.constexpr, VALUE: tl.constexpr, CHUNKS: tl.constexpr):
    """r [16, CHUNKS * 64] as four tensors whose numbers share packed words; a thread holds all four.

    3 and 2 bits: the four parts of a row; 4 bits: codes 0 and 1 of a word's first half, then of its second.
    values: [16, CHUNKS, 16], keys: [8 (4 bits) or 16, CHUNKS / parts, 64].
    """
    if VALUE:
        return _split4(r.reshape(16, CHUNKS, 2, 16, 2).permute(0, 1, 3, 2, 4))
    elif BITS == 4:
        return _split4(r.reshape(2, 8, 2, CHUNKS // 2, 64).permute(1, 3, 4, 2, 0))
    else:
        return _split4(r.reshape(16, 2, 2, CHUNKS // 4, 64).permute(0, 3, 4, 1, 2))


@triton.jit
def _fields(x0, x1, x2, x3, SHIFT: tl.constexpr):
    """Four small integers in one: 0 and 2 at bits 0 and 16, 1 and 3 `SHIFT` higher."""
    return x0 | (x1 << SHIFT) | (x2 << 16) | (x3 << (16 + SHIFT))


@triton.jit
def _uniform(x, factor, offset, LEVELS: tl.constexpr, PTX: tl.constexpr):
    """Index and sign of x by equal steps; x * factor + offset runs from 0 to 1 over the range."""
    if PTX:
        level = tl.inline_asm_elementwise(
            f"{{ .reg .f32 u; fma.rn.sat.f32 u, $1, $2, $3; fma.rn.f32 $0, u, {LEVELS}.0, 12582912.0; }}", "=r,f,f,f",
            [x, factor + tl.zeros_like(x), offset + tl.zeros_like(x)], tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        level = (tl.clamp(x * factor + offset, 0.0, 1.0) * LEVELS + 12582912.0).to(tl.int32, bitcast=True)
    # Levels count from the bottom, indices from the middle outwards.
    HALF: tl.constexpr = LEVELS // 2  # the greatest index
    sign = (level & (HALF + 1)) == 0
    return tl.where(sign, HALF - (level & HALF), level & HALF), sign.to(tl.int32)


@triton.jit
def _uniform_codes(r, CODING: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, PTX: tl.constexpr):
    """Indices (`_fields`) and signs of r [16, CHUNKS * 64] by equal steps over a token's range; step and zero [64]."""
    LEVELS: tl.constexpr = (1 << CODING[0]) - 1
    CHUNKS: tl.constexpr = r.shape[1] // 64
    low, high = _range(r.reshape(16, CHUNKS, 64), DIM)
    zero, step = _half((low + high) / 2), _half((high - low) / (2 * LEVELS))
    factor = 1 / (2 * LEVELS * _divisor(step.to(tl.float32)))
    f, o = _spread(factor, VALUE), _spread(0.5 - zero.to(tl.float32) * factor, VALUE)
    if DIM != 16 * CHUNKS and not VALUE:
        r = _padded(r, DIM, parts(CODING[0]))
    x = _fours(r, CODING[0], VALUE, CHUNKS)
    index0, sign0 = _uniform(x[0], f[0], o[0], LEVELS, PTX)
    index1, sign1 = _uniform(x[1], f[1], o[1], LEVELS, PTX)
    index2, sign2 = _uniform(x[2], f[2], o[2], LEVELS, PTX)
    index3, sign3 = _uniform(x[3], f[3], o[3], LEVELS, PTX)
    index = _fields(index0, index1, index2, index3, 4 if CODING[0] == 4 else 2)
    return index, (sign0, sign1, sign2, sign3), step, zero


@triton.jit
def _range(r, DIM: tl.constexpr):
    """Least and greatest of r [16, CHUNKS, 64] over the channels below DIM: [64] each."""
    low, high = r, r
    if DIM != 16 * r.shape[1]:
        inside = tl.arange(0, r.shape[1])[None, :, None] < DIM // 16
        low, high = tl.where(inside, r, float("inf")), tl.where(inside, r, float("-inf"))
    low = tl.reduce(tl.reduce(low, 1, _smaller), 0, _smaller)
    return low, tl.reduce(tl.reduce(high, 1, _larger), 0, _larger)


@triton.jit
def _sign(x):
    return (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)


@triton.jit
def _gaussian_codes(r, CODING: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, PTX: tl.constexpr):
    """Indices (`_fields`) and signs of rotated r [16, CHUNKS * 64], and their scale, float16 [64]."""
    MAGNITUDES: tl.constexpr = CODING[2]
    CHUNKS: tl.constexpr = r.shape[1] // 64
    UNIT: tl.constexpr = DIM**0.5 / CODING[3]
    square = tl.sum(tl.sum((r * r).reshape(16, CHUNKS, 64), 1), 0)
    factors = _spread(UNIT / _divisor(tl.sqrt(square)), VALUE)
    if DIM != 16 * CHUNKS and not VALUE:
        r = _padded(r, DIM, parts(CODING[0]))
    x = _fours(r, CODING[0], VALUE, CHUNKS)
    a = tl.abs(x[0]), tl.abs(x[1]), tl.abs(x[2]), tl.abs(x[3])
    index, c0, c1, c2, c3 = _nearest4(a, factors, MAGNITUDES, 4 if CODING[0] == 4 else 2, PTX)
    scale = _scale(a, (c0, c1, c2, c3), square, CODING[1], VALUE, (16 * CHUNKS - DIM) * MAGNITUDES[0] ** 2)
    NORMALISE: tl.constexpr = 1.0 if DIM & (DIM - 1) else DIM**-0.5
    return index, (_sign(x[0]), _sign(x[1]), _sign(x[2]), _sign(x[3])), _half(scale * NORMALISE)


@triton.jit
def _scale(a, c, square, RULE: tl.constexpr, VALUE: tl.constexpr, PADDING: tl.constexpr):
    """The factor of the rule from sizes and their values, both as in `_fours`; PADDING: squares of no channel."""
    inner, values = square, square
    if RULE != _NORM:
        inner = _per_token(a[0] * c[0], a[1] * c[1], a[2] * c[2], a[3] * c[3], VALUE)
    if RULE != _UNBIASED:
        values = _per_token(c[0] * c[0], c[1] * c[1], c[2] * c[2], c[3] * c[3], VALUE) - PADDING
    if RULE == _NORM:
        return tl.sqrt(square) / tl.sqrt(values)
    elif RULE == _UNBIASED:
        return square / _divisor(inner)
    else:
        return inner / values


@triton.jit
def _padded(r, DIM: tl.constexpr, PARTS: tl.constexpr):
    """r [16, CHUNKS * 64] with the parts of a row, no power of two of channels each, moved to where one would be."""
    CHUNKS: tl.constexpr = r.shape[1] // 64
    SPAN: tl.constexpr = 16 * CHUNKS // PARTS
    r = r.reshape(2, 4, 2, CHUNKS, 64).permute(3, 1, 2, 0, 4).reshape(16 * CHUNKS, 64)  # channels in order
    position = tl.arange(0, 16 * CHUNKS)
    source = tl.minimum(position // SPAN * (DIM // PARTS) + position % SPAN, 16 * CHUNKS - 1)
    r = tl.gather(r, source[:, None] + tl.zeros((1, 64), tl.int32), 0)
    r = tl.where((position % SPAN < DIM // PARTS)[:, None], r, 0.0)
    return r.reshape(CHUNKS, 4, 2, 2, 64).permute(3, 1, 2, 0, 4).reshape(16, CHUNKS * 64)


# ------------------------------------------------------------------------------------------------------- packing


@triton.jit
def _place(index, sign, BITS: tl.constexpr, VALUE: tl.constexpr, PLANE: tl.constexpr):
    """What four codes put into their word of a plane (drawn in `tq_cache/packing.py`), all else zero."""
    if VALUE:
        i = (tl.arange(0, 16) % (2 if BITS == 4 else 4))[None, None, :]
    elif BITS == 4:
        i = (tl.arange(0, 8) % 2)[:, None, None]
    else:
        i = (tl.arange(0, 16) // 8 + tl.arange(0, 16) % 2 * 2)[:, None, None]
    if BITS == 4:  # i counts pairs
        signs = (sign[0] << 7) | (sign[1] << 15) | (sign[2] << 3) | (sign[3] << 11)
        return (index << (8 * i)) | (signs << (16 * i))
    elif BITS == 2:
        return (index | (_fields(sign[0], sign[1], sign[2], sign[3], 2) << 1)) << (4 * i)
    elif PLANE == 0:
        return index << (4 * i)
    else:
        even, odd = sign[0] | (sign[2] << 8), sign[1] | (sign[3] << 8)
        return (even << (2 + 4 * (i & 1) - (i >> 1))) | (odd << (4 * (i & 1) + 3 * (i >> 1)))


@triton.jit
def _gather(placed, BITS: tl.constexpr, VALUE: tl.constexpr):
    """Words of what `_place` gave: of values [channels, words], of keys [words, 64]."""
    if VALUE:
        I: tl.constexpr = 2 if BITS == 4 or BITS == 8 else 4
        words = tl.sum(placed.reshape(placed.shape[0], placed.shape[1], placed.shape[2] // I, I), 3)
        return words.reshape(words.shape[0] * words.shape[1], words.shape[2])
    else:
        if BITS == 3 or BITS == 2:
            placed = tl.sum(placed.reshape(2, 8, placed.shape[1], 64), 0)
        words = tl.sum(placed.reshape(4, 2, placed.shape[1], 64), 1).permute(1, 0, 2)
        return words.reshape(words.shape[0] * 4, 64)


@triton.jit
def _float8_words(r, factor, CODING: tl.constexpr, VALUE: tl.constexpr, NATIVE: tl.constexpr):
    """Words, as of `_gather`, of float8 codes of r [16, CHUNKS * 64] times factor."""
    CHUNKS: tl.constexpr = r.shape[1] // 64
    if VALUE:
        pairs, i = r.reshape(16, CHUNKS, 32, 2), (tl.arange(0, 32) % 2)[None, None, :]
    else:
        pairs, i = r.reshape(2, 8, CHUNKS, 64).permute(1, 2, 3, 0), (tl.arange(0, 8) % 2)[:, None, None]
    x0, x1 = tl.split(pairs)
    code0, code1 = _float8(x0 * factor, CODING[4], NATIVE), _float8(x1 * factor, CODING[4], NATIVE)
    return _gather((code0 | (code1 << 8)) << (16 * i), 8, VALUE)


@triton.jit
def _store_keys(base, words, token, valid, ROW: tl.constexpr):
    """Write words [words, 64] of keys: each token has a row of its own."""
    word = tl.arange(0, words.shape[0])
    mask = valid[None, :] & (word < ROW)[:, None]
    tl.store(base + (token % BLOCK_TOKENS)[None, :] * ROW + word[:, None], words.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _ones(of, BITS: tl.constexpr, PLANE: tl.constexpr):
    """The bits of some tokens, bool [64], in the words of a row of values, int32 [1, words]."""
    if BITS == 8:
        pair0, pair1 = tl.split(tl.where(of, 255, 0).reshape(1, 1, 32, 2))
        return _gather((pair0 | (pair1 << 8)) << (16 * (tl.arange(0, 32) % 2))[None, None, :], 8, True)
    else:
        x = _spread(of.to(tl.int32), True)
        index = _fields(x[0], x[1], x[2], x[3], 4 if BITS == 4 else 2) * (7 if BITS == 4 else 3 if BITS == 3 else 1)
        return _gather(_place(index, x, BITS, True, PLANE), BITS, True)


@triton.jit
def _store_values(base, words, token, start, valid, DIM: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr):
    """Write words [channels, words] of a block of values; bits of tokens before `start` stay."""
    WIDTH: tl.constexpr = words.shape[0]
    ROW: tl.constexpr = words.shape[1]
    WORD: tl.constexpr = base.dtype.element_ty
    channel = (_channel(tl.arange(0, 16))[:, None] + 16 * tl.arange(0, WIDTH // 16)[None, :]).reshape(WIDTH)
    inside = (channel < DIM)[:, None]
    base += channel[:, None] * ROW + tl.arange(0, ROW)[None, :]
    if tl.min(valid.to(tl.int32)) != 0:
        tl.store(base, words.to(WORD), mask=inside)
    else:
        ours, theirs = _ones(valid, BITS, PLANE), _ones(token < start, BITS, PLANE)
        mask = (ours != 0) & inside
        old = tl.load(base, mask=mask & (theirs != 0), other=0).to(tl.int32)
        tl.store(base, ((words & ours) | (old & theirs)).to(WORD), mask=mask)


@triton.jit
def _store_plane(
    packed, words, token, start, valid, DIM: tl.constexpr, BITS: tl.constexpr, VALUE: tl.constexpr, PLANE: tl.constexpr
):
    """Write the words of one plane of a block."""
    OFFSET: tl.constexpr = PLANE * BLOCK_TOKENS * DIM // 4  # the first plane of 3 bits holds two of them
    WORD: tl.constexpr = tl.uint16 if PLANE else tl.uint32
    base = (packed + OFFSET).to(tl.pointer_type(WORD))
    if VALUE:
        _store_values(base, words, token, start, valid, DIM, BITS, PLANE)
    else:
        _store_keys(base, words, token, valid, DIM // 4 // parts(BITS))


@triton.jit
def _plain(r, side, pair, DIM: tl.constexpr):
    """r [16, CHUNKS * 64], not rotated, centred and smoothed."""
    _, _, _, _, center, smooth, _, _ = side
    CHUNKS: tl.constexpr = r.shape[1] // 64
    channel = _channel(tl.arange(0, 16))[:, None] + 16 * tl.arange(0, CHUNKS)[None, :]
    r = r.reshape(16, CHUNKS, 64)
    if center is not None:
        r -= tl.load(center + pair * DIM + channel, mask=channel < DIM, other=0)[:, :, None]
    if smooth is not None:
        r *= (1 / tl.load(smooth + pair * DIM + channel, mask=channel < DIM, other=1))[:, :, None]
    return r.reshape(16, CHUNKS * 64)


@triton.jit
def _quantize_block(
    side, strides, number, start, tokens, CODING: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    TERMS: tl.constexpr, PTX: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Block `number` from that of token `start`, of keys or of values."""
    _, packed, scale, zero, _, _, head_scale, _ = side
    BITS: tl.constexpr = CODING[0]
    RULE: tl.constexpr = CODING[1]
    WIDTH: tl.constexpr = max(triton.next_power_of_2(DIM), 32 if BITS == 8 or BITS == 4 else 64)
    ROTATED: tl.constexpr = RULE != _PER_HEAD and RULE != _MIN_MAX
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64) // 2
    pair = batch * tl.num_programs(1) + head
    first = (start // BLOCK_TOKENS + number) * BLOCK_TOKENS
    token = first + tl.arange(0, 64)
    if VALUE:
        token = first + _token(tl.arange(0, 64), BITS)
    valid = (token >= start) & (token < start + tokens)
    rows = _rows(side, strides, batch, head, token - start, valid, DIM, WIDTH, ROTATED, PTX)
    r = _mix(rows.reshape(64, WIDTH // 16, 16).permute(2, 1, 0).reshape(16, WIDTH * 4), ROTATED, TERMS)
    block = packed + batch * strides[3] + head * strides[4] + (first // BLOCK_TOKENS).to(tl.int64) * (8 * DIM * BITS)
    if ROTATED:
        index, sign, factor = _gaussian_codes(_butterflies(r, DIM, WIDTH // 16), CODING, DIM, VALUE, PTX)
    else:
        r = _plain(r, side, pair, DIM)
    if RULE == _PER_HEAD:
        words = _float8_words(r, 1 / tl.load(head_scale + pair), CODING, VALUE, NATIVE)
        _store_plane(block, words, token, start, valid, DIM, BITS, VALUE, 0)
    else:
        if RULE == _MIN_MAX:
            index, sign, factor, offset = _uniform_codes(r, CODING, DIM, VALUE, PTX)
            tl.store(zero + batch * strides[7] + head * strides[8] + token, offset, mask=valid)
        tl.store(scale + batch * strides[5] + head * strides[6] + token, factor, mask=valid)
        for plane in tl.static_range(2 if BITS == 3 else 1):
            words = _gather(_place(index, sign, BITS, VALUE, plane), BITS, VALUE)
            _store_plane(block, words, token, start, valid, DIM, BITS, VALUE, plane)


@triton.jit
def _quantize_blocks(
    side, strides, start, tokens, CODING: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr,
    TERMS: tl.constexpr, PTX: tl.constexpr, NATIVE: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """The blocks of this program, of keys or of values."""
    first = tl.program_id(0) * LOOP
    if LOOP == 1:
        _quantize_block(side, strides, first, start, tokens, CODING, DIM, VALUE, TERMS, PTX, NATIVE)
    else:
        for number in tl.range(first, first + LOOP):
            _quantize_block(side, strides, number, start, tokens, CODING, DIM, VALUE, TERMS, PTX, NATIVE)


@triton.jit(do_not_specialize=["start", "tokens"])
def _quantize_kernel(
    key, value, key_strides, value_strides, start, tokens,
    KEY_CODING: tl.constexpr, VALUE_CODING: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_TERMS: tl.constexpr, VALUE_TERMS: tl.constexpr, PTX: tl.constexpr, NATIVE: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """One program = one block of 64 tokens of one (sequence, KV head), keys or values by the last axis of the grid."""
    if tl.program_id(2) % 2 == 0:
        if KEY_CODING is not None:
            _quantize_blocks(key, key_strides, start, tokens, KEY_CODING, KEY_DIM, False, KEY_TERMS, PTX, NATIVE, LOOP)
    else:
        if VALUE_CODING is not None:
            _quantize_blocks(
                value, value_strides, start, tokens, VALUE_CODING, VALUE_DIM, True, VALUE_TERMS, PTX, NATIVE, LOOP
            )


# -------------------------------------------------------------------------------------------------------- launch


def quantize(key: Side | None, value: Side | None, start: int) -> None:
    """Quantise `key.x` and `value.x` and write them, in place, as tokens start .. start + T; one launch.

    Either side may be None.  Packed bits, scales and zeros of tokens before `start` stay; beyond start + T the bytes
    of the last block are undefined.
    """
    sides = [side for side in (key, value) if side is not None]
    for side in sides:
        _check(side, start)
    batch, heads, tokens, _ = sides[0].x.shape
    if tokens == 0:
        return
    backend, arch = target(sides[0].x.device)
    blocks = (start + tokens - 1) // 64 - start // 64 + 1
    loop = LOOP if blocks >= 1024 else 1
    _quantize_kernel[(triton.cdiv(blocks, loop), heads, 2 * batch)](
        _tensors(key), _tensors(value), _strides(key), _strides(value), start, tokens,
        KEY_CODING=None if key is None else tuple(key.coding), VALUE_CODING=None if value is None else tuple(value.coding),
        KEY_DIM=0 if key is None else key.x.shape[3], VALUE_DIM=0 if value is None else value.x.shape[3],
        KEY_TERMS=_terms(key, backend, arch), VALUE_TERMS=_terms(value, backend, arch),
        PTX=arch if backend == "cuda" and arch >= 80 else 0, NATIVE=backend == "cuda" and arch >= 90, LOOP=loop, **OPTIONS,
    )  # fmt: skip


def _tensors(side: Side | None) -> tuple:
    return () if side is None else tuple(side[:8])


def _strides(side: Side | None) -> tuple[int, ...]:
    if side is None:
        return ()
    factors = [(0, 0) if factor is None else factor.stride()[:2] for factor in (side.scale, side.zero)]
    return (*side.x.stride()[:3], *side.packed.stride()[:2], *factors[0], *factors[1])


def _terms(side: Side | None, backend: str, arch: int | str) -> int:
    """How `_mix` takes x: 16-bit numbers as they are, else as a sum of bfloat16, exact to 2**-17 or wholly."""
    if side is None:
        return 1
    if backend == "interpreter" or backend == "cuda" and arch < 80:  # no trustworthy, or no fast, bfloat16 dot
        return 0
    if side.x.dtype == torch.float32:
        return 3
    exact = side.rotation is None or side.center is None and side.smooth is None
    return 1 if exact else 2


def check_states(side: Side, tokens: int) -> int:
    """D of packed states.  Raise ValueError unless its tensors fit each other and have room for `tokens`."""
    packed, size = side.packed, side.packed.shape[3]
    dim = size // (8 * side.coding.bits)
    room = 64 * packed.shape[2]
    if dim % 16 or size != 8 * dim * side.coding.bits or packed.stride()[2:] != (size, 1) or tokens > room:
        raise ValueError(
            f"expected blocks of 8 * D * {side.coding.bits} bytes, D a multiple of 16, with room for {tokens} tokens, "
            f"contiguous in the last two dimensions; got {list(packed.shape)} with strides {packed.stride()}"
        )
    wanted = (
        ("scale", side.scale, side.coding.rule != PER_HEAD),
        ("zero", side.zero, side.coding.rule == MIN_MAX),
        ("head_scale", side.head_scale, side.coding.rule == PER_HEAD),
        ("rotation", side.rotation, side.coding.rule in (NORM, UNBIASED, LEAST_SQUARES)),
    )
    for name, tensor, needed in wanted:
        if needed != (tensor is not None):
            raise ValueError(f"expected {name} {'' if needed else 'None '}for rule {side.coding.rule}, got {tensor!r}")
    return dim


def _check(side: Side, start: int) -> None:
    """Raise ValueError unless x can be written to tokens start .. of the packed states."""
    x = side.x
    dim = check_states(side, start + x.shape[2])
    wanted = (*side.packed.shape[:2], x.shape[2], dim)
    if tuple(x.shape) != wanted or x.stride(3) != 1 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"expected x {list(wanted)} in bfloat16, float16 or float32, with stride 1 in the last dimension, "
            f"got {x.dtype} {list(x.shape)} with strides {x.stride()}"
        )


@lru_cache
def target(device: torch.device) -> tuple[str, int | str]:
    """Triton's backend and architecture for `device`: ("cuda", 90), ("hip", "gfx942") or ("interpreter", 0)."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreter", 0
    found = triton.runtime.driver.active.get_current_target()
    return found.backend, found.arch
