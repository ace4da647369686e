"""Codes to packed words, and packed words to memory (the bits are drawn in `tq_cache/formats/packing.py`).

A word of a packed row of n codes holds codes part * n / PARTS + 4 * word + i, i = 0..3, of all PARTS parts of the row.
Rows (tokens) of values and columns (channels) of keys are ordered so that the codes of one word meet in one thread or
in neighbouring lanes.
"""

import triton
import triton.language as tl

from ..bits.layout import parts
from ..states import BLOCK_TOKENS

_BLOCK = tl.constexpr(BLOCK_TOKENS)


@triton.jit
def column_place(column, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """(part, word, i) of columns of keys."""
    WORDS: tl.constexpr = WIDTH // (4 * PARTS)
    part = column // (WIDTH // PARTS)
    word = column // 2 % 4 * (WORDS // 4) + column // 8 % (WORDS // 4)
    return part, word, column // (2 * WORDS) % 2 * 2 + column % 2


@triton.jit
def column_channel(column, DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Channel of columns of keys, DIM where there is none."""
    part, word, i = column_place(column, WIDTH, PARTS)
    return tl.where(word < DIM // (4 * PARTS), part * (DIM // PARTS) + 4 * word + i, DIM)


@triton.jit
def row_place(row, BITS: tl.constexpr, ROTATED: tl.constexpr):
    """(part, word, i) of rows of values."""
    if ROTATED:
        if BITS == 4:
            return row // 8 % 2, row // 16 * 2 + row // 4 % 2, row % 4
        else:
            return row // 8 % 2 * 2 + row // 4 % 2, row // 16, row % 4
    elif BITS == 4:
        return row // 32, row % 8, row // 8 % 4
    else:
        return row // 16, row // 2 % 4, row // 8 % 2 * 2 + row % 2


@triton.jit
def place_codes(index, sign, part, i, BITS: tl.constexpr, PLANE: tl.constexpr):
    """What codes put into their word of a plane (drawn in `tq_cache/formats/packing.py`), all else zero."""
    if BITS == 4:
        return (index << (16 * part + 4 * i)) | (sign << (8 * i + 7 - 4 * part))
    elif BITS == 2:
        return (index | (sign << 1)) << (part // 2 * 16 + part % 2 * 2 + 4 * i)
    elif PLANE == 0:
        spread = ((index & 1) << 3) | (sign << 19)  # of the fourth quarter
        whole = tl.where(part == 2, 0, (index | (sign << 2)) << (16 * (part % 2)))
        return tl.where(part == 3, spread, whole) << (4 * i)
    else:
        spread = (index >> 1) << 3
        return tl.where(part < 2, 0, tl.where(part == 3, spread, index | (sign << 2))) << (4 * i)


@triton.jit
def _sum_columns(x, PARTS: tl.constexpr):
    """[R, WIDTH] in the order of `column_place` to words [R, words]."""
    WORDS: tl.constexpr = x.shape[1] // (4 * PARTS)
    x = tl.sum(x.reshape(x.shape[0], PARTS, 2, WORDS // 4, 4, 2), 5)
    x = tl.sum(tl.sum(x, 1), 1)
    return x.permute(0, 2, 1).reshape(x.shape[0], WORDS)


@triton.jit
def _sum_rows(x, BITS: tl.constexpr, ROTATED: tl.constexpr):
    """[64, N] in the order of `row_place` to words [words, N]."""
    N: tl.constexpr = x.shape[1]
    if ROTATED:
        if BITS == 4:
            return tl.sum(tl.sum(x.reshape(4, 2, 2, 4, N), 1), 2).reshape(8, N)
        else:
            return tl.sum(tl.sum(tl.sum(x.reshape(4, 2, 2, 4, N), 1), 2), 1)
    elif BITS == 4:
        return tl.sum(x.reshape(8, 8, N), 0)
    else:
        return tl.sum(tl.sum(x.reshape(8, 4, 2, N), 0), 1)


@triton.jit
def store_key_plane(block, index, sign, token, valid, BITS: tl.constexpr, DIM: tl.constexpr, PLANE: tl.constexpr):
    """Write one plane of codes of keys; each token has a row of its own."""
    PARTS: tl.constexpr = parts(BITS)
    ROW: tl.constexpr = DIM // (4 * PARTS)
    TYPE: tl.constexpr = tl.int16 if PLANE else tl.int32
    part, _, i = column_place(tl.arange(0, index.shape[1]), index.shape[1], PARTS)
    words = _sum_columns(place_codes(index, sign, part[None, :], i[None, :], BITS, PLANE), PARTS)
    word = tl.arange(0, words.shape[1])[None, :]
    base = (block + PLANE * (_BLOCK * DIM // 4)).to(tl.pointer_type(TYPE))
    tl.store(base + (token % _BLOCK)[:, None] * ROW + word, words.to(TYPE), mask=valid[:, None] & (word < ROW))


@triton.jit
def _value_places(base, words, number, end, DIM: tl.constexpr):
    """Where words [words, channels] of a block of values go, each channel in a row, and which of them there are."""
    channel, word = tl.arange(0, words.shape[1])[None, :], tl.arange(0, words.shape[0])[:, None]
    return base + channel * words.shape[0] + word, (channel < DIM) & (number * _BLOCK + 0 * word < end)


@triton.jit
def _with_old(words, kept, place, mask):
    """`words` with the bits `kept` of those in memory."""
    return (words & ~kept) | (tl.load(place, mask=mask, other=0).to(tl.int32) & kept)


@triton.jit
def store_value_plane(
    block, index, sign, number, token, start, end,
    BITS: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, PLANE: tl.constexpr,
):  # fmt: skip
    """Write one plane of codes of a block of values; bits of tokens before `start` stay."""
    TYPE: tl.constexpr = tl.int16 if PLANE else tl.int32
    part, _, i = row_place(tl.arange(0, 64), BITS, ROTATED)
    words = _sum_rows(place_codes(index, sign, part[:, None], i[:, None], BITS, PLANE), BITS, ROTATED)
    place, mask = _value_places(
        (block + PLANE * (_BLOCK * DIM // 4)).to(tl.pointer_type(TYPE)), words, number, end, DIM
    )
    if number * _BLOCK < start:
        ONES: tl.constexpr = (1 << (BITS - 1)) - 1
        before = (token < start).to(tl.int32)[:, None]
        kept = _sum_rows(place_codes(before * ONES, before, part[:, None], i[:, None], BITS, PLANE), BITS, ROTATED)
        words = _with_old(words, kept, place, mask)
    tl.store(place, words.to(TYPE), mask=mask)


@triton.jit
def store_value_words(block, words, number, start, end, DIM: tl.constexpr):
    """Write a block of values of 8 bits, int32 [16, N], four tokens a word; bytes of tokens before `start` stay."""
    place, mask = _value_places(block.to(tl.pointer_type(tl.int32)), words, number, end, DIM)
    if number * _BLOCK < start:
        word = tl.arange(0, 16)[:, None]
        before = tl.minimum(tl.maximum(start - number * _BLOCK - 4 * word, 0), 4)  # tokens of a word
        words = _with_old(words, tl.where(before == 4, -1, (1 << (8 * before)) - 1), place, mask)
    tl.store(place, words, mask=mask)
