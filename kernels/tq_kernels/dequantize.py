"""Dequantise: packed states back to vectors of any dtype, for whoever cannot attend to packed bits.

One program = 64 tokens of one (sequence, KV head).  Codes become numbers one by one, are rotated back as `quantize`
rotates them (the Hadamard matrices are symmetric and their own inverses), and scaled.
"""

import torch
import triton
import triton.language as tl

from .primitives import BLOCK_TOKENS, parts
from .quantize import MIN_MAX, PER_HEAD, Side, _butterflies, _mix, _signs, check_states, target

_MIN_MAX, _PER_HEAD = tl.constexpr(MIN_MAX), tl.constexpr(PER_HEAD)


@triton.jit
def _shift(part, i, BITS: tl.constexpr, SIGN: tl.constexpr):
    """Where the index, or the sign, of code i of four stands in its packed word (drawn in `tq_cache/packing.py`)."""
    if BITS == 8:
        return 8 * i
    elif BITS == 4:
        return 7 - 4 * part + 8 * i if SIGN else 16 * part + 4 * i
    elif SIGN:
        return 8 * (part // 2) + 4 * (i % 2) + tl.where(part % 2 == 0, 2 - i // 2, 3 * (i // 2))
    else:
        return 16 * (part // 2) + 2 * (part % 2) + 4 * i


@triton.jit
def _load_plane(block, row, column, N: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr, SIGN: tl.constexpr, PLANE: tl.constexpr):
    """Index, or sign, of the codes at `column` of rows of N: int32 [rows, columns]."""
    LOW: tl.constexpr = 2 if BITS == 3 else BITS
    WORD: tl.constexpr = tl.uint16 if PLANE else tl.uint32
    SPAN: tl.constexpr = N // parts(BITS)  # codes of a part
    within = column % SPAN
    base = (block + PLANE * ROWS * N * LOW // 8).to(tl.pointer_type(WORD))
    mask = (row < ROWS)[:, None] & (column < N)[None, :]
    word = tl.load(base + row[:, None] * (SPAN // 4) + (within // 4)[None, :], mask=mask, other=0).to(tl.uint32)
    shift = _shift(column // SPAN, within % 4, BITS, SIGN)
    ONES: tl.constexpr = 255 if BITS == 8 else 1 if SIGN else 7 if BITS == 4 else 3
    return ((word >> shift.to(tl.uint32)[None, :]) & ONES).to(tl.int32)


@triton.jit
def _load_codes(block, row, column, N: tl.constexpr, ROWS: tl.constexpr, BITS: tl.constexpr):
    """Index and sign of the codes at `column` of rows of N, int32 [rows, columns]."""
    index = _load_plane(block, row, column, N, ROWS, BITS, False, 0)
    if BITS == 4:
        sign = _load_plane(block, row, column, N, ROWS, BITS, True, 0)
    elif BITS == 3:
        sign = _load_plane(block, row, column, N, ROWS, BITS, True, 1)
    else:
        sign = index >> 1
        index = index & 1 if BITS == 2 else index
    return index, sign


@triton.jit
def _float8_value(code, EXPONENT: tl.constexpr):
    """float32 of float8 bytes: the bits of a float16 of the same exponent width, or of one 2**8 times too small."""
    if EXPONENT == 5:
        return (code << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        half = (((code & 128) << 8) | ((code & 127) << 7)).to(tl.uint16).to(tl.float16, bitcast=True)
        return tl.where((code & 127) == 127, float("nan"), half.to(tl.float32) * 256)


@triton.jit
def _value(index, sign, CODING: tl.constexpr):
    """float32 that each code stands for."""
    if CODING[0] == 8:
        return _float8_value(index, CODING[4])
    else:
        MAGNITUDES: tl.constexpr = CODING[2]
        value = tl.full(index.shape, MAGNITUDES[0], tl.float32)
        for k in tl.static_range(1, len(MAGNITUDES)):
            value = tl.where(index == k, MAGNITUDES[k], value)
        return tl.where(sign != 0, -value, value)


@triton.jit
def _unrotate(c, rotation, DIM: tl.constexpr, WIDTH: tl.constexpr, TERMS: tl.constexpr):
    """c [64, WIDTH], exact in float16, times the rotation: float32 [64, WIDTH]."""
    CHUNKS: tl.constexpr = WIDTH // 16
    c = c.reshape(64, CHUNKS, 16).permute(2, 1, 0).reshape(16, CHUNKS * 64)
    r = _butterflies(_mix(c, True, TERMS), DIM, CHUNKS)
    # Rows in the order of `_channel` back to channels.
    r = r.reshape(2, 4, 2, CHUNKS, 64).permute(4, 3, 1, 2, 0).reshape(64, WIDTH)
    SCALE: tl.constexpr = 1.0 if DIM & (DIM - 1) else DIM**-0.5
    return r * (_signs(rotation, tl.arange(0, WIDTH), DIM) * SCALE)[None, :]


@triton.jit(do_not_specialize=["length"])
def _dequantize_kernel(
    packed, scale, zero, center, smooth, head_scale, rotation, out, strides, length,
    CODING: tl.constexpr, DIM: tl.constexpr, VALUE: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """One program = 64 tokens of one (sequence, KV head)."""
    BITS: tl.constexpr = CODING[0]
    WIDTH: tl.constexpr = triton.next_power_of_2(DIM)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    pair = batch * tl.num_programs(1) + head
    number = tl.program_id(0).to(tl.int64)
    block = packed + batch * strides[0] + head * strides[1] + number * (8 * DIM * BITS)
    token, channel = tl.arange(0, 64), tl.arange(0, WIDTH)
    at = number * BLOCK_TOKENS + token
    valid, inside = at < length, channel < DIM
    if VALUE:
        index, sign = _load_codes(block, channel, token, BLOCK_TOKENS, DIM, BITS)
        x = _value(index, sign, CODING)
        x = (x if CODING[1] == _PER_HEAD else x.to(tl.float16)).permute(1, 0)
    else:
        index, sign = _load_codes(block, token, channel, DIM, BLOCK_TOKENS, BITS)
        x = _value(index, sign, CODING)
    if CODING[1] == _PER_HEAD:
        x *= tl.load(head_scale + pair)
    else:
        x = x.to(tl.float16)
        if CODING[1] != _MIN_MAX:
            x = tl.where(inside[None, :], x, 0.0)
            x = _unrotate(x, rotation, DIM, WIDTH, TERMS)
        x = x.to(tl.float32)
        x *= tl.load(scale + batch * strides[2] + head * strides[3] + at, mask=valid, other=0).to(tl.float32)[:, None]
        if CODING[1] == _MIN_MAX:
            x += tl.load(zero + batch * strides[4] + head * strides[5] + at, mask=valid, other=0).to(tl.float32)[:, None]
    if smooth is not None:
        x *= tl.load(smooth + pair * DIM + channel, mask=inside, other=1)[None, :]
    if center is not None:
        x += tl.load(center + pair * DIM + channel, mask=inside, other=0)[None, :]
    out += (pair * length + at)[:, None] * DIM + channel[None, :]
    tl.store(out, x.to(out.dtype.element_ty), mask=valid[:, None] & inside[None, :])


def dequantize(side: Side, length: int, dtype: torch.dtype, *, value: bool) -> torch.Tensor:
    """The first `length` tokens of packed keys, or values, as vectors of the model: [B, H_kv, length, D] in `dtype`.

    `side.x` is not read and may be None; see `quantize.Side` for the rest.  `dtype`: bfloat16, float16 or float32.
    """
    dim = check_states(side, length)
    batch, heads = side.packed.shape[:2]
    out = torch.empty(batch, heads, length, dim, dtype=dtype, device=side.packed.device)
    if out.numel() == 0:
        return out
    factors = [(0, 0) if factor is None else factor.stride()[:2] for factor in (side.scale, side.zero)]
    backend, arch = target(side.packed.device)
    _dequantize_kernel[(triton.cdiv(length, 64), heads, batch)](
        *side[1:8], out, (*side.packed.stride()[:2], *factors[0], *factors[1]), length, CODING=tuple(side.coding),
        DIM=dim, VALUE=value, TERMS=0 if backend == "interpreter" or backend == "cuda" and arch < 80 else 1, num_warps=4,
    )  # fmt: skip
    return out
