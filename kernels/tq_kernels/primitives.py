"""Small device functions that the kernels share: packed rows, codes to numbers, operands of the tensor cores.

Packed rows (drawn in `tq_cache/packing.py`) come in parts: the whole row for 8 bits, its two halves for 4 bits, its
four quarters for 3 and 2 bits.  A decoder takes bytes of a tile of rows, uint8 [R, W], and returns one part of it as
e4m3 bytes, uint8 [R, W].  Each has two forms, chosen by `PTX`: inline assembly, where one byte-permute looks up four
codes, and plain Triton, for the interpreter and for AMD.  `TABLE` is the eight table bytes as two words (low, high).
"""

import triton
import triton.language as tl

from . import states

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
# One result and, but for 3 bits, one operand: Triton moves such an inline asm above the layout change that wgmma
# needs, so that decoded bytes go from registers to the tensor core.  The halves share their first instruction: ptxas
# merges it.  With KEPT, the low table word is a register that `keep_tables` has declared: as a constant, ptxas moves it
# from a uniform register before every prmt, 59 of 698 instructions of the 4-bit decode loop.


@triton.constexpr_function
def _ptx_tables(key, value):
    start = "{ .reg .b32 t; mov.u32 t, %laneid; and.b32 $0, t, $1; } "
    return start + "".join(f".reg .b32 tq_{low:x}; add.s32 tq_{low:x}, $0, {low:#x}; " for low in {key[0], value[0]})


@triton.constexpr_function
def _operands(table, kept):
    return f"tq_{table[0]:x}" if kept else f"{table[0]:#x}", f"{table[1]:#x}"


@triton.constexpr_function
def _ptx4(part, table, kept):
    low, high = _operands(table, kept)
    select = "and.b32 s, $1, 0x77777777;" + (" shr.u32 s, s, 16; shl.b32 t, $1, 4;" if part else " mov.b32 t, $1;")
    look_up = f" prmt.b32 s, {low}, {high}, s; lop3.b32 $0, s, t, 0x80808080, 0xF8;"  # s | (t & mask)
    return "{ .reg .b32 s, t; " + select + look_up + " }"


@triton.constexpr_function
def _ptx3(part, table, kept):
    # $2: the sign plane, every byte twice.  Its bits come to bit 2 of the selectors' nibbles by at most one shift each.
    low, high = _operands(table, kept)
    if part % 2 == 0:
        select = "and.b32 s, $1, 0x33333333; shl.b32 t, $2, 1;"
        signs = " and.b32 u, $2, 0x00440044; lop3.b32 u, t, 0x44004400, u, 0xEA;"  # (t & mask) | u
    else:
        select = "shr.u32 s, $1, 2; and.b32 s, s, 0x33333333; shl.b32 t, $2, 2; shr.u32 u, $2, 1;"
        signs = " and.b32 u, u, 0x44004400; lop3.b32 u, t, 0x00440044, u, 0xEA;"
    look_up = f" or.b32 s, s, u; {'shr.u32 s, s, 16;' if part >= 2 else ''} prmt.b32 $0, {low}, {high}, s;"
    return "{ .reg .b32 s, t, u; " + select + signs + look_up + " }"


