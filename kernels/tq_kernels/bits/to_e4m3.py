"""Small device functions that the kernels share: packed rows, codes to numbers, operands of the tensor cores.

Packed rows (drawn in `tq_cache/formats/packing.py`) come in parts: the whole row for 8 bits, its halves for 4 bits, its
quarters for 3 and 2 bits.  A decoder takes bytes of a tile of rows, uint8 [R, W], and returns one part of it as
e4m3 bytes, uint8 [R, W].  Each has two forms, chosen by `PTX`: inline assembly, where one byte-permute looks up four
codes, and plain Triton, for the interpreter and for AMD.  `TABLE` is the eight table bytes as two words (low, high).
"""

import triton
import triton.language as tl

from .. import states

BLOCK_TOKENS = tl.constexpr(states.BLOCK_TOKENS)


@triton.constexpr_function
def parts(bits):
    """Parts of a packed row that are decoded apart."""
    return {8: 1, 4: 2, 3: 4, 2: 4}[bits]


@triton.constexpr_function
def part_width(head_dim, bits):
    """Columns of one part of a key row, padded: 32 is the least contraction of an fp8 dot."""
    return max(triton.next_power_of_2(head_dim // parts(bits)), 32)


# --- PTX: codes to e4m3 bytes.  $0: four bytes out, $1: a packed word.
# They are pure and have one result: Triton moves such an inline asm above the layout change that wgmma needs, so that
# decoded bytes go from registers to the tensor core.  Parts share instructions that are alike: ptxas merges them.  With
# KEPT, the low table word is a register that `keep_tables` has declared: as a constant, ptxas moves it from a uniform
# register before every prmt, 59 of 698 instructions of an earlier 4-bit decode loop.


@triton.constexpr_function
def _ptx_tables(key, value):
    start = "{ .reg .b32 t; mov.u32 t, %laneid; and.b32 $0, t, $1; } "
    return start + "".join(f".reg .b32 tq_{low:x}; add.s32 tq_{low:x}, $0, {low:#x}; " for low in {key[0], value[0]})


@triton.constexpr_function
def _operands(table, kept):
    return f"tq_{table[0]:x}" if kept else f"{table[0]:#x}", f"{table[1]:#x}"


@triton.constexpr_function
def _high_selectors():
    # Moves the high half of s to the low one, faster than a shift: where the GPU shifts it also permutes, but it
    # multiplies elsewhere.  Times 1.0 keeps every float16 that is neither infinite nor NaN, and selectors are not,
    # their bit 11 being 0.
    return "{ .reg .b16 l, h, o; mov.b32 {l, h}, s; mov.b16 o, 0x3C00; mul.rn.f16 l, h, o; mov.b32 s, {l, l}; }"


@triton.constexpr_function
def _ptx4(part, table, kept):
    low, high = _operands(table, kept)
    select = "and.b32 s, $1, 0x77777777;" + (f" {_high_selectors()} shl.b32 t, $1, 4;" if part else " mov.b32 t, $1;")
    look_up = f" prmt.b32 s, {low}, {high}, s; lop3.b32 $0, s, t, 0x80808080, 0xF8;"  # s | (t & mask)
    return "{ .reg .b32 s, t; " + select + look_up + " }"


@triton.constexpr_function
def _ptx3(part, table, kept):
    low, high = _operands(table, kept)
    select = three_bit_selectors(part, "$1", "$2")  # $2: the word of the second plane
    return "{ .reg .b32 s, t; " + select + f" prmt.b32 $0, {low}, {high}, s; }}"


@triton.constexpr_function
def three_bit_selectors(part, first, second):
    """PTX: selectors of a quarter into the low half of s, from words of both planes (16 bits of the second's); uses t.

    Multiplications take the place of shifts and masks: they go to another unit of the GPU.
    """
    if part == 2:
        return f"and.b32 s, {second}, 0x77777777;"
    text = f"and.b32 s, {first}, 0x77777777;"
    if part == 1:
        text += _high_selectors()
    elif part == 3:
        text += f"and.b32 t, {second}, 0x77777777;"
        text += f"mul.lo.u32 s, s, {-0x4001 & 0xFFFFFFFF:#x}; mad.lo.u32 s, {first}, 0x4001, s;"
        text += f"mad.lo.u32 s, t, {-0x8000 & 0xFFFFFFFF:#x}, s; mad.lo.u32 s, {second}, 0x8000, s;"
        text += "shr.u32 s, s, 17;"
    return text


@triton.constexpr_function
def _ptx2(part, table, kept):
    low, high = _operands(table, kept)
    select = ("shr.u32 s, $1, 2; " if part % 2 else "mov.b32 s, $1; ") + "and.b32 s, s, 0x33333333;"
    look_up = f"{_high_selectors() if part >= 2 else ''} prmt.b32 $0, {low}, {high}, s;"
    return "{ .reg .b32 s; " + select + look_up + " }"


@triton.jit
def keep_tables(number, KEY: tl.constexpr, VALUE: tl.constexpr):
    """Declares the registers of the low table words.  To be called once, first; `number` is any int32 >= 0."""
    # laneid & (number >> 31) is 0, and neither the compiler nor the assembler can know.
    asm: tl.constexpr = _ptx_tables(KEY, VALUE)
    number = tl.full((), 0, tl.int32) + number  # Triton makes a constant of an argument that is 1
    tl.inline_asm_elementwise(asm, "=r,r", [number >> 31], tl.int32, is_pure=False, pack=1)


# --- The same in plain Triton.


@triton.jit
def _words(x):
    """uint8 [R, W] to the four bytes of its 32-bit words, each uint32 [R, W/4]."""
    even, odd = tl.split(x.to(tl.uint32).reshape(x.shape[0], x.shape[1] // 4, 2, 2))
    byte0, byte2 = tl.split(even)
    byte1, byte3 = tl.split(odd)
    return byte0, byte1, byte2, byte3


@triton.jit
def _bytes(x, byte0, byte1, byte2, byte3):
    """Inverse of `_words`: four uint32 [R, W/4] to uint8 of x's shape."""
    return tl.join(tl.join(byte0, byte2), tl.join(byte1, byte3)).reshape(x.shape).to(tl.uint8)


@triton.jit
def _look_up(code, TABLE: tl.constexpr):
    """Table byte of each code < 8."""
    word = tl.where(code < 4, tl.full((), TABLE[0], tl.uint32), tl.full((), TABLE[1], tl.uint32))
    return (word >> ((code & 3) * 8)) & 255


@triton.jit
def _plain4(x, PART: tl.constexpr, TABLE: tl.constexpr):
    b = _words(x)
    SIGN: tl.constexpr = 4 * PART
    byte0 = _look_up(b[2 * PART] & 7, TABLE) | ((b[0] << SIGN) & 128)
    byte1 = _look_up((b[2 * PART] >> 4) & 7, TABLE) | ((b[1] << SIGN) & 128)
    byte2 = _look_up(b[2 * PART + 1] & 7, TABLE) | ((b[2] << SIGN) & 128)
    byte3 = _look_up((b[2 * PART + 1] >> 4) & 7, TABLE) | ((b[3] << SIGN) & 128)
    return _bytes(x, byte0, byte1, byte2, byte3)


@triton.jit
def _plain2(x, PART: tl.constexpr, TABLE: tl.constexpr):
    b = _words(x)
    first = b[PART // 2 * 2] >> (PART % 2 * 2)
    last = b[PART // 2 * 2 + 1] >> (PART % 2 * 2)
    byte0 = _look_up(first & 3, TABLE)
    byte1 = _look_up((first >> 4) & 3, TABLE)
    byte2 = _look_up(last & 3, TABLE)
    byte3 = _look_up((last >> 4) & 3, TABLE)
    return _bytes(x, byte0, byte1, byte2, byte3)


@triton.jit
def plain_three_bits(low, high, second, PART: tl.constexpr):
    """`three_bit_selectors` in plain Triton: nibbles of a quarter, in whose bit 3 may be anything.

    From the low and the high half of the first plane's word, and the word of the second, uint32.
    """
    if PART == 3:
        return ((low >> 3) & 0x1111) | ((second >> 2) & 0x2222) | ((high >> 1) & 0x4444)
    elif PART == 2:
        return second
    elif PART == 1:
        return high
    else:
        return low


@triton.jit
def _plain3(x, second, PART: tl.constexpr, TABLE: tl.constexpr):
    b = _words(x)
    second = second.to(tl.uint16, bitcast=True).to(tl.uint32)
    nibbles = plain_three_bits(b[0] | (b[1] << 8), b[2] | (b[3] << 8), second, PART)
    byte0 = _look_up(nibbles & 7, TABLE)
    byte1 = _look_up((nibbles >> 4) & 7, TABLE)
    byte2 = _look_up((nibbles >> 8) & 7, TABLE)
    byte3 = _look_up((nibbles >> 12) & 7, TABLE)
    return _bytes(x, byte0, byte1, byte2, byte3)


# --- Either, by `PTX`.


@triton.jit
def decode4(x, PART: tl.constexpr, TABLE: tl.constexpr, PTX: tl.constexpr, KEPT: tl.constexpr = False):
    """Half `PART` of 4-bit codes."""
    if PTX:
        return tl.inline_asm_elementwise(_ptx4(PART, TABLE, KEPT), "=r,r", [x], tl.uint8, is_pure=True, pack=4)
    else:
        return _plain4(x, PART, TABLE)


@triton.jit
def decode3(x, second, PART: tl.constexpr, TABLE: tl.constexpr, PTX: tl.constexpr, KEPT: tl.constexpr = False):
    """Quarter `PART` of 3-bit codes: their first plane [R, W] and their second, int16 [R, W/4]."""
    if PTX:
        second = second.to(tl.uint16, bitcast=True).to(tl.uint32)
        second = tl.broadcast_to(second[:, :, None], (x.shape[0], x.shape[1] // 4, 4)).reshape(x.shape)
        asm: tl.constexpr = _ptx3(PART, TABLE, KEPT)
        return tl.inline_asm_elementwise(asm, "=r,r,r,r,r,r", [x, second], tl.uint8, is_pure=True, pack=4)
    else:
        return _plain3(x, second, PART, TABLE)


@triton.jit
def decode2(x, PART: tl.constexpr, TABLE: tl.constexpr, PTX: tl.constexpr, KEPT: tl.constexpr = False):
    """Quarter `PART` of 2-bit codes."""
    if PTX:
        return tl.inline_asm_elementwise(_ptx2(PART, TABLE, KEPT), "=r,r", [x], tl.uint8, is_pure=True, pack=4)
    else:
        return _plain2(x, PART, TABLE)


@triton.constexpr_function
def is_e5m2(bits, table):
    """8-bit codes are e4m3 bytes, but e5m2 with a table of (5, 0)."""
    return bits == 8 and table[0] == 5


@triton.constexpr_function
def unit(bits, table, compute):
    """Factor of what `decode_part` returns."""
    return 1.0 if compute == tl.float8e4nv or is_e5m2(bits, table) else 256.0


@triton.jit
def decode_part(
    planes, PART: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr
):
    """Part `PART` of packed rows, divided by `unit`, as operand of a dot: COMPUTE, or either float8 for float8e4nv.

    With PTX, `keep_tables` must have run before.
    """
    x = planes[0]
    if BITS == 4:
        x = decode4(x, PART, TABLE, PTX, True)
    elif BITS == 3:
        x = decode3(x, planes[1], PART, TABLE, PTX, True)
    elif BITS == 2:
        x = decode2(x, PART, TABLE, PTX, True)
    if COMPUTE == tl.float8e4nv:
        if is_e5m2(BITS, TABLE):
            return x.to(tl.float8e5, bitcast=True)
        else:
            return x.to(tl.float8e4nv, bitcast=True)
    else:
        x = x.to(tl.uint16)
        if is_e5m2(BITS, TABLE):
            half = x << 8
        else:
            half = ((x & 128) << 8) | ((x & 127) << 7)
            if BITS == 8:
                half |= tl.where((x & 127) == 127, 0x7E00, 0).to(tl.uint16)  # the one NaN of e4m3
        return half.to(tl.float16, bitcast=True).to(COMPUTE)


@triton.jit
def side_by_side(x, y):
    """[R, W] and [R, W] to [R, 2 * W].  Of operands in registers, without moving them."""
    return tl.join(x, y).permute(0, 2, 1).reshape(x.shape[0], 2 * x.shape[1])


@triton.jit
def decode_rows(planes, BITS: tl.constexpr, TABLE: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr):
    """All parts of packed rows side by side, [R, parts * W]: one dot then waits once.  Else as `decode_part`."""
    x = decode_part(planes, 0, BITS, TABLE, COMPUTE, PTX)
    if parts(BITS) >= 2:
        x = side_by_side(x, decode_part(planes, 1, BITS, TABLE, COMPUTE, PTX))
    if parts(BITS) == 4:
        third = decode_part(planes, 2, BITS, TABLE, COMPUTE, PTX)
        x = side_by_side(x, side_by_side(third, decode_part(planes, 3, BITS, TABLE, COMPUTE, PTX)))
    return x


@triton.jit
def exp2(x, PTX: tl.constexpr):
    """2**x; the PTX form flushes denormal results to 0 and so needs one instruction."""
    if PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def rough_log2(x):
    """log2 of positive float32, less at most 0.09: exponent and mantissa read as one number."""
    return x.to(tl.int32, bitcast=True).to(tl.float32) * (1.0 / 8388608) - 127.0


@triton.jit
def ptx_log2(x):
    """log2 of normal numbers."""
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def ptx_inverse(x):
    """1 / x of normal numbers."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


# --- Two terms.  A number in e4m3 keeps 4 bits; its e4m3 value and the e4m3 value of the remainder keep 8.


@triton.constexpr_function
def _ptx_two_terms(lift):
    # $2 .. $5: four neighbours on K.
    asm = "{ .reg .b16 a, b, l, h; .reg .b32 x; .reg .f32 u, v; cvt.rn.satfinite.e4m3x2.f32 a, $3, $2; "
    asm += "cvt.rn.satfinite.e4m3x2.f32 b, $5, $4; mov.b32 $0, {a, b}; "
    for low, high, pair in (("$2", "$3", "a"), ("$4", "$5", "b")):
        asm += f"cvt.rn.f16x2.e4m3x2 x, {pair}; mov.b32 {{l, h}}, x; cvt.f32.f16 u, l; cvt.f32.f16 v, h; "
        asm += f"sub.f32 u, {low}, u; sub.f32 v, {high}, v; mul.f32 u, u, {lift:.1f}; mul.f32 v, v, {lift:.1f}; "
        asm += f"cvt.rn.satfinite.e4m3x2.f32 {pair}, v, u; "
    return asm + "mov.b32 $1, {a, b}; }"


@triton.jit
def _two_terms(x, LIFT: tl.constexpr, PTX: tl.constexpr):
    """The e4m3 value of x, and that of LIFT times the remainder."""
    if PTX:
        asm: tl.constexpr = _ptx_two_terms(LIFT)
        return tl.inline_asm_elementwise(
            asm, "=r,=r,f,f,f,f", [x], (tl.float8e4nv, tl.float8e4nv), is_pure=True, pack=4
        )
    else:
        first = x.to(tl.float8e4nv)
        return first, ((x - first.to(tl.float32)) * LIFT).to(tl.float8e4nv)


@triton.jit
def _terms_side_by_side(first, second):
    """Two [K, C, 2] to [K, 4 * C]."""
    N: tl.constexpr = first.shape[1] * 2
    return side_by_side(first.reshape(first.shape[0], N), second.reshape(first.shape[0], N))


@triton.jit
def spread_terms(
    x, TERMS: tl.constexpr, TWINS: tl.constexpr, LIFT: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr
):
    """float32 [K, C] in the range of e4m3 to an operand [K, TERMS * C * TWINS]: e4m3 values, then LIFT times the rest.

    Both terms stand side by side on N, so that one dot takes them at once.  Other types than float8 need one term.
    wgmma takes no fewer than 16 columns and gives a thread two neighbours; of four columns, each therefore has a twin
    beside it, with which nothing is computed but the dot.
    """
    if TERMS == 1:
        return x.to(COMPUTE)
    elif TWINS == 2:
        first, second = _two_terms(x, LIFT, PTX)
        first, second = tl.join(first, first), tl.join(second, second)
        return _terms_side_by_side(first, second)
    else:
        # Even and odd columns apart: a thread's neighbours on K then become bytes of one word.
        even, odd = tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
        even_first, even_second = _two_terms(even, LIFT, PTX)
        odd_first, odd_second = _two_terms(odd, LIFT, PTX)
        return _terms_side_by_side(tl.join(even_first, odd_first), tl.join(even_second, odd_second))


@triton.jit
def gather_terms(x, TERMS: tl.constexpr, TWINS: tl.constexpr, LIFT: tl.constexpr):
    """What `spread_terms` made into [M, TERMS * C * TWINS], after the dot: float32 [M, C]."""
    if TERMS == 2:
        x = x.reshape(x.shape[0], 2, x.shape[1] // 2)
        if LIFT != 1:
            x *= tl.where(tl.arange(0, 2) == 0, 1.0, 1.0 / LIFT)[None, :, None]
        x = tl.sum(x, 1)
    if TWINS == 2:
        x, _ = tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
    return x


# --- The order of score rows.
# A thread's accumulators of a 64-row wgmma are rows 8 apart, and 16 * SLOTS apart from one repeat to the next.  Giving
# those rows to neighbouring tokens lets it store their probabilities, and load their scales, side by side.


@triton.jit
def to_rows(x, SLOTS: tl.constexpr, REPEATS: tl.constexpr):
    """[R] or [R, W] by token to the same by score row."""
    if len(x.shape) == 1:
        return x.reshape(SLOTS, 8, REPEATS, 2).permute(2, 0, 3, 1).reshape(x.shape[0])
    else:
        return x.reshape(SLOTS, 8, REPEATS, 2, x.shape[1]).permute(2, 0, 3, 1, 4).reshape(x.shape)


@triton.jit
def to_tokens(x, SLOTS: tl.constexpr, REPEATS: tl.constexpr):
    """[R, N] by score row to [R, N] by token: the inverse of `to_rows`."""
    return x.reshape(REPEATS, SLOTS, 2, 8, x.shape[1]).permute(1, 3, 0, 2, 4).reshape(x.shape)


# --- Loads.  `start`, a multiple of BLOCK_TOKENS, is a scalar, and all else about an address the same for every tile.
# MASKED: give zeros beyond the last of `blocks`; else nothing may lie there.
# Neighbouring threads should read neighbouring bytes: L2 takes so many requests, of up to 128 bytes in a row each.


@triton.constexpr_function
def plane_layout(bits, head_dim, second):
    """(bytes per element, bits per code, bytes from a block's start, bytes of a block); a second plane is int16."""
    first = 2 if bits == 3 else bits
    return (
        (2 if second else 1),
        (1 if second else first),
        second * 64 * head_dim * first // 8,
        64 * head_dim * bits // 8,
    )


@triton.jit
def _plane(base, start, LAYOUT: tl.constexpr):
    """Where a plane of the block at `start` begins."""
    pointer = base + (start // BLOCK_TOKENS).to(tl.int64) * LAYOUT[3] + LAYOUT[2]
    if LAYOUT[0] == 2:
        pointer = pointer.to(tl.pointer_type(tl.int16))
    return pointer


@triton.jit
def _load_key_rows(
    base, start, token, blocks,
    HEAD_DIM: tl.constexpr, LAYOUT: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One plane of the rows of tokens `start` + `token` [R]: [R, WIDTH], zeros beyond the row."""
    ROW: tl.constexpr = LAYOUT[1] * HEAD_DIM // 8 // LAYOUT[0]
    column = tl.arange(0, WIDTH)
    row = token // BLOCK_TOKENS * (LAYOUT[3] // LAYOUT[0]) + token % BLOCK_TOKENS * ROW
    pointer = _plane(base, start, LAYOUT) + (row[:, None] + column[None, :])
    if MASKED or WIDTH != ROW:
        mask = (start + token < blocks * BLOCK_TOKENS)[:, None] & (column < ROW)[None, :]
        return tl.load(pointer, mask=mask, other=0)
    else:
        return tl.load(pointer)


@triton.jit
def _load_value_rows(
    base, start, blocks, HEAD_DIM: tl.constexpr, LAYOUT: tl.constexpr, CHANNELS: tl.constexpr, MASKED: tl.constexpr
):
    """One plane of the block at token `start`: [CHANNELS, elements of a row]."""
    ROW: tl.constexpr = LAYOUT[1] * BLOCK_TOKENS // 8 // LAYOUT[0]
    channel = tl.arange(0, CHANNELS)
    pointer = _plane(base, start, LAYOUT) + ((channel * ROW)[:, None] + tl.arange(0, ROW)[None, :])
    if MASKED or CHANNELS != HEAD_DIM:
        channels = tl.where(start < blocks * BLOCK_TOKENS, HEAD_DIM, 0)  # of this block, which may not exist
        return tl.load(pointer, mask=(channel < channels)[:, None], other=0)
    else:
        return tl.load(pointer)


@triton.jit
def load_keys(
    base, start, blocks,
    BITS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    REPEATS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The planes of the keys of `TILE` tokens from `start`, by score row, as `decode_part` takes them."""
    # The first plane is loaded in this order: only then does Triton swizzle it in shared memory.  Rows of the second
    # are so short that the order of the loads matters more.
    token = tl.arange(0, TILE)
    FIRST: tl.constexpr = plane_layout(BITS, HEAD_DIM, False)
    planes = (_load_key_rows(base, start, to_rows(token, SLOTS, REPEATS), blocks, HEAD_DIM, FIRST, WIDTH, MASKED),)
    if BITS == 3:
        SECOND: tl.constexpr = plane_layout(BITS, HEAD_DIM, True)
        second = _load_key_rows(base, start, token, blocks, HEAD_DIM, SECOND, WIDTH // 4, MASKED)
        planes = planes + (to_rows(second, SLOTS, REPEATS),)
    return planes


@triton.jit
def load_values(
    base, start, blocks, BITS: tl.constexpr, HEAD_DIM: tl.constexpr, CHANNELS: tl.constexpr, MASKED: tl.constexpr
):
    """The planes of the block of values at token `start`, as `decode_part` takes them."""
    FIRST: tl.constexpr = plane_layout(BITS, HEAD_DIM, False)
    planes = (_load_value_rows(base, start, blocks, HEAD_DIM, FIRST, CHANNELS, MASKED),)
    if BITS == 3:
        SECOND: tl.constexpr = plane_layout(BITS, HEAD_DIM, True)
        planes = planes + (_load_value_rows(base, start, blocks, HEAD_DIM, SECOND, CHANNELS, MASKED),)
    return planes


@triton.jit
def load_scales(
    base, start, blocks, TILE: tl.constexpr, SLOTS: tl.constexpr, REPEATS: tl.constexpr, MASKED: tl.constexpr
):
    """float16 numbers of `TILE` tokens from `start`, float32 [TILE] by score row."""
    # A thread's neighbouring tokens in one word: Triton prefetches no load of less than 4 bytes.
    COUNT: tl.constexpr = 2 if REPEATS == 1 else 4
    token = tl.arange(0, TILE // COUNT) * COUNT
    pointer = (base + start).to(tl.pointer_type(tl.int32 if COUNT == 2 else tl.int64)) + token // COUNT
    if MASKED:
        word = tl.load(pointer, mask=start + token < blocks * BLOCK_TOKENS, other=0)
    else:
        word = tl.load(pointer)
    x = tl.join(word.to(tl.int16), (word >> 16).to(tl.int16))
    if COUNT == 4:
        x = tl.join(x, tl.join((word >> 32).to(tl.int16), (word >> 48).to(tl.int16))).permute(0, 2, 1)
    return to_rows(x.reshape(TILE).to(tl.float16, bitcast=True).to(tl.float32), SLOTS, REPEATS)
