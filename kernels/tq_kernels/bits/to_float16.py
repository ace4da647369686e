"""Codes to float16, in registers: what prefill and dequantise share.

A decoder puts the parts of a row side by side.  So a tile of keys is [tokens, channels] with every part padded to
`part_width` columns (`key_channels` says which channel a column is), and a tile of values is [channels, tokens] with
the tokens in the order of `tile_order`.  Numbers are float16, in which every code is exact, before scale and zero.

    CODE   `states.Code`
    MODE   `Decoders`
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device import Device
from .layout import (
    channels,
    is_e5m2,
    load_key_plane,
    load_value_planes,
    part_width,
    parts,
    plain_three_bits,
    ptx_three_bits,
    side_by_side,
)


class Decoders(NamedTuple):
    """Whether codes are decoded by PTX, and whether the device converts e4m3 itself."""

    ptx: bool
    native: bool


def decoders(device: Device) -> Decoders:
    """Those of a device."""
    return Decoders(device.is_nvidia, device.is_nvidia and device.capability >= (8, 9))


# --- Decoders.


@triton.constexpr_function
def _ptx_part(part, bits, table, native):
    """PTX that turns the four codes of one part of a word (or of two, 3 bits) into float16 outputs 4 * part + 0..3."""
    word, second = (f"${4 * parts(bits) + i}" for i in range(2))
    look_up = f"prmt.b32 s, {table[0]:#x}, {table[1]:#x}, s;"
    if bits == 4:
        text = f"and.b32 s, {word}, 0x77777777; shr.u32 s, s, {16 * part}; shl.b32 t, {word}, {4 * part};"
        text += look_up + "lop3.b32 s, s, t, 0x80808080, 0xF8;"  # s | (t & mask)
    elif bits == 3:
        text = ptx_three_bits(part, word, second) + look_up
    else:
        text = f"shr.u32 s, {word}, {2 * (part % 2)}; and.b32 s, s, 0x33333333;"
        text += f"shr.u32 s, s, {16 * (part // 2)};" + look_up
    if native:
        text += "mov.b32 {h, k}, s; cvt.rn.f16x2.e4m3x2 t, h; cvt.rn.f16x2.e4m3x2 u, k;"
    else:  # the bits of an e4m3 number, moved by 7, are those of a float16 that is 2**8 times smaller
        for register, select in (("t", "0x1404"), ("u", "0x3424")):
            text += f"prmt.b32 {register}, s, 0, {select}; and.b32 v, {register}, 0x7F007F00; shr.u32 v, v, 1;"
            text += f"lop3.b32 {register}, {register}, 0x80008000, v, 0xEA; mov.b32 v, 0x5C005C00;"
            text += f"mul.rn.f16x2 {register}, {register}, v;"
    out = [f"${4 * part + i}" for i in range(4)]
    return text + f"mov.b32 {{{out[0]}, {out[1]}}}, t; mov.b32 {{{out[2]}, {out[3]}}}, u;"


@triton.constexpr_function
def _ptx(bits, table, native):
    """All codes of a word as float16."""
    text = "".join(_ptx_part(part, bits, table, native) for part in range(parts(bits)))
    return "{ .reg .b32 s, t, u, v; .reg .b16 h, k; " + text + " }"


@triton.constexpr_function
def _constraints(bits):
    return "=h," * (4 * parts(bits)) + ("r,r" if bits == 3 else "r")


@triton.constexpr_function
def _halves(bits):
    return (tl.float16,) * (4 * parts(bits))


@triton.jit
def _four(x, PART: tl.constexpr):
    """Outputs of one part, four of [R, W] each, interleaved: [R, 4W]."""
    even, odd = tl.join(x[4 * PART], x[4 * PART + 2]), tl.join(x[4 * PART + 1], x[4 * PART + 3])
    return tl.join(even, odd).reshape(even.shape[0], 4 * even.shape[1])


@triton.jit
def _plain_code(planes, PART: tl.constexpr, INDEX: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr):
    """Code INDEX of a part as float16."""
    word = planes[0].to(tl.uint32, bitcast=True)
    if BITS == 4:
        code = (word >> (16 * PART + 4 * INDEX)) & 7
    elif BITS == 2:
        code = (word >> (16 * (PART // 2) + 2 * (PART % 2) + 4 * INDEX)) & 3
    else:
        second = planes[1].to(tl.uint16, bitcast=True).to(tl.uint32)
        code = (plain_three_bits(word, word >> 16, second, PART) >> (4 * INDEX)) & 7
    low, high = tl.full((), TABLE[0], tl.uint32), tl.full((), TABLE[1], tl.uint32)
    x = (tl.where(code < 4, low, high) >> ((code & 3) * 8)) & 255
    if BITS == 4:
        x |= ((word >> (7 - 4 * PART + 8 * INDEX)) & 1) << 7
    return float8_to_float16(x, False, False)


@triton.jit
def _plain_words(planes, BITS: tl.constexpr, TABLE: tl.constexpr):
    """What the PTX gives, in plain Triton: for the interpreter and for AMD."""
    x = ()
    for part in tl.static_range(parts(BITS)):
        for i in tl.static_range(4):
            x = x + (_plain_code(planes, part, i, BITS, TABLE),)  # type: ignore[assignment]
    return x


@triton.jit
def _decode_words(planes, BITS: tl.constexpr, TABLE: tl.constexpr, PTX: tl.constexpr, NATIVE: tl.constexpr):
    """Packed rows as 32-bit words (and, with 3 bits, 16-bit words) to float16.

    Whole words are right in any register layout; bytes, decoded four at a time, would be right in some.
    """
    if PTX:
        x = tl.inline_asm_elementwise(_ptx(BITS, TABLE, NATIVE), _constraints(BITS), planes, _halves(BITS), True, 1)
    else:
        x = _plain_words(planes, BITS, TABLE)
    y = side_by_side(_four(x, 0), _four(x, 1))
    if BITS != 4:
        y = side_by_side(y, side_by_side(_four(x, 2), _four(x, 3)))
    return y


@triton.jit
def float8_to_float16(x, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """float8 bytes to float16.  Not `NATIVE`: with integer arithmetic, which runs everywhere."""
    if E5M2:
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif NATIVE:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        x = x.to(tl.uint16)
        half = (((x & 128) << 8) | ((x & 127) << 7)).to(tl.float16, bitcast=True) * 256
        return tl.where((x & 127) == 127, float("nan"), half).to(tl.float16)


@triton.jit
def _decode(planes, CODE: tl.constexpr, MODE: tl.constexpr):
    """Planes of packed rows, as the loaders below cut them, to float16, the parts of a row side by side."""
    BITS: tl.constexpr = CODE.bits
    TABLE: tl.constexpr = CODE.table
    NATIVE: tl.constexpr = MODE.native
    if BITS == 8:
        return float8_to_float16(planes[0], is_e5m2(BITS, TABLE), NATIVE)
    else:
        PTX: tl.constexpr = MODE.ptx
        return _decode_words(planes, BITS, TABLE, PTX, NATIVE)


# --- Tiles of packed keys and values as float16.  Arguments as those of the loaders of planes.


@triton.jit
def load_keys(
    base, start, order, blocks, DIM: tl.constexpr, CODE: tl.constexpr, MODE: tl.constexpr, MASKED: tl.constexpr
):
    """Keys `start` + `order` [N], float16 [N, parts * part_width]."""
    BITS: tl.constexpr = CODE.bits
    WORDS: tl.constexpr = BITS != 8
    WIDTH: tl.constexpr = part_width(DIM, BITS)
    first = load_key_plane(base, start, order, blocks, DIM, WIDTH, BITS, 0, WORDS, True, MASKED)
    if BITS == 3:
        second = load_key_plane(base, start, order, blocks, DIM, WIDTH, BITS, 1, WORDS, True, MASKED)
        return _decode((first, second), CODE, MODE)
    else:
        return _decode((first,), CODE, MODE)


@triton.jit
def load_values(
    base, start, blocks, N: tl.constexpr, DIM: tl.constexpr, CODE: tl.constexpr, MODE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Values of N tokens from `start`, float16 [channels, N], tokens in the order of `tile_order`."""
    BITS: tl.constexpr = CODE.bits
    WORDS: tl.constexpr = BITS != 8
    planes = load_value_planes(base, start, blocks, N, DIM, channels(DIM), BITS, WORDS, True, MASKED)
    return _decode(planes, CODE, MODE)
