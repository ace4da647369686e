"""Prefill over a packed past: attention of many queries over packed keys and values, then over exact ones.

First, rotation, smoothing and centre of the keys are undone in the query (`_prefill_query_kernel`):

    q . k_hat = (R (smooth q)) . (scale * codes) + q . center

Then come the packed tokens, in one of two ways:

tiles      Flash attention (`_prefill_packed_kernel`): codes become float16 in registers, are multiplied by their scales
           there, and go to the tensor cores from shared memory.  For every mask, soft cap, dtype and architecture.
segments   On Hopper and later, where cuDNN's attention is faster than what Triton compiles to: up to SEGMENT tokens at
           a time become float16 in a buffer (`_prefill_unpack_kernel`) and go through cuDNN; results are merged
           (`_prefill_merge_kernel`).  For queries that may see every packed token.

Last, rotation and centre of the values are undone in what came out, and flash attention goes on, with the same sum,
over the tokens that are still in the model's dtype: sinks, tail and the chunk itself (`_prefill_exact_kernel`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .primitives import BLOCK_TOKENS, decode2, decode3, decode4, parts

LOG2E = tl.constexpr(1.4426950408889634)
P_SHIFT = tl.constexpr(8.0)  # probabilities are scaled to at most 2**8: float16 then holds them down to 2**-32
SEGMENT = 16384  # tokens that are unpacked at a time: 64 MiB for 8 KV heads of 128 channels
SEGMENT_UNIT = 2048  # segments are multiples of this, since cuDNN spends 33 ms on every new size [H200]
QUERY_UNIT = 256  # queries are padded to multiples of this, likewise
SEGMENT_QUERIES = {True: 512, False: 256}  # with fewer queries, tiles; True: no codes below 8 bits


class Config(NamedTuple):
    """Launch parameters of `_prefill_packed_kernel`."""

    queries: int  # of a tile
    tokens: int  # of a tile, a multiple of BLOCK_TOKENS
    warps: int
    stages: int
    splits: int = 0  # of the packed tokens; 0: as many as fill the device


QUERY_TILE, UNPACK_TILE = (64, 4), (64, 4)  # rows and warps
ROOMY = 200 << 10  # bytes of shared memory: Hopper and data-centre Blackwell


class _Past(NamedTuple):
    """The packed tokens, as `prefill` takes them."""

    key: tuple[torch.Tensor, ...]
    value: tuple[torch.Tensor, ...]
    key_code: tuple
    value_code: tuple
    dim: int
    value_dim: int
    mode: tuple[bool, bool]  # PTX decoders, native e4m3

    @property
    def width(self) -> int:
        """Channels of a key as `_load_keys` has them."""
        bits = self.key_code[0]
        return _width(self.dim, bits) * parts(bits)

    @property
    def strides(self) -> tuple:
        return tuple(x.stride()[:2] for x in (*self.key, *self.value[:2]))

    @property
    def constants(self) -> dict:
        names = ("DIM", "VALUE_DIM", "KEY", "VALUE", "MODE")
        return dict(zip(names, (self.dim, self.value_dim, self.key_code, self.value_code, self.mode), strict=True))

    def starting(self, token: int) -> "_Past":
        """From `token`, the first of a block."""

        def cut(packed: torch.Tensor, *scales: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return packed[:, :, token // 64 :], *(x if x.dim() == 2 else x[:, :, token:] for x in scales)

        return self._replace(key=cut(*self.key), value=cut(*self.value))


@triton.constexpr_function
def _width(head_dim, bits):
    """Columns of one part of a key row, padded to a power of two."""
    return max(triton.next_power_of_2(head_dim // parts(bits)), 16)


# ------------------------------------------------------------------------------------------- packed rows to numbers


@triton.constexpr_function
def _ptx_part(part, bits, table, native):
    """PTX that turns the four codes of one part of a word (and its signs) into float16 outputs 4 * part + 0..3."""
    word, signs = (f"${4 * parts(bits) + i}" for i in range(2))
    look_up = f"prmt.b32 s, {table[0]:#x}, {table[1]:#x}, s;"
    if bits == 4:
        text = f"and.b32 s, {word}, 0x77777777; shr.u32 s, s, {16 * part}; shl.b32 t, {word}, {4 * part};"
        text += look_up + "lop3.b32 s, s, t, 0x80808080, 0xF8;"
    else:
        text = f"shr.u32 s, {word}, {2 * (part % 2)}; and.b32 s, s, 0x33333333;"
        if bits == 3:  # bring the signs to bit 2 of the selectors' nibbles, drawn in `tq_cache/packing.py`
            high, low, right, left = (("0x44004400", "0x00440044", 0, 1), ("0x00440044", "0x44004400", 1, 2))[part % 2]
            text += f"prmt.b32 t, {signs}, 0, 0x1100; shr.u32 u, t, {right}; shl.b32 t, t, {left};"
            text += f"and.b32 u, u, {low}; lop3.b32 u, t, {high}, u, 0xEA; or.b32 s, s, u;"
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
def _beside(x, y):
    """[R, W] and [R, W] to [R, 2W]; only names change, no register does."""
    return tl.join(x, y).permute(0, 2, 1).reshape(x.shape[0], 2 * x.shape[1])


@triton.jit
def _four(x, PART: tl.constexpr):
    """Outputs of one part, four of [R, W] each, interleaved: [R, 4W]."""
    even, odd = tl.join(x[4 * PART], x[4 * PART + 2]), tl.join(x[4 * PART + 1], x[4 * PART + 3])
    return tl.join(even, odd).reshape(even.shape[0], 4 * even.shape[1])


@triton.jit
def _decode_words(planes, BITS: tl.constexpr, TABLE: tl.constexpr, NATIVE: tl.constexpr):
    """Packed rows as 32-bit words (and 16-bit words of signs) to float16, the parts of a row side by side.

    Whole words are right in any register layout; bytes, decoded four at a time, would be right in some.
    """
    x = tl.inline_asm_elementwise(_ptx(BITS, TABLE, NATIVE), _constraints(BITS), planes, _halves(BITS), True, 1)
    y = _beside(_four(x, 0), _four(x, 1))
    if BITS != 4:
        y = _beside(y, _beside(_four(x, 2), _four(x, 3)))
    return y


@triton.jit
def _decode_bytes(planes, BITS: tl.constexpr, TABLE: tl.constexpr):
    """Packed rows as bytes to e4m3 bytes, in plain Triton, the parts of a row side by side."""
    if BITS == 4:
        return _beside(decode4(planes[0], 0, TABLE, False), decode4(planes[0], 1, TABLE, False))
    elif BITS == 2:
        x = _beside(decode2(planes[0], 0, TABLE, False), decode2(planes[0], 1, TABLE, False))
        return _beside(x, _beside(decode2(planes[0], 2, TABLE, False), decode2(planes[0], 3, TABLE, False)))
    else:
        low, signs = planes
        x = _beside(decode3(low, signs, 0, TABLE, False), decode3(low, signs, 1, TABLE, False))
        return _beside(x, _beside(decode3(low, signs, 2, TABLE, False), decode3(low, signs, 3, TABLE, False)))


@triton.jit
def _float8(x, E5M2: tl.constexpr, NATIVE: tl.constexpr, COMPUTE: tl.constexpr):
    """float8 bytes to numbers.  Not `NATIVE`: with integer arithmetic, which runs everywhere."""
    if E5M2:
        return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(COMPUTE)
    elif NATIVE:
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(COMPUTE)
    else:
        x = x.to(tl.uint16)
        half = (((x & 128) << 8) | ((x & 127) << 7)).to(tl.float16, bitcast=True).to(COMPUTE) * 256
        return tl.where((x & 127) == 127, float("nan"), half).to(COMPUTE)


@triton.jit
def _decode(planes, CODE: tl.constexpr, MODE: tl.constexpr, COMPUTE: tl.constexpr):
    """Planes of packed rows, as `_planes` cuts them, to numbers."""
    BITS: tl.constexpr = CODE[0]
    TABLE: tl.constexpr = CODE[1]
    NATIVE: tl.constexpr = MODE[1]
    if BITS == 8:
        return _float8(planes[0], TABLE[0] == 5, NATIVE, COMPUTE)
    elif MODE[0]:
        return _decode_words(planes, BITS, TABLE, NATIVE).to(COMPUTE)
    else:
        return _float8(_decode_bytes(planes, BITS, TABLE), False, False, COMPUTE)


# ---------------------------------------------------------------------------------------------------------- loading


@triton.constexpr_function
def _row(n, bits, plane, words):
    """Units of a plane's row of `n` codes.  A unit: 32-bit word of code bits, 16-bit word of signs; or a byte."""
    plane_bits = 1 if plane == 1 else 2 if bits == 3 else bits
    return n * plane_bits // 8 // _unit(plane, words)


