"""Packed rows to numbers, in registers: what prefill and dequantise share.

Rows are drawn in `tq_cache/formats/packing.py`.  They come in parts: whole, halves (4 bits) or quarters (3, 2), which
a decoder puts side by side.  So a tile of keys is [tokens, channels] with every part of a row padded to `width`
columns (`key_channels` says which channel a column is), and a tile of values is [channels, tokens] with the tokens in
the order of `tile_order`.  Numbers are float16, in which every code is exact, before scale and zero.

    CODE   (bits, table), `states.Coding.code`
    MODE   (PTX decoders, native e4m3), `decoders` of the device
"""

import triton
import triton.language as tl

from ..device import Device
from .to_e4m3 import BLOCK_TOKENS, is_e5m2, parts, plain_three_bits, three_bit_selectors


def decoders(device: Device) -> tuple[bool, bool]:
    """MODE: whether codes are decoded by PTX, and whether the device converts e4m3 itself."""
    return device.is_nvidia, device.is_nvidia and device.capability >= (8, 9)


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
        text = three_bit_selectors(part, word, second) + look_up
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
def _beside(x, y):
    """[R, W] and [R, W] to [R, 2W]; only names change, no register does."""
    return tl.join(x, y).permute(0, 2, 1).reshape(x.shape[0], 2 * x.shape[1])


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
    return _float8(x, False, False)


@triton.jit
def _plain(planes, BITS: tl.constexpr, TABLE: tl.constexpr):
    """What the PTX gives, in plain Triton: for the interpreter and for AMD."""
    x = ()
    for part in tl.static_range(parts(BITS)):
        for i in tl.static_range(4):
            x = x + (_plain_code(planes, part, i, BITS, TABLE),)
    return x


@triton.jit
def _decode_words(planes, BITS: tl.constexpr, TABLE: tl.constexpr, PTX: tl.constexpr, NATIVE: tl.constexpr):
    """Packed rows as 32-bit words (and, with 3 bits, 16-bit words) to float16.

    Whole words are right in any register layout; bytes, decoded four at a time, would be right in some.
    """
    if PTX:
        x = tl.inline_asm_elementwise(_ptx(BITS, TABLE, NATIVE), _constraints(BITS), planes, _halves(BITS), True, 1)
    else:
        x = _plain(planes, BITS, TABLE)
    y = _beside(_four(x, 0), _four(x, 1))
    if BITS != 4:
        y = _beside(y, _beside(_four(x, 2), _four(x, 3)))
    return y


@triton.jit
def _float8(x, E5M2: tl.constexpr, NATIVE: tl.constexpr):
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
    BITS: tl.constexpr = CODE[0]
    TABLE: tl.constexpr = CODE[1]
    NATIVE: tl.constexpr = MODE[1]
    if BITS == 8:
        return _float8(planes[0], is_e5m2(BITS, TABLE), NATIVE)
    else:
        PTX: tl.constexpr = MODE[0]
        return _decode_words(planes, BITS, TABLE, PTX, NATIVE)


# --- Rows.  A row of a plane is read in units: 32-bit words, 16-bit ones in a second plane, float8 in bytes.