@triton.constexpr_function
def _ptx2(part, table, kept):
    low, high = _operands(table, kept)
    select = f"shr.u32 s, $1, {16 * (part // 2) + 2 * (part % 2)}; and.b32 s, s, 0x3333;"
    return "{ .reg .b32 s; " + select + f" prmt.b32 $0, {low}, {high}, s; }}"


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
def _plain2(x, sign0, sign1, sign2, sign3, PART: tl.constexpr, TABLE: tl.constexpr):
    """Quarter `PART` of the 2-bit plane; sign0..3 are bit 2 of the codes, or 0."""
    b = _words(x)
    first = b[PART // 2 * 2] >> (PART % 2 * 2)
    last = b[PART // 2 * 2 + 1] >> (PART % 2 * 2)
    byte0 = _look_up((first & 3) | sign0, TABLE)
    byte1 = _look_up(((first >> 4) & 3) | sign1, TABLE)
    byte2 = _look_up((last & 3) | sign2, TABLE)
    byte3 = _look_up(((last >> 4) & 3) | sign3, TABLE)
    return _bytes(x, byte0, byte1, byte2, byte3)


@triton.jit
def _plain3(x, signs, PART: tl.constexpr, TABLE: tl.constexpr):
    s = _words(signs)[PART // 2 * 2]
    if PART % 2:
        return _plain2(x, (s << 2) & 4, (s >> 2) & 4, (s >> 1) & 4, (s >> 5) & 4, PART, TABLE)
    else:
        return _plain2(x, s & 4, (s >> 4) & 4, (s << 1) & 4, (s >> 3) & 4, PART, TABLE)


# --- Either, by `PTX`.


@triton.jit
def decode4(x, PART: tl.constexpr, TABLE: tl.constexpr, PTX: tl.constexpr, KEPT: tl.constexpr = False):
    """Half `PART` of 4-bit codes."""
    if PTX:
        return tl.inline_asm_elementwise(_ptx4(PART, TABLE, KEPT), "=r,r", [x], tl.uint8, is_pure=True, pack=4)
    else:
        return _plain4(x, PART, TABLE)


@triton.jit
def decode3(x, signs, PART: tl.constexpr, TABLE: tl.constexpr, PTX: tl.constexpr, KEPT: tl.constexpr = False):
    """Quarter `PART` of 3-bit codes: the 2-bit plane [R, W] and the sign plane [R, W/2]."""
    signs = tl.join(signs, signs).reshape(x.shape)
    if PTX:
        asm: tl.constexpr = _ptx3(PART, TABLE, KEPT)
        return tl.inline_asm_elementwise(asm, "=r,r,r", [x, signs], tl.uint8, is_pure=True, pack=4)
    else:
        return _plain3(x, signs, PART, TABLE)


@triton.jit
def decode2(x, PART: tl.constexpr, TABLE: tl.constexpr, PTX: tl.constexpr, KEPT: tl.constexpr = False):
    """Quarter `PART` of 2-bit codes."""
    if PTX:
        return tl.inline_asm_elementwise(_ptx2(PART, TABLE, KEPT), "=r,r", [x], tl.uint8, is_pure=True, pack=4)
    else:
        return _plain2(x, 0, 0, 0, 0, PART, TABLE)


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


# --- Two terms.  A number in e4m3 keeps 4 bits; its e4m3 value and the e4m3 value of the remainder keep 8.


@triton.jit
def spread_terms(x, TERMS: tl.constexpr, LIFT: tl.constexpr, COMPUTE: tl.constexpr):
    """float32 [K, N] in the range of e4m3 to an operand [K, TERMS * N]: its e4m3 value, then LIFT times the remainder.

    Both terms stand side by side on N, so that one dot takes them at once.  Other types than float8 need one term.
    """
    if COMPUTE == tl.float8e4nv:
        first = x.to(tl.float8e4nv)
        if TERMS == 2:
            second = ((x - first.to(tl.float32)) * LIFT).to(tl.float8e4nv)
            first = tl.join(first, second).permute(0, 2, 1).reshape(x.shape[0], 2 * x.shape[1])
        return first
    else:
        return x.to(COMPUTE)


@triton.jit
def gather_terms(x, TERMS: tl.constexpr, LIFT: tl.constexpr):
    """What `spread_terms` made into [M, TERMS * N], after the dot: float32 [M, N]."""
    if TERMS == 2:
        pair = x.reshape(x.shape[0], 2, x.shape[1] // 2)
        if LIFT != 1:
            pair *= tl.where(tl.arange(0, 2) == 0, 1.0, 1.0 / LIFT)[None, :, None]
        return tl.sum(pair, 1)
    else:
        return x


# --- The order of score rows.
# A thread's accumulators of a 64-row wgmma are rows 8 apart, and 16 * SLOTS apart from one
# repeat to the next.  Giving those rows to neighbouring tokens lets it store their probabilities side by side.  -------


@triton.jit
def to_rows(x, SLOTS: tl.constexpr, REPEATS: tl.constexpr):
    """[R] by place along a value row to [R] by score row."""
    return x.reshape(SLOTS, 8, REPEATS, 2).permute(2, 0, 3, 1).reshape(x.shape[0])


@triton.jit
def to_places(x, SLOTS: tl.constexpr, REPEATS: tl.constexpr):
    """[R, N] by score row to [R, N] by place along a value row: the inverse of `to_rows`."""
    return x.reshape(REPEATS, SLOTS, 2, 8, x.shape[1]).permute(1, 3, 0, 2, 4).reshape(x.shape)


# --- Loads.  `start`, a multiple of BLOCK_TOKENS, is a scalar, and all else about an address the same for every tile.
# MASKED: give zeros beyond the last of `blocks`; else nothing may lie there.  -----------------------------------------


@triton.constexpr_function
def plane_layout(bits, head_dim, plane):
    """(bits per code in this plane, bytes from a block's start to it, bytes of a block)."""
    low = 2 if bits == 3 else bits
    return (1 if plane else low), plane * 64 * head_dim * low // 8, 64 * head_dim * bits // 8


@triton.jit
def load_key_rows(
    base, start, offset, blocks,
    BITS: tl.constexpr, HEAD_DIM: tl.constexpr, PLANE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One plane of the rows of tokens `start` + `offset` [R]: uint8 [R, WIDTH], zeros beyond the row."""
    LAYOUT: tl.constexpr = plane_layout(BITS, HEAD_DIM, PLANE)
    ROW: tl.constexpr = LAYOUT[0] * HEAD_DIM // 8
    column = tl.arange(0, WIDTH)
    row = offset // BLOCK_TOKENS * LAYOUT[2] + offset % BLOCK_TOKENS * ROW
    pointer = base + (start // BLOCK_TOKENS).to(tl.int64) * LAYOUT[2] + LAYOUT[1]
    pointer = pointer + (row[:, None] + column[None, :])
    if MASKED or WIDTH != ROW:
        mask = (start + offset < blocks * BLOCK_TOKENS)[:, None] & (column < ROW)[None, :]
        return tl.load(pointer, mask=mask, other=0)
    else:
        return tl.load(pointer)


@triton.jit
def load_value_rows(
    base, start, blocks,
    BITS: tl.constexpr, HEAD_DIM: tl.constexpr, PLANE: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One plane of `TILE` tokens from `start`: uint8 [CHANNELS, bytes of a row], block after block along the row."""
    LAYOUT: tl.constexpr = plane_layout(BITS, HEAD_DIM, PLANE)
    ROW: tl.constexpr = LAYOUT[0] * BLOCK_TOKENS // 8
    column = tl.arange(0, TILE // BLOCK_TOKENS * ROW)
    channel = tl.arange(0, CHANNELS)
    pointer = base + (start // BLOCK_TOKENS).to(tl.int64) * LAYOUT[2] + LAYOUT[1]
    pointer = pointer + ((channel * ROW)[:, None] + (column // ROW * LAYOUT[2] + column % ROW)[None, :])
    if MASKED or CHANNELS != HEAD_DIM:
        mask = (start // BLOCK_TOKENS + column // ROW < blocks)[None, :] & (channel < HEAD_DIM)[:, None]
        return tl.load(pointer, mask=mask, other=0)
    else:
        return tl.load(pointer)


@triton.jit
def load_per_token(base, start, offset, blocks, MASKED: tl.constexpr):
    """One number of each token `start` + `offset` [R]."""
    if MASKED:
        return tl.load(base + start + offset, mask=start + offset < blocks * BLOCK_TOKENS, other=0)
    else:
        return tl.load(base + start + offset)


@triton.jit
def load_keys(
    base, start, offset, blocks, BITS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):
    """The planes of key rows, as `decode_part` takes them."""
    planes = (load_key_rows(base, start, offset, blocks, BITS, HEAD_DIM, 0, WIDTH, MASKED),)
    if BITS == 3:
        planes = planes + (load_key_rows(base, start, offset, blocks, BITS, HEAD_DIM, 1, WIDTH // 2, MASKED),)
    return planes


@triton.jit
def load_values(
    base, start, blocks,
    BITS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, CHANNELS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The planes of value rows, as `decode_part` takes them."""
    planes = (load_value_rows(base, start, blocks, BITS, HEAD_DIM, 0, TILE, CHANNELS, MASKED),)
    if BITS == 3:
        planes = planes + (load_value_rows(base, start, blocks, BITS, HEAD_DIM, 1, TILE, CHANNELS, MASKED),)
    return planes


@triton.jit
def load_scales(base, start, offset, blocks, SLOTS: tl.constexpr, REPEATS: tl.constexpr, MASKED: tl.constexpr):
    """`load_per_token`, float32 [R] by score row."""
    return to_rows(load_per_token(base, start, offset, blocks, MASKED), SLOTS, REPEATS).to(tl.float32)