@triton.constexpr_function
def _unit(plane, words):
    return (2 if plane == 1 else 4) if words else 1


@triton.jit
def _plane(base, start, DIM: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr, WORDS: tl.constexpr):
    """Pointer to the units of a plane of the block of token `start`."""
    base += tl.full((), BLOCK_TOKENS * DIM * BITS // 8, tl.int64) * (start // BLOCK_TOKENS)
    if PLANE == 1:
        base += BLOCK_TOKENS * DIM * 2 // 8
    if WORDS:
        base = base.to(tl.pointer_type(tl.int16 if PLANE == 1 else tl.int32))
    return base


@triton.jit
def _load_key_plane(
    base, start, order, blocks, DIM: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr, WORDS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One plane of keys `start` + `order` [N], [N, units], `_width` for each part."""
    ROW: tl.constexpr = _row(DIM, BITS, PLANE, WORDS)
    PADDED: tl.constexpr = _row(_width(DIM, BITS) * parts(BITS), BITS, PLANE, WORDS)
    BLOCK: tl.constexpr = BLOCK_TOKENS * DIM * BITS // 8 // _unit(PLANE, WORDS)
    unit = tl.arange(0, PADDED)
    pointer = _plane(base, start, DIM, BITS, PLANE, WORDS) + unit[None, :]
    pointer += (order // BLOCK_TOKENS * BLOCK + order % BLOCK_TOKENS * ROW)[:, None]
    if MASKED:
        return tl.load(pointer, mask=(unit < ROW)[None, :] & (start + order < blocks * BLOCK_TOKENS)[:, None], other=0)
    elif PADDED != ROW:
        return tl.load(pointer, mask=(unit < ROW)[None, :], other=0)
    else:
        return tl.load(pointer)


@triton.jit
def _load_value_plane(
    base, start, blocks, N: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr,
    PLANE: tl.constexpr, WORDS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One plane of N values from `start`, [CHANNELS, units], block after block along the row."""
    ROW: tl.constexpr = _row(BLOCK_TOKENS, BITS, PLANE, WORDS)
    BLOCK: tl.constexpr = BLOCK_TOKENS * DIM * BITS // 8 // _unit(PLANE, WORDS)
    unit, channel = tl.arange(0, _row(N, BITS, PLANE, WORDS)), tl.arange(0, CHANNELS)
    pointer = _plane(base, start, DIM, BITS, PLANE, WORDS) + (channel * ROW)[:, None]
    pointer += (unit // ROW * BLOCK + unit % ROW)[None, :]
    inside = (channel < DIM)[:, None]
    if MASKED:
        return tl.load(pointer, mask=inside & (unit // ROW + start // BLOCK_TOKENS < blocks)[None, :], other=0)
    elif CHANNELS != DIM:
        return tl.load(pointer, mask=inside, other=0)
    else:
        return tl.load(pointer)


@triton.jit
def _load_keys(
    base, start, order, blocks, scale, DIM: tl.constexpr, CODE: tl.constexpr, MODE: tl.constexpr,
    COMPUTE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys `start` + `order` [N] times their scales, [N, channels]: part by part, each padded to `_width`."""
    BITS: tl.constexpr = CODE[0]
    WORDS: tl.constexpr = MODE[0] and BITS != 8
    planes = (_load_key_plane(base, start, order, blocks, DIM, BITS, 0, WORDS, MASKED),)
    if BITS == 3:
        planes = planes + (_load_key_plane(base, start, order, blocks, DIM, BITS, 1, WORDS, MASKED),)
    return _decode(planes, CODE, MODE, COMPUTE) * (scale if BITS == 8 else scale[:, None]).to(COMPUTE)


@triton.jit
def _load_values(
    base, start, blocks, scales, N: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr, CODE: tl.constexpr,
    MODE: tl.constexpr, COMPUTE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Values of N tokens from `start` times scale plus zero, [channels, N], in the order of `_tile_order`."""
    BITS: tl.constexpr = CODE[0]
    WORDS: tl.constexpr = MODE[0] and BITS != 8
    planes = (_load_value_plane(base, start, blocks, N, DIM, CHANNELS, BITS, 0, WORDS, MASKED),)
    if BITS == 3:
        planes = planes + (_load_value_plane(base, start, blocks, N, DIM, CHANNELS, BITS, 1, WORDS, MASKED),)
    x = _decode(planes, CODE, MODE, COMPUTE)
    if BITS != 8:
        x *= scales[1][None, :].to(COMPUTE)
    if len(scales) == 3:
        x += scales[2][None, :].to(COMPUTE)
    return x


@triton.jit
def _tile_order(BITS: tl.constexpr, N: tl.constexpr):
    """Tokens of a tile in the order in which `_decode` puts the columns of value rows: part, block, token."""
    column = tl.arange(0, N)
    SPAN: tl.constexpr = BLOCK_TOKENS // parts(BITS)
    BLOCKS: tl.constexpr = N // BLOCK_TOKENS
    return column // (SPAN * BLOCKS) * SPAN + column // SPAN % BLOCKS * BLOCK_TOKENS + column % SPAN


@triton.jit
def _scale_pointers(key, value, batch, head, strides):
    """Where the scales of keys, scales of values and zeros of values (if any) of a KV head are."""
    place = batch * strides[3][0] + head * strides[3][1]
    pointers = (key[1] + batch * strides[1][0] + head * strides[1][1], value[1] + place)
    if len(value) == 3:
        pointers = pointers + (value[2] + place,)
    return pointers


@triton.jit
def _load_scales(pointers, start, order, end, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr):
    """Scales of keys, scales and zeros of values of tokens `start` + `order`, [N] each; of float8 formats, one number.

    Loaded in a few equal rows: a tensor of fewer elements than threads would be loaded anew by every thread, element
    by element, in the layout of its use.
    """
    ROWS: tl.constexpr = max(256 // order.shape[0], 1)
    offset = (start + order)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    loaded = ()
    for i in tl.static_range(len(pointers)):
        if (KEY_BITS if i == 0 else VALUE_BITS) == 8:
            loaded = loaded + (tl.load(pointers[i]),)
        else:
            loaded = loaded + (tl.max(tl.load(pointers[i] + offset, mask=offset < end, other=0), 0),)
    return loaded


# --------------------------------------------------------------------------------------------------------- attention


@triton.jit
def _rotate(x, matrix, TRANSPOSED: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    """float32 x @ matrix, whose rows (columns if TRANSPOSED) have elements of one size: for float16 they become +-1."""
    if COMPUTE == tl.float32:
        return tl.dot(x, matrix, input_precision=PRECISION)
    elif TRANSPOSED:
        size = tl.maximum(tl.max(tl.abs(matrix), 0), 1e-30)[None, :]
        return tl.dot(x.to(COMPUTE), (matrix / size).to(COMPUTE)) * size
    else:
        size = tl.maximum(tl.max(tl.abs(matrix), 1), 1e-30)
        return tl.dot((x * size[None, :]).to(COMPUTE), (matrix / size[:, None]).to(COMPUTE))


@triton.jit
def _masked(s, mask, row, token, inside, strides, SOFTCAP: tl.constexpr, softcap):
    """Scores (base 2) after soft cap and mask: added if a float, and -inf where False if a bool (as bytes)."""
    if SOFTCAP:
        cap = softcap * LOG2E
        s = cap - 2 * cap / (1 + tl.exp2(s * (2 * LOG2E / cap)))  # cap * tanh(s / cap), s being base 2
    if mask is not None:
        mask += row[:, None].to(tl.int64) * strides[2] + token[None, :] * strides[3]
        m = tl.load(mask, mask=inside, other=0)
        if m.dtype == tl.uint8:
            s = tl.where(m != 0, s, float("-inf"))
        else:
            s += m.to(tl.float32) * LOG2E
    return s


@triton.jit
def _accumulate(s, v, state, PRECISION: tl.constexpr):
    """One step of online softmax: scores [M, N] in base 2, values [N, channels]."""
    peak = tl.maximum(state[0], tl.max(s, 1))
    alpha = tl.exp2(state[0] - peak)
    p = tl.exp2(s - (peak - P_SHIFT)[:, None])
    total = state[1] * alpha + tl.sum(p, 1)
    return peak, total, tl.dot(p.to(v.dtype), v, state[2] * alpha[:, None], input_precision=PRECISION)


@triton.jit
def _log_sum(state):
    """Log-sum-exp in base 2."""
    return tl.where(state[1] > 0, state[0] - P_SHIFT + tl.log2(tl.maximum(state[1], 1e-30)), float("-inf"))


@triton.jit
def _packed_tile(
    q, shift, packed, scales, start, end, state, row, mask, sizes, softcap, strides, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MODE: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, N: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One step over the packed tokens from `start`; `FULL`: all N of them are there."""
    VALUE_BITS: tl.constexpr = VALUE[0]
    blocks, order = tl.cdiv(end, BLOCK_TOKENS), _tile_order(VALUE_BITS, N)
    k = _load_keys(packed[0], start, order, blocks, scales[0], DIM, KEY, MODE, q.dtype, not FULL)
    s = tl.dot(q, k.T, input_precision=PRECISION)
    v = _load_values(packed[1], start, blocks, scales, N, VALUE_DIM, state[2].shape[1], VALUE, MODE, q.dtype, not FULL)
    there = start + order < end
    if SOFTCAP:
        s += shift[:, None]
    if SOFTCAP or mask is not None:
        inside = (row < sizes[0])[:, None] & there[None, :]
        s = _masked(s, mask, row, start + order + sizes[3], inside, strides, SOFTCAP, softcap)
    if not FULL:  # what lies behind the last token may be NaN
        s = tl.where(there[None, :], s, float("-inf"))
        v = tl.where(there[None, :], v, 0)
    return _accumulate(s, v.T, state, PRECISION)


@triton.jit
def _exact_tile(
    q, keys, values, start, state, row, mask, sizes, factors, strides, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One step over the exact tokens from `start`."""
    token, channel, value_channel = start + tl.arange(0, N), tl.arange(0, q.shape[1]), tl.arange(0, state[2].shape[1])
    there, address = token < sizes[2], token.to(tl.int64)
    used = there[None, :] & (channel < DIM)[:, None]
    k = tl.load(keys + address[None, :] * strides[1][2] + channel[:, None], mask=used, other=0)
    s = tl.dot(q, k, input_precision=PRECISION) * factors[0]
    used = there[:, None] & (value_channel < VALUE_DIM)[None, :]
    v = tl.load(values + address[:, None] * strides[2][2] + value_channel[None, :], mask=used, other=0)
    seen = there[None, :]
    if SOFTCAP or mask is not None:
        place = token + tl.where(token < sizes[3], 0, sizes[1])
        s = _masked(s, mask, row, place, seen & (row < sizes[0])[:, None], strides[3], SOFTCAP, factors[1])
    if CAUSAL:
        seen = seen & (token[None, :] <= row[:, None] + (sizes[2] - sizes[0]))
    return _accumulate(tl.where(seen, s, float("-inf")), v, state, PRECISION)


@triton.jit
def _merge_splits(partial, partial_lse, splits, step, M: tl.constexpr, CHANNELS: tl.constexpr, DIM: tl.constexpr):
    """Joins `splits` outputs [M, CHANNELS] and base-2 log-sum-exps [M], `step` rows apart; without P_SHIFT."""
    channel = tl.arange(0, CHANNELS)
    peak, total, acc = tl.full((M,), -1e30, tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M, CHANNELS), tl.float32)
    for split in range(splits):
        part = tl.load(partial_lse + split * step)
        highest = tl.maximum(peak, part)
        old, new = tl.exp2(peak - highest), tl.exp2(part - highest)
        x = tl.load((partial + split * step * DIM)[:, None] + channel[None, :], mask=(channel < DIM)[None, :], other=0)
        peak, total = highest, total * old + new
        acc = acc * old[:, None] + x.to(tl.float32) * new[:, None]
    return peak, total, acc / tl.maximum(total, 1e-30)[:, None]


@triton.jit
def _unrotate(x, rotation, center, seen, COMPUTE: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr):
    """Output rows [M, channels] with rotation and centre of the values undone; the centre only in rows that `seen`."""
    channel = tl.arange(0, x.shape[1])
    if rotation is not None:
        used = (channel < DIM)[:, None] & (channel < DIM)[None, :]
        matrix = tl.load(rotation + channel[:, None] * DIM + channel[None, :], mask=used, other=0)
        x = _rotate(x, matrix, False, COMPUTE, PRECISION)
    if center is not None:
        x += tl.where(seen[:, None], tl.load(center + channel, mask=channel < DIM, other=0)[None, :], 0)
    return x


@triton.jit
def _with_extra_logit(state, logit):
    """One more logit [M], which takes weight and gives nothing."""
    logit = logit.to(tl.float32) * LOG2E
    peak = tl.maximum(state[0], logit)
    alpha = tl.exp2(state[0] - peak)
    return peak, state[1] * alpha + tl.exp2(logit - peak + P_SHIFT), state[2] * alpha[:, None]


# ----------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _prefill_query_kernel(
    query, rotation, smooth, center, rotated, offset, count, rows, factor, strides,
    DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """One program = M queries of one query head, times `factor`, brought into the space of the key codes.

    rotated [B, H_q, rows, channels as in `_load_keys`]: zeros behind the last query.  `offset` [B, H_q, rows] gets the
    product with the centre of the keys.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    pair = batch * (tl.num_programs(1) // GROUP) + head // GROUP
    WIDTH: tl.constexpr = _width(DIM, BITS)
    row, channel = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, max(triton.next_power_of_2(DIM), 16))
    query += batch * strides[0] + head * strides[1] + row[:, None].to(tl.int64) * strides[2] + channel[None, :]
    used = (row < count)[:, None] & (channel < DIM)[None, :]
    q = tl.load(query, mask=used, other=0).to(tl.float32) * factor
    index = (batch * tl.num_programs(1) + head) * rows + row
    if center is not None:
        product = tl.sum(q * tl.load(center + pair * DIM + channel, mask=channel < DIM, other=0)[None, :], 1)
        tl.store(offset + index, product, mask=row < rows)
    if smooth is not None:
        q *= tl.load(smooth + pair * DIM + channel, mask=channel < DIM, other=0)[None, :]
    if rotation is not None:
        column = tl.arange(0, WIDTH * parts(BITS))
        used = (column % WIDTH < DIM // parts(BITS))[None, :] & (channel < DIM)[:, None]
        source = column // WIDTH * (DIM // parts(BITS)) + column % WIDTH
        matrix = tl.load(rotation + source[None, :] * DIM + channel[:, None], mask=used, other=0)
        q = _rotate(q, matrix, True, rotated.dtype.element_ty, PRECISION)
    column = tl.arange(0, q.shape[1])
    q = q.to(rotated.dtype.element_ty)
    tl.store(rotated + index[:, None] * q.shape[1] + column[None, :], q, mask=(row < rows)[:, None])


@triton.jit
def _prefill_packed_kernel(
    rotated, offset, key, value, mask, partial, partial_lse, sizes, softcap, strides,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MODE: tl.constexpr,
    GROUP: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program = M queries of one query head of one sequence, over one split of the packed tokens.

    key = (packed, scale), value = (packed, scale[, zero]), sizes = (queries, packed tokens, exact tokens, sinks among
    them, rows of `rotated` and `partial`), strides = (key, key scale, value, value scale, mask), KEY and VALUE = (bits,
    table), MODE = (PTX decoders, native e4m3).  The state is (largest score, sum, accumulator), scores in base 2.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    kv_head = head // GROUP
    CHANNELS: tl.constexpr = max(triton.next_power_of_2(VALUE_DIM), 16)
    KEY_BITS: tl.constexpr = KEY[0]
    VALUE_BITS: tl.constexpr = VALUE[0]
    WIDTH: tl.constexpr = _width(DIM, KEY_BITS) * parts(KEY_BITS)
    blocks = tl.cdiv(sizes[0], M)
    split, splits = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    length = tl.cdiv(tl.cdiv(sizes[1], N), splits) * N
    first = split * length
    end = tl.minimum(first + length, sizes[1])
    row = tl.program_id(0) % blocks * M + tl.arange(0, M)
    inside = row < sizes[0]
    index = (batch * tl.num_programs(1) + head) * sizes[4] + row
    if mask is not None:
        mask += batch * strides[4][0] + head * strides[4][1]
    packed = (
        key[0] + batch * strides[0][0] + kv_head * strides[0][1],
        value[0] + batch * strides[2][0] + kv_head * strides[2][1],
    )  # fmt: skip
    pointers = _scale_pointers(key, value, batch, kv_head, strides)

    q = tl.load(rotated + index[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], mask=inside[:, None], other=0)
    shift = tl.zeros((M,), tl.float32)
    if offset is not None:
        shift = tl.load(offset + index, mask=inside, other=0)
    state = (tl.full((M,), -1e30, tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M, CHANNELS), tl.float32))
    order = _tile_order(VALUE_BITS, N)
    scales = _load_scales(pointers, first, order, end, KEY_BITS, VALUE_BITS)
    for start in tl.range(first, end // N * N, N):
        coming = _load_scales(pointers, start + N, order, end, KEY_BITS, VALUE_BITS)  # a step ahead: nothing waits
        state = _packed_tile(
            q, shift, packed, scales, start, end, state, row, mask, sizes, softcap, strides[4], DIM, VALUE_DIM, KEY,
            VALUE, MODE, SOFTCAP, PRECISION, N, True,
        )  # fmt: skip
        scales = coming
    for start in tl.range(tl.maximum(end // N * N, first), end, N, num_stages=1):  # at most once
        state = _packed_tile(
            q, shift, packed, scales, start, end, state, row, mask, sizes, softcap, strides[4], DIM, VALUE_DIM, KEY,
            VALUE, MODE, SOFTCAP, PRECISION, N, False,
        )  # fmt: skip

    acc = state[2] / tl.maximum(state[1], 1e-30)[:, None]
    if VALUE_BITS == 8:
        acc *= tl.load(pointers[1])
    lse = _log_sum(state)
    if not SOFTCAP:  # the same for all scores of a query: softmax does not feel it
        lse += shift
    index += split * (tl.num_programs(2) * tl.num_programs(1)).to(tl.int64) * sizes[4]
    tl.store(partial_lse + index, lse, mask=inside)
    channel = tl.arange(0, CHANNELS)
    used = inside[:, None] & (channel < VALUE_DIM)[None, :]
    tl.store(partial + index[:, None] * VALUE_DIM + channel[None, :], acc.to(partial.dtype.element_ty), mask=used)


@triton.jit
def _prefill_unpack_kernel(
    key, value, keys, values, first, count, strides,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MODE: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """One program = N of `count` packed tokens of one KV head, from token `first`, times their scales.

    Written as keys [B, H_kv, count, channels as in `_load_keys`] and values [B, H_kv, count, D_v], not rotated back.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    COMPUTE: tl.constexpr = keys.dtype.element_ty
    KEY_BITS: tl.constexpr = KEY[0]
    VALUE_BITS: tl.constexpr = VALUE[0]
    WIDTH: tl.constexpr = _width(DIM, KEY_BITS) * parts(KEY_BITS)
    CHANNELS: tl.constexpr = max(triton.next_power_of_2(VALUE_DIM), 16)
    order, start = _tile_order(VALUE_BITS, N), first + tl.program_id(0) * N
    pointers = _scale_pointers(key, value, batch, head, strides)
    scales = _load_scales(pointers, start, order, first + count, KEY_BITS, VALUE_BITS)
    key_packed = key[0] + batch * strides[0][0] + head * strides[0][1]
    k = _load_keys(key_packed, start, order, 0, scales[0], DIM, KEY, MODE, COMPUTE, False)
    value_packed = value[0] + batch * strides[2][0] + head * strides[2][1]
    v = _load_values(value_packed, start, 0, scales, N, VALUE_DIM, CHANNELS, VALUE, MODE, COMPUTE, False)
    if VALUE_BITS == 8:
        v *= scales[1].to(COMPUTE)
    row = (batch * tl.num_programs(1) + head) * count + tl.program_id(0) * N + order
    tl.store(keys + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], k)
    channel = tl.arange(0, CHANNELS)
    tl.store(values + row[:, None] * VALUE_DIM + channel[None, :], v.T, mask=(channel < VALUE_DIM)[None, :])


@triton.jit
def _prefill_merge_kernel(
    first, first_lse, second, second_lse, offset, out, out_lse, rows, strides, DIM: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """One program = M queries of one query head: merges attention over two spans of the packed tokens.

    `second_lse` is a natural logarithm, without `offset`; `first_lse` and `out_lse` have base 2.  Never in place: one
    warp would write a log-sum-exp that another has yet to read.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, channel = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, max(triton.next_power_of_2(DIM), 16))
    inside = row < rows
    used = inside[:, None] & (channel < DIM)[None, :]
    index = (batch * tl.num_programs(1) + head) * rows + row
    second_lse += batch * strides[1][0] + head * strides[1][1] + row * strides[1][2]
    new_lse = tl.load(second_lse, mask=inside, other=0) * LOG2E
    if offset is not None:
        new_lse += tl.load(offset + index, mask=inside, other=0)
    old_lse = tl.load(first_lse + index, mask=inside, other=0)
    peak = tl.maximum(old_lse, new_lse)
    old, new = tl.exp2(old_lse - peak), tl.exp2(new_lse - peak)
    place = index[:, None] * DIM + channel[None, :]
    second += batch * strides[0][0] + head * strides[0][1] + row[:, None].to(tl.int64) * strides[0][2]
    x = tl.load(first + place, mask=used, other=0).to(tl.float32) * (old / (old + new))[:, None]
    x += tl.load(second + channel[None, :], mask=used, other=0).to(tl.float32) * (new / (old + new))[:, None]
    tl.store(out + place, x.to(out.dtype.element_ty), mask=used)
    tl.store(out_lse + index, peak + tl.log2(old + new), mask=inside)


@triton.jit
def _prefill_exact_kernel(
    query, keys, values, partial, partial_lse, rotation, center, mask, s_aux, out, lse, sizes, splits, factors, strides,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One program = M queries of one query head of one sequence: goes on from the packed tokens over the exact ones.

    factors = (scaling * log2 e, soft cap), strides = (query, keys, values, mask, s_aux), `sizes` as in
    `_prefill_packed_kernel`.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    heads, kv_head = tl.num_programs(1), head // GROUP
    COMPUTE: tl.constexpr = tl.float32 if query.dtype.element_ty == tl.float32 else tl.float16
    CHANNELS: tl.constexpr = max(triton.next_power_of_2(VALUE_DIM), 16)
    row = tl.program_id(0) * M + tl.arange(0, M)
    inside = row < sizes[0]
    index = (batch * heads + head) * sizes[4] + tl.minimum(row, sizes[0] - 1)
    if center is not None:
        center += (batch * (heads // GROUP) + kv_head) * VALUE_DIM
    step = (tl.num_programs(2) * heads).to(tl.int64) * sizes[4]
    state = _merge_splits(partial + index * VALUE_DIM, partial_lse + index, splits, step, M, CHANNELS, VALUE_DIM)
    acc = _unrotate(state[2], rotation, center, state[1] > 0, COMPUTE, VALUE_DIM, PRECISION)
    total = state[1] * 256.0  # 2 ** P_SHIFT
    state = (state[0], total, acc * total[:, None])

    channel, value_channel = tl.arange(0, max(triton.next_power_of_2(DIM), 16)), tl.arange(0, CHANNELS)
    query += batch * strides[0][0] + head * strides[0][1]
    query += row[:, None].to(tl.int64) * strides[0][2] + channel[None, :]
    q = tl.load(query, mask=inside[:, None] & (channel < DIM)[None, :], other=0)
    keys += batch * strides[1][0] + kv_head * strides[1][1]
    values += batch * strides[2][0] + kv_head * strides[2][1]
    if mask is not None:
        mask += batch * strides[3][0] + head * strides[3][1]
    end = sizes[2]
    if CAUSAL:
        end = tl.minimum(end, sizes[2] - sizes[0] + (tl.program_id(0) + 1) * M)
    for start in tl.range(0, end, N):
        state = _exact_tile(
            q, keys, values, start, state, row, mask, sizes, factors, strides, DIM, VALUE_DIM, CAUSAL, SOFTCAP,
            PRECISION, N,
        )  # fmt: skip
    if s_aux is not None:
        s_aux += batch * strides[4][0] + head * strides[4][1] + row * strides[4][2]
        state = _with_extra_logit(state, tl.load(s_aux, mask=inside, other=float("-inf")))
    index = (batch * heads + head) * sizes[0] + row
    acc = (state[2] / tl.maximum(state[1], 1e-30)[:, None]).to(out.dtype.element_ty)
    used = inside[:, None] & (value_channel < VALUE_DIM)[None, :]
    tl.store(out + index[:, None] * VALUE_DIM + value_channel[None, :], acc, mask=used)
    tl.store(lse + index, _log_sum(state) / LOG2E, mask=inside)


# ---------------------------------------------------------------------------------------------------------- launching


def prefill(
    query: torch.Tensor, key: tuple[torch.Tensor, ...], value: tuple[torch.Tensor, ...],
    keys: torch.Tensor, values: torch.Tensor, *, packed_length: int, scaling: float, key_code: tuple, value_code: tuple,
    sinks: tuple[torch.Tensor, torch.Tensor] | None = None, smooth: torch.Tensor | None = None,
    rotations: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    centers: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    mask: torch.Tensor | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    causal: bool = True, config: Config | None = None, segments: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention of many queries over sinks, packed tokens and exact tokens, in this order.

    query:        [B, H_q, S, D], bfloat16, float16 or float32
    key, value:   (packed, scale) and (packed, scale[, zero]), at least `packed_length` > 0 tokens: packed uint8 [B,
                  H_kv, blocks, bytes of a block]; scale and zero float16 [B, H_kv, tokens], or, of float8 formats,
                  float32 [B, H_kv].  The last dimension of all is contiguous.
    keys, values: [B, H_kv, n, D], [B, H_kv, n, D_v] in the query's dtype, the last dimension contiguous
    key_code:     (bits, what `decode.code_table` gives), or (8, (4, 3)) for e4m3, (8, (5, 2)) for e5m2; value_code too
    sinks:        first keys and values, like `keys` and `values`
    smooth:       float32 [B, H_kv, D]; centers: of keys and of values, float32 [B, H_kv, D or D_v]
    rotations:    of keys and of values, Hadamard blocks with signs, float32 [D, D] (x @ R.T rotates), or None
    mask:         [B or 1, H_q or 1, S, all tokens or more], bool (True takes part) or float (added), or None: causal,
                  the last query seeing every token, or everything if not `causal`
    s_aux:        [1 or B, H_q, 1 or S] or [H_q], one more logit per query that takes weight and gives nothing
    segments:     force one of the two ways (see above); config: launch parameters of the tiles

    Returns the output [B, H_q, S, D_v] in the query's dtype, contiguous, and the natural log of the softmax' sum,
    float32 [B, H_q, S].  A query that may see no token gets zeros and -inf.
    """
    past = _Past(key, value, key_code, value_code, query.shape[3], values.shape[3], _mode(query.device))
    sink_count = 0 if sinks is None else sinks[0].shape[2]
    if sinks is not None:
        keys, values = torch.cat([sinks[0], keys], 2), torch.cat([sinks[1], values], 2)
    _check(query, past, keys, values, packed_length, causal and mask is None)
    if mask is not None:
        mask = mask.expand(query.shape[0], query.shape[1], -1, -1)
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    if segments is None:
        segments = mask is None and softcap is None and _has_fast_segments(query, past, packed_length)
    rows = triton.cdiv(query.shape[2], QUERY_UNIT) * QUERY_UNIT if segments else query.shape[2]
    sizes = (query.shape[2], packed_length, keys.shape[2], sink_count, rows)
    rotated, offset = _rotate_query(query, past, rows, scaling, rotations[0], smooth, centers[0])
    if segments:
        partial = _attend_segments(rotated, offset, past, sizes)
    else:
        partial = _attend_tiles(rotated, offset, past, sizes, mask, softcap, config or choose(query, past))
    factors = (scaling * LOG2E.value, softcap)
    return _attend_exact(query, keys, values, partial, rotations[1], centers[1], mask, s_aux, sizes, factors, causal)


def choose(query: torch.Tensor, past: _Past) -> Config:
    """Launch parameters of the tiles.  Measured: float16 products, 128 channels, an H200."""
    wide, roomy = max(past.dim, past.value_dim) > 128, _shared_memory(query.device) >= ROOMY
    if query.dtype == torch.float32:
        return Config(64, 64, 4, 2) if roomy and not wide else Config(32 if roomy else 16, 64, 4, 1)
    if wide or not roomy:
        return Config(64, 64, 4, 2 if roomy else 1)
    if query.shape[2] <= 64:
        return Config(64, 128, 4, 2)
    return Config(128, 64, 4, 3) if past.key_code[0] == past.value_code[0] == 8 else Config(128, 128, 8, 3)


def _choose_exact(query: torch.Tensor, value_dim: int, rotated: bool) -> Config:
    """Launch parameters of `_prefill_exact_kernel`."""
    wide, roomy = max(query.shape[3], value_dim) > 128, _shared_memory(query.device) >= ROOMY
    if query.dtype == torch.float32:
        return Config(32, 32, 4, 1) if wide or not roomy else Config(64, 32, 4, 2)
    if wide or not roomy:
        return Config(64, 32, 4, 2 if roomy else 1)
    return Config(64, 64, 4, 2 if rotated else 3)


def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may use."""
    if device.type != "cuda":
        return 0
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 1 << 16)


def _mode(device: torch.device) -> tuple[bool, bool]:
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia, nvidia and torch.cuda.get_device_capability(device) >= (8, 9)


def _precision(device: torch.device) -> str:
    """How float32 products are made."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return "tf32x3" if nvidia and torch.cuda.get_device_capability(device) >= (8, 0) else "ieee"


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float32 else torch.float16


def _check(query, past, keys, values, packed_length, causal) -> None:
    batch, heads, count, dim = query.shape
    kv_heads = keys.shape[1]
    if (
        query.dtype not in (torch.bfloat16, torch.float16, torch.float32)
        or not query.dtype == keys.dtype == values.dtype
    ):
        raise ValueError(
            "expected query, keys and values of one dtype, bfloat16, float16 or float32, "
            f"got {query.dtype}, {keys.dtype} and {values.dtype}"
        )
    if heads % kv_heads or keys.shape[:3] != values.shape[:3] or keys.shape[::3] != (batch, dim):
        raise ValueError(
            "expected query [B, H_q, S, D], keys [B, H_kv, n, D] and values [B, H_kv, n, D_v], H_q a multiple of H_kv, "
            f"got {list(query.shape)}, {list(keys.shape)} and {list(values.shape)}"
        )
    capacity = past.key[0].shape[2] * 64
    if not 0 < packed_length <= capacity:
        raise ValueError(
            f"expected a packed_length from 1 to {capacity}, the tokens there is room for, got {packed_length}"
        )
    if causal and keys.shape[2] < count:
        raise ValueError(
            f"expected the {count} tokens of the queries among the exact ones, got {keys.shape[2]} exact tokens; "
            "give a mask, or causal=False"
        )
    if any(x.stride(-1) != 1 for x in (query, keys, values, *past.key, *past.value)):
        raise ValueError("expected tensors whose last dimension is contiguous; call .contiguous()")


def _has_fast_segments(query: torch.Tensor, past: _Past, packed_length: int) -> bool:
    """Whether cuDNN's attention is there and worth it; below Hopper it was not measured."""
    if not past.mode[0] or query.dtype == torch.float32 or packed_length < SEGMENT_UNIT:
        return False
    if torch.cuda.get_device_capability(query.device) < (9, 0):
        return False
    if query.shape[2] < SEGMENT_QUERIES[past.key_code[0] == past.value_code[0] == 8]:
        return False
    like = query.new_empty(1, 1, QUERY_UNIT, past.width, dtype=torch.float16)
    value = query.new_empty(1, 1, QUERY_UNIT, past.value_dim, dtype=torch.float16)
    parameters = torch.backends.cuda.SDPAParams(like, like, value, None, 0.0, False, False)
    return torch.backends.cuda.can_use_cudnn_attention(parameters)


def _rotate_query(query, past, rows, scaling, rotation, smooth, center) -> tuple[torch.Tensor, torch.Tensor | None]:
    batch, heads, count, dim = query.shape
    if rotation is not None and _rotates_outside(query.dtype, dim, query.device):
        return _rotate_query_outside(query, past, rows, scaling, rotation, smooth, center)
    rotated = query.new_empty(batch, heads, rows, past.width, dtype=_compute_dtype(query.dtype))
    offset = None if center is None else query.new_empty(batch, heads, rows, dtype=torch.float32)
    tile, warps = (32, 4) if query.dtype == torch.float32 or dim > 128 else QUERY_TILE
    _prefill_query_kernel[triton.cdiv(rows, tile), heads, batch](
        query, rotation, smooth, center, rotated, offset, count, rows, scaling * LOG2E.value, query.stride()[:3],
        DIM=dim, BITS=past.key_code[0], GROUP=heads // past.key[0].shape[1], PRECISION=_precision(query.device), M=tile,
        num_warps=warps,
    )  # fmt: skip
    return rotated, offset


def _rotates_outside(dtype: torch.dtype, dim: int, device: torch.device) -> bool:
    """Whether a rotation is too large for shared memory, and left to torch."""
    size = triton.next_power_of_2(dim) ** 2 * _compute_dtype(dtype).itemsize
    return device.type == "cuda" and size > 0.7 * _shared_memory(device)


def _rotate_query_outside(query, past, rows, scaling, rotation, smooth, center):
    """What `_prefill_query_kernel` does."""
    kv_heads, bits = past.key[0].shape[1], past.key_code[0]
    x = torch.nn.functional.pad(query.float() * (scaling * LOG2E.value), (0, 0, 0, rows - query.shape[2]))
    x = x.unflatten(1, (kv_heads, -1))
    offset = None if center is None else (x @ center[:, :, None, :, None])[..., 0].flatten(1, 2).contiguous()
    if smooth is not None:
        x = x * smooth[:, :, None, None]
    x = x @ rotation.T
    padding = _width(past.dim, bits) - past.dim // parts(bits)
    x = torch.nn.functional.pad(x.unflatten(-1, (parts(bits), -1)), (0, padding))
    return x.flatten(-2).flatten(1, 2).to(_compute_dtype(query.dtype)).contiguous(), offset


def _attend_tiles(rotated, offset, past, sizes, mask, softcap, config) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [splits, B, H_q, rows, D_v] and base-2 log-sum-exps [splits, B, H_q, rows] over the packed tokens."""
    batch, heads, rows, _ = rotated.shape
    blocks = triton.cdiv(sizes[0], config.queries)
    splits = config.splits or _choose_splits(blocks * heads * batch, sizes[1], rotated.device)
    partial = rotated.new_empty(splits, batch, heads, rows, past.value_dim)
    partial_lse = rotated.new_empty(splits, batch, heads, rows, dtype=torch.float32)
    _prefill_packed_kernel[blocks * splits, heads, batch](
        rotated, offset, past.key, past.value, mask, partial, partial_lse, sizes, softcap or 0.0,
        (*past.strides, (0, 0, 0, 0) if mask is None else mask.stride()), **past.constants,
        GROUP=heads // past.key[0].shape[1], SOFTCAP=softcap is not None, PRECISION=_precision(rotated.device),
        M=config.queries, N=config.tokens, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return partial, partial_lse


def _choose_splits(programs: int, tokens: int, device: torch.device) -> int:
    """Splits of at least 1,024 tokens, so many that every multiprocessor has two programs."""
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, min(2 * count // programs, tokens // 1024, 32))


def _attend_segments(rotated, offset, past, sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_attend_tiles`, in one split."""
    rest = sizes[1] % SEGMENT_UNIT
    out = lse = None
    if rest:
        config = choose(rotated, past)._replace(splits=1)
        last = (rotated.shape[2], rest, *sizes[2:])
        out, lse = _attend_tiles(rotated, offset, past.starting(sizes[1] - rest), last, None, None, config)
        out, lse = out[0], lse[0]
    for start in range(0, sizes[1] - rest, SEGMENT):
        more = _cudnn_attention(rotated, *_unpack(past, start, min(SEGMENT, sizes[1] - rest - start), rotated.dtype))
        if out is None or lse is None:
            out, lse = more[0].contiguous(), more[1] * LOG2E.value
            lse = lse if offset is None else lse.add_(offset)
        else:
            out, lse = _merge(out, lse, *more, offset)
    return out[None], lse[None]


def _unpack(past: _Past, start: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `count` tokens from `start`, times their scales, not rotated back."""
    batch, kv_heads = past.key[0].shape[:2]
    keys, values = (past.key[0].new_empty(batch, kv_heads, count, n, dtype=dtype) for n in (past.width, past.value_dim))
    tile, warps = UNPACK_TILE
    _prefill_unpack_kernel[count // tile, kv_heads, batch](
        past.key, past.value, keys, values, start, count, past.strides, **past.constants, N=tile, num_warps=warps
    )
    return keys, values


def _merge(first, first_lse, second, second_lse, offset) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, dim = first.shape
    out, lse = torch.empty_like(first), torch.empty_like(first_lse)
    strides = (second.stride()[:3], second_lse.stride())
    _prefill_merge_kernel[triton.cdiv(rows, 32), heads, batch](
        first, first_lse, second, second_lse, offset, out, lse, rows, strides, DIM=dim, M=32, num_warps=4
    )
    return out, lse


def _cudnn_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and natural log-sum-exp.  The query holds scaling * log2 e; here log2 e is taken out again."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = attend(query, keys, values, None, True, 0.0, False, False, scale=1 / LOG2E.value)
    return out, lse.reshape(lse.shape[:3])


def _attend_exact(query, keys, values, partial, rotation, center, mask, s_aux, sizes, factors, causal):
    batch, heads, count, dim = query.shape
    value_dim = values.shape[3]
    out = query.new_empty(batch, heads, count, value_dim)
    lse = query.new_empty(batch, heads, count, dtype=torch.float32)
    if s_aux is not None:
        s_aux = (s_aux[None, :, None] if s_aux.dim() == 1 else s_aux).expand(batch, heads, count)
    strides = (
        *(x.stride()[:3] for x in (query, keys, values)),
        (0, 0, 0, 0) if mask is None else mask.stride(),
        (0, 0, 0) if s_aux is None else s_aux.stride(),
    )
    if rotation is not None and _rotates_outside(query.dtype, value_dim, query.device):
        partial, rotation = ((partial[0].float() @ rotation).to(partial[0].dtype), partial[1]), None
    tile = _choose_exact(query, value_dim, rotation is not None)
    _prefill_exact_kernel[triton.cdiv(count, tile.queries), heads, batch](
        query, keys, values, *partial, rotation, center, mask, s_aux, out, lse, sizes, partial[0].shape[0],
        (factors[0], factors[1] or 0.0), strides, DIM=dim, VALUE_DIM=value_dim, GROUP=heads // keys.shape[1],
        CAUSAL=causal and mask is None, SOFTCAP=factors[1] is not None, PRECISION=_precision(query.device),
        M=tile.queries, N=tile.tokens, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse
