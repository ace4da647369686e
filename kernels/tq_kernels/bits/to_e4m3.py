"""Codes to e4m3 bytes, operands of fp8 dots; or of dots of other types, where there are none of fp8.

A decoder takes bytes of a tile of rows, uint8 [R, W], and returns one part of it as e4m3 bytes, uint8 [R, W].  Each has
two forms, chosen by `PTX`: inline assembly, where one byte-permute looks up four codes, and plain Triton, for the
interpreter and for AMD.  `TABLE` is the eight table bytes as two words (low, high).
"""

import triton
import triton.language as tl

from .layout import is_e5m2, part_width, parts, plain_three_bits, ptx_high_half, ptx_three_bits, side_by_side


@triton.constexpr_function
def operand_width(head_dim, bits):
    """`part_width` of an operand: 32 is the least contraction of an fp8 dot."""
    return max(part_width(head_dim, bits), 32)


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
def _ptx4(part, table, kept):
    low, high = _operands(table, kept)
    select = "and.b32 s, $1, 0x77777777;" + (f" {ptx_high_half()} shl.b32 t, $1, 4;" if part else " mov.b32 t, $1;")
    look_up = f" prmt.b32 s, {low}, {high}, s; lop3.b32 $0, s, t, 0x80808080, 0xF8;"  # s | (t & mask)
    return "{ .reg .b32 s, t; " + select + look_up + " }"


@triton.constexpr_function
def _ptx3(part, table, kept):
    low, high = _operands(table, kept)
    select = ptx_three_bits(part, "$1", "$2")  # $2: the word of the second plane
    return "{ .reg .b32 s, t; " + select + f" prmt.b32 $0, {low}, {high}, s; }}"


@triton.constexpr_function
def _ptx2(part, table, kept):
    low, high = _operands(table, kept)
    select = ("shr.u32 s, $1, 2; " if part % 2 else "mov.b32 s, $1; ") + "and.b32 s, s, 0x33333333;"
    look_up = f"{ptx_high_half() if part >= 2 else ''} prmt.b32 $0, {low}, {high}, s;"
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
    return as_operand(x, BITS, TABLE, COMPUTE)


@triton.jit
def as_operand(x, BITS: tl.constexpr, TABLE: tl.constexpr, COMPUTE: tl.constexpr):
    """Bytes, e4m3 or of 8-bit codes, as `decode_part` returns them."""
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
def decode_rows(planes, BITS: tl.constexpr, TABLE: tl.constexpr, COMPUTE: tl.constexpr, PTX: tl.constexpr):
    """All parts of packed rows side by side, [R, parts * W]: one dot then waits once.  Else as `decode_part`."""
    x = decode_part(planes, 0, BITS, TABLE, COMPUTE, PTX)
    if parts(BITS) >= 2:
        x = side_by_side(x, decode_part(planes, 1, BITS, TABLE, COMPUTE, PTX))
    if parts(BITS) == 4:
        third = decode_part(planes, 2, BITS, TABLE, COMPUTE, PTX)
        x = side_by_side(x, side_by_side(third, decode_part(planes, 3, BITS, TABLE, COMPUTE, PTX)))
    return x


# --- One code of each of four rows.


@triton.constexpr_function
def _ptx_gather(bits, table, part, index):
    """PTX: four words of four rows ($1 .. $4), decoded; $0: byte `index` of part `part` of each."""
    asm = "{ .reg .b32 b0, b1, b2, b3, x, y; "
    for i in range(4):
        if bits == 8:
            asm += f"mov.b32 b{i}, ${i + 1}; "
        else:
            decode = _ptx4(part, table, True) if bits == 4 else _ptx2(part, table, True)
            asm += decode.replace("$1", f"${i + 1}").replace("$0", f"b{i}") + " "
    pair = index | (index + 4) << 4
    return asm + f"prmt.b32 x, b0, b1, {pair:#x}; prmt.b32 y, b2, b3, {pair:#x}; prmt.b32 $0, x, y, 0x5410; }}"


@triton.jit
def _plain_byte(x, BITS: tl.constexpr, TABLE: tl.constexpr, PART: tl.constexpr, INDEX: tl.constexpr):
    """Byte INDEX of each word of part PART of rows [R, W], [R, W / 4]."""
    if BITS == 4:
        x = decode4(x, PART, TABLE, False)
    elif BITS == 2:
        x = decode2(x, PART, TABLE, False)
    return _words(x)[INDEX]


@triton.jit
def gather_bytes(
    rows, BITS: tl.constexpr, TABLE: tl.constexpr, PART: tl.constexpr, INDEX: tl.constexpr, PTX: tl.constexpr
):
    """Of packed rows, four times uint8 [R, W], the decoded byte INDEX of each word of part PART: uint8 [R, W].

    The four bytes of a word are those of the four rows.  Codes of 8, 4 or 2 bits; with PTX, `keep_tables` has run.
    """
    if PTX:
        asm: tl.constexpr = _ptx_gather(BITS, TABLE, PART, INDEX)
        return tl.inline_asm_elementwise(
            asm, "=r,r,r,r,r", [rows[0], rows[1], rows[2], rows[3]], tl.uint8, is_pure=True, pack=4
        )
    else:
        first = _plain_byte(rows[0], BITS, TABLE, PART, INDEX)
        second = _plain_byte(rows[1], BITS, TABLE, PART, INDEX)
        third = _plain_byte(rows[2], BITS, TABLE, PART, INDEX)
        fourth = _plain_byte(rows[3], BITS, TABLE, PART, INDEX)
        return _bytes(rows[0], first, second, third, fourth)
