"""Rows of latents and of rotary keys (MLA) to packed rows, each on its own: rotated in registers, not by a matrix.

Widths are powers of two, so that a rotation is one Hadamard matrix and channels stand in their order.
"""

import triton
import triton.language as tl

from ..bits.hadamard import hadamard, hadamard_in_registers, log2
from ..bits.layout import parts, side_by_side
from ..states import BLOCK_TOKENS, EXACT, LARGEST, PER_HEAD
from .codes import float8_codes, gaussian_codes, int8_codes
from .pack import place_codes
from .rotate import matrix_unit

_BLOCK = tl.constexpr(BLOCK_TOKENS)
_EXACT, _LARGEST, _PER_HEAD = tl.constexpr(EXACT), tl.constexpr(LARGEST), tl.constexpr(PER_HEAD)


_SPAN = tl.constexpr(64)


@triton.jit
def _one(x, rows, valid, NUMBER: tl.constexpr, SPAN: tl.constexpr):
    """One span of rows."""
    channel = NUMBER * SPAN + tl.arange(0, SPAN)
    return tl.load(x + (rows[:, None] + channel[None, :]), mask=valid[:, None], other=0.0)


@triton.jit
def _two(x, rows, valid, NUMBER: tl.constexpr):
    return side_by_side(_one(x, rows, valid, NUMBER, _SPAN), _one(x, rows, valid, NUMBER + 1, _SPAN))


@triton.jit
def _four(x, rows, valid, NUMBER: tl.constexpr):
    return side_by_side(_two(x, rows, valid, NUMBER), _two(x, rows, valid, NUMBER + 2))


@triton.jit
def _load(x, stride, place, valid, DIM: tl.constexpr):
    """Rows `place` [N] of x, [N, DIM], zeros where there are none.

    A row is loaded in spans that stand one behind the other in registers: eight threads have all of it.
    """
    rows = place.to(tl.int64) * stride
    if DIM <= _SPAN:
        return _one(x, rows, valid, 0, DIM)
    elif DIM == 128:
        return _two(x, rows, valid, 0)
    elif DIM == 256:
        return _four(x, rows, valid, 0)
    else:
        return side_by_side(_four(x, rows, valid, 0), _four(x, rows, valid, 4))


@triton.jit
def _centred(x, states, batch, channel, DIM: tl.constexpr):
    if states.center is not None:
        x -= tl.load(states.center + batch * DIM + channel)[None, :]
    return x


@triton.jit
def _plain(x, states, batch, channel, DIM: tl.constexpr):
    """x [N, DIM], not rotated: centred and smoothed."""
    x = _centred(x, states, batch, channel, DIM)
    if states.smooth is not None:
        x /= tl.load(states.smooth + batch * DIM + channel)[None, :]
    return x


@triton.jit
def _rotated(x, states, batch, channel, DIM: tl.constexpr, UNIT: tl.constexpr):
    """x [N, DIM] centred, smoothed and rotated, times UNIT."""
    x = _centred(x, states, batch, channel, DIM)
    factor = tl.load(states.rotation + channel) * UNIT  # its first row: the signs
    if states.smooth is not None:
        factor /= tl.load(states.smooth + batch * DIM + channel)
    # Columns of one thread, as `_load` has them in 16 bits; if these lie elsewhere, it is slower and as right.
    x = hadamard_in_registers(x * factor[None, :], 0, 3)
    x = hadamard(x, 3, log2(min(DIM, _SPAN)))
    return hadamard_in_registers(x, log2(min(DIM, _SPAN)), log2(DIM))


@triton.jit
def _store_plane(block, index, sign, row, valid, BITS: tl.constexpr, PLANE: tl.constexpr):
    """Write one plane of codes [N, DIM], as rows `row` of a block (drawn in `tq_cache/formats/packing.py`)."""
    DIM: tl.constexpr = index.shape[1]
    PARTS: tl.constexpr = parts(BITS)
    ROW: tl.constexpr = DIM // (4 * PARTS)  # words
    TYPE: tl.constexpr = tl.int16 if PLANE else tl.int32
    channel = tl.arange(0, DIM)
    words = place_codes(index, sign, (channel // (DIM // PARTS))[None, :], (channel % 4)[None, :], BITS, PLANE)
    words = tl.sum(tl.sum(words.reshape(words.shape[0], PARTS, ROW, 4), 3), 1)
    base = (block + PLANE * (_BLOCK * DIM // 4)).to(tl.pointer_type(TYPE))
    place = row[:, None] * ROW + tl.arange(0, ROW)[None, :]
    tl.store(base + place, words.to(TYPE), mask=valid[:, None])


@triton.jit
def store_rows(
    x, stride, states, steps, batch, first, start, valid,
    VECTORS: tl.constexpr, ARITHMETIC: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Quantise TOKENS vectors, of which the one that is token `start` lies at x, as tokens `first` ...

    first: a multiple of TOKENS, which divides a block; valid: bool [TOKENS], which ones there are
    """
    BITS: tl.constexpr = VECTORS.bits
    DIM: tl.constexpr = VECTORS.dim
    RULE: tl.constexpr = VECTORS.rule
    UNIT: tl.constexpr = 1.0 if RULE == _LARGEST else matrix_unit(DIM, tl.float32)
    channel = tl.arange(0, DIM)
    token = first + tl.arange(0, TOKENS)
    rows = _load(x, stride, token - start, valid, DIM)
    packed = states.packed + batch * steps.packed.batch
    if BITS >= 8:
        target = packed + (token.to(tl.int64)[:, None] * DIM + channel[None, :])
        if RULE == _EXACT:
            tl.store(target, rows, mask=valid[:, None])
        elif RULE == _PER_HEAD:
            rows = _plain(rows.to(tl.float32), states, batch, channel, DIM)
            codes = float8_codes(rows, tl.load(states.head_scale + batch), VECTORS.exponent, ARITHMETIC.native)
            tl.store(target, codes, mask=valid[:, None])
        else:
            codes, factor = int8_codes(_rotated(rows.to(tl.float32), states, batch, channel, DIM, UNIT))
            tl.store(target, codes, mask=valid[:, None])
    else:
        rotated = _rotated(rows.to(tl.float32), states, batch, channel, DIM, UNIT)
        index, sign, factor = gaussian_codes(rotated, None, VECTORS, ARITHMETIC)
        block = packed + (first // _BLOCK).to(tl.int64) * (8 * DIM * BITS)
        for plane in tl.static_range(2 if BITS == 3 else 1):
            _store_plane(block, index, sign, token % _BLOCK, valid, BITS, plane)
    if RULE != _EXACT and RULE != _PER_HEAD:
        tl.store(states.scale + batch * steps.scale.batch + token, factor, mask=valid)