@triton.constexpr_function
def width(head_dim, bits):
    """Columns of one part of a key row, padded to a power of two."""
    return max(triton.next_power_of_2(head_dim // parts(bits)), 16)


@triton.constexpr_function
def channels(head_dim):
    """Rows of a tile of values: `head_dim` padded to a power of two."""
    return max(triton.next_power_of_2(head_dim), 16)


@triton.constexpr_function
def _unit(plane, words):
    """Bytes of a unit."""
    return (2 if plane == 1 else 4) if words else 1


@triton.constexpr_function
def _row(n, bits, plane, words):
    """Units of a plane's row of `n` codes."""
    plane_bits = 1 if plane == 1 else 2 if bits == 3 else bits
    return n * plane_bits // 8 // _unit(plane, words)


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
    """One plane of keys `start` + `order` [N]: [N, units]."""
    ROW: tl.constexpr = _row(DIM, BITS, PLANE, WORDS)
    PADDED: tl.constexpr = _row(width(DIM, BITS) * parts(BITS), BITS, PLANE, WORDS)
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
    base, start, blocks, N: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr,
    WORDS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One plane of N values from `start`: [channels, units], block after block along the row."""
    ROW: tl.constexpr = _row(BLOCK_TOKENS, BITS, PLANE, WORDS)
    BLOCK: tl.constexpr = BLOCK_TOKENS * DIM * BITS // 8 // _unit(PLANE, WORDS)
    unit, channel = tl.arange(0, _row(N, BITS, PLANE, WORDS)), tl.arange(0, channels(DIM))
    pointer = _plane(base, start, DIM, BITS, PLANE, WORDS) + (channel * ROW)[:, None]
    pointer += (unit // ROW * BLOCK + unit % ROW)[None, :]
    inside = (channel < DIM)[:, None]
    if MASKED:
        return tl.load(pointer, mask=inside & (unit // ROW + start // BLOCK_TOKENS < blocks)[None, :], other=0)
    elif channels(DIM) != DIM:
        return tl.load(pointer, mask=inside, other=0)
    else:
        return tl.load(pointer)


# --- For kernels.  `base` is where the first block of a sequence and KV head is, `start` the first token of a block.
# MASKED: zeros instead of what lies beyond the last of `blocks`; else nothing may lie there.


@triton.jit
def load_keys(
    base, start, order, blocks, DIM: tl.constexpr, CODE: tl.constexpr, MODE: tl.constexpr, MASKED: tl.constexpr
):
    """Keys `start` + `order` [N], float16 [N, parts * width]."""
    BITS: tl.constexpr = CODE[0]
    WORDS: tl.constexpr = BITS != 8
    planes = (_load_key_plane(base, start, order, blocks, DIM, BITS, 0, WORDS, MASKED),)
    if BITS == 3:
        planes = planes + (_load_key_plane(base, start, order, blocks, DIM, BITS, 1, WORDS, MASKED),)
    return _decode(planes, CODE, MODE)


@triton.jit
def key_channels(DIM: tl.constexpr, BITS: tl.constexpr):
    """Which channel every column of `load_keys` is, and whether it is one."""
    WIDTH: tl.constexpr = width(DIM, BITS)
    SPAN: tl.constexpr = DIM // parts(BITS)
    column = tl.arange(0, WIDTH * parts(BITS))
    return column // WIDTH * SPAN + column % WIDTH, column % WIDTH < SPAN


@triton.jit
def load_values(
    base, start, blocks, N: tl.constexpr, DIM: tl.constexpr, CODE: tl.constexpr, MODE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Values of N tokens from `start`, float16 [channels, N], tokens in the order of `tile_order`."""
    BITS: tl.constexpr = CODE[0]
    WORDS: tl.constexpr = BITS != 8
    planes = (_load_value_plane(base, start, blocks, N, DIM, BITS, 0, WORDS, MASKED),)
    if BITS == 3:
        planes = planes + (_load_value_plane(base, start, blocks, N, DIM, BITS, 1, WORDS, MASKED),)
    return _decode(planes, CODE, MODE)


@triton.jit
def tile_order(BITS: tl.constexpr, N: tl.constexpr):
    """Tokens of a tile in the order of the columns of `load_values`: part, block, token."""
    column = tl.arange(0, N)
    SPAN: tl.constexpr = BLOCK_TOKENS // parts(BITS)
    BLOCKS: tl.constexpr = N // BLOCK_TOKENS
    return column // (SPAN * BLOCKS) * SPAN + column // SPAN % BLOCKS * BLOCK_TOKENS + column % SPAN


# --- With scale and zero.


@triton.jit
def scale_pointers(key, value, batch, head, strides):
    """Where the scales of keys, scales of values and zeros of values (if any) of a KV head are."""
    pointers = (key[1] + batch * strides[0][1][0] + head * strides[0][1][1],)
    for i in tl.static_range(1, len(value)):
        pointers = pointers + (value[i] + batch * strides[1][i][0] + head * strides[1][i][1],)
    return pointers


@triton.jit
def load_scales(pointers, start, order, end):
    """Scales of keys, scales and zeros of values of tokens `start` + `order`, float16 [N] each; float32: one number.

    Loaded in a few equal rows: a tensor of fewer elements than threads would be loaded anew by every thread, element
    by element, in the layout of its use.
    """
    ROWS: tl.constexpr = max(256 // order.shape[0], 1)
    offset = (start + order)[None, :] + tl.zeros((ROWS, 1), tl.int32)
    loaded = ()
    for i in tl.static_range(len(pointers)):
        if pointers[i].dtype.element_ty == tl.float32:
            loaded = loaded + (tl.load(pointers[i]),)
        else:
            rows = tl.load(pointers[i] + offset, mask=offset < end, other=0)
            loaded = loaded + (tl.max(rows, 0).to(tl.float16),)
    return loaded


@triton.jit
def load_scaled_keys(
    base, start, order, blocks, scale, DIM: tl.constexpr, CODE: tl.constexpr, MODE: tl.constexpr, DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """`load_keys` times their scales."""
    k = load_keys(base, start, order, blocks, DIM, CODE, MODE, MASKED).to(DTYPE)
    return k * (scale if scale.dtype == tl.float32 else scale[:, None]).to(DTYPE)


@triton.jit
def load_scaled_values(
    base, start, blocks, scales, N: tl.constexpr, DIM: tl.constexpr, CODE: tl.constexpr, MODE: tl.constexpr,
    DTYPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`load_values` times scale plus zero; where all tokens have one scale, as they are."""
    v = load_values(base, start, blocks, N, DIM, CODE, MODE, MASKED).to(DTYPE)
    if scales[1].dtype != tl.float32:
        v *= scales[1][None, :].to(DTYPE)
    if len(scales) == 3:
        v += scales[2][None, :].to(DTYPE)
    return v


@triton.jit(do_not_specialize=["first_block"])
def unpack_kernel(
    key, value, keys, values, first_block, strides,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """One program = one block of packed tokens of one KV head, from `first_block`, times their scales.

    Written as keys [B, H_kv, tokens, columns as in `load_keys`] and values [B, H_kv, tokens, D_v], not rotated back.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    DTYPE: tl.constexpr = keys.dtype.element_ty
    WIDTH: tl.constexpr = width(DIM, KEY[0]) * parts(KEY[0])
    order, start = tile_order(VALUE[0], BLOCK_TOKENS), (first_block + tl.program_id(0)) * BLOCK_TOKENS
    pointers = scale_pointers(key, value, batch, head, strides)
    scales = load_scales(pointers, start, order, start + BLOCK_TOKENS)
    key_packed = key[0] + batch * strides[0][0][0] + head * strides[0][0][1]
    k = load_scaled_keys(key_packed, start, order, 0, scales[0], DIM, KEY, MODE, DTYPE, False)
    value_packed = value[0] + batch * strides[1][0][0] + head * strides[1][0][1]
    v = load_scaled_values(value_packed, start, 0, scales, BLOCK_TOKENS, VALUE_DIM, VALUE, MODE, DTYPE, False)
    if scales[1].dtype == tl.float32:
        v *= scales[1].to(DTYPE)
    row = (batch * tl.num_programs(1) + head) * tl.num_programs(0) + tl.program_id(0)
    row = row * BLOCK_TOKENS + order
    tl.store(keys + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], k)
    channel = tl.arange(0, channels(VALUE_DIM))
    tl.store(values + row[:, None] * VALUE_DIM + channel[None, :], v.T, mask=(channel < VALUE_DIM)[None, :])
