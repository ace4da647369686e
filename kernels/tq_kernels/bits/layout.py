"""How packed rows lie in memory, and how their bits are loaded.

Rows, of a token's key or of a channel's values in a block, are drawn in `tq_cache/formats/packing.py`.  They come in
parts that are decoded apart: the whole row for 8 bits, its halves for 4 bits, its quarters for 3 and 2 bits.  Rows of 3
bits lie in two planes, one of 2 bits a code and one of 1 bit behind it; others in one.  A row of a plane is loaded in
units: in bytes or in 32-bit words, of a second plane always in 16-bit words.
"""

import triton
import triton.language as tl

from .. import states

BLOCK_TOKENS = tl.constexpr(states.BLOCK_TOKENS)


@triton.constexpr_function
def is_e5m2(bits, table):
    """8-bit codes are e4m3 bytes, but e5m2 with a table of (5, 0)."""
    return bits == 8 and table[0] == 5


@triton.constexpr_function
def parts(bits):
    """Parts of a packed row that are decoded apart."""
    return {8: 1, 4: 2, 3: 4, 2: 4}[bits]


@triton.constexpr_function
def part_width(head_dim, bits):
    """Columns of one part of a key row, padded to a power of two."""
    return max(triton.next_power_of_2(head_dim // parts(bits)), 16)


@triton.constexpr_function
def channels(head_dim):
    """Rows of a tile of values: `head_dim` padded to a power of two."""
    return max(triton.next_power_of_2(head_dim), 16)


@triton.jit
def at_head(base, steps, batch, head):
    """Where a head of a sequence begins."""
    return base + batch * steps.batch + head * steps.head


# --- Loads.  `base` is where the first block of a sequence and KV head is; `start`, a multiple of BLOCK_TOKENS, is a
# scalar, and all else about an address the same for every tile.
# MASKED: give zeros beyond the last of `blocks`; else nothing may lie there.
# Neighbouring threads should read neighbouring bytes: L2 takes so many requests, of up to 128 bytes in a row each.
# BY_ROW: addresses are pointers to rows plus offsets in them, else one pointer plus offsets in the tile.  They are the
# same addresses and other registers: not by rows, prefill with a mask took 7 to 11 % longer over float8 and 3 bits.


@triton.constexpr_function
def _unit(plane, words):
    """Bytes of a unit."""
    return 2 if plane == 1 else 4 if words else 1


@triton.constexpr_function
def _units(n, bits, plane, words):
    """Units of a plane's row of `n` codes."""
    plane_bits = 1 if plane == 1 else 2 if bits == 3 else bits
    return n * plane_bits // 8 // _unit(plane, words)


@triton.jit
def _plane(base, start, DIM: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr, WORDS: tl.constexpr):
    """Pointer to the units of a plane of the block of token `start`."""
    base += tl.full((), BLOCK_TOKENS * DIM * BITS // 8, tl.int64) * (start // BLOCK_TOKENS)
    if PLANE == 1:
        base = (base + BLOCK_TOKENS * DIM * 2 // 8).to(tl.pointer_type(tl.int16))
    elif WORDS:
        base = base.to(tl.pointer_type(tl.int32))
    return base


@triton.jit
def _at(base, first, second, BY_ROW: tl.constexpr):
    """base + first + second."""
    if BY_ROW:
        return base + first + second
    else:
        return base + (first + second)


@triton.jit
def load_key_plane(
    base, start, token, blocks, DIM: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, PLANE: tl.constexpr,
    WORDS: tl.constexpr, BY_ROW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One plane of keys `start` + `token` [N]: [N, units of parts of WIDTH codes], zeros beyond the row."""
    ROW: tl.constexpr = _units(DIM, BITS, PLANE, WORDS)
    PADDED: tl.constexpr = _units(WIDTH * parts(BITS), BITS, PLANE, WORDS)
    BLOCK: tl.constexpr = BLOCK_TOKENS * DIM * BITS // 8 // _unit(PLANE, WORDS)
    unit = tl.arange(0, PADDED)
    row = token // BLOCK_TOKENS * BLOCK + token % BLOCK_TOKENS * ROW
    pointer = _at(_plane(base, start, DIM, BITS, PLANE, WORDS), unit[None, :], row[:, None], BY_ROW)
    if MASKED:
        return tl.load(pointer, mask=(start + token < blocks * BLOCK_TOKENS)[:, None] & (unit < ROW)[None, :], other=0)
    elif PADDED != ROW:
        return tl.load(pointer, mask=(unit < ROW)[None, :], other=0)
    else:
        return tl.load(pointer)


@triton.jit
def load_value_plane(
    base, start, blocks, N: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr,
    PLANE: tl.constexpr, WORDS: tl.constexpr, BY_ROW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One plane of N values from `start`: [CHANNELS, units], block after block along the row."""
    ROW: tl.constexpr = _units(BLOCK_TOKENS, BITS, PLANE, WORDS)
    BLOCK: tl.constexpr = BLOCK_TOKENS * DIM * BITS // 8 // _unit(PLANE, WORDS)
    unit, channel = tl.arange(0, _units(N, BITS, PLANE, WORDS)), tl.arange(0, CHANNELS)
    place = (unit // ROW * BLOCK + unit % ROW)[None, :]
    pointer = _at(_plane(base, start, DIM, BITS, PLANE, WORDS), (channel * ROW)[:, None], place, BY_ROW)
    inside = (channel < DIM)[:, None]
    if MASKED:
        return tl.load(pointer, mask=inside & (unit // ROW + start // BLOCK_TOKENS < blocks)[None, :], other=0)
    elif CHANNELS != DIM:
        return tl.load(pointer, mask=inside, other=0)
    else:
        return tl.load(pointer)


@triton.jit
def load_value_planes(
    base, start, blocks, N: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr,
    WORDS: tl.constexpr, BY_ROW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """All planes of N values from `start`."""
    first = load_value_plane(base, start, blocks, N, DIM, CHANNELS, BITS, 0, WORDS, BY_ROW, MASKED)
    if BITS == 3:
        return first, load_value_plane(base, start, blocks, N, DIM, CHANNELS, BITS, 1, WORDS, BY_ROW, MASKED)
    else:
        return (first,)


# --- Parts side by side, and what their columns are.


@triton.jit
def side_by_side(x, y):
    """[R, W] and [R, W] to [R, 2 * W].  Of operands in registers, without moving them."""
    return tl.join(x, y).permute(0, 2, 1).reshape(x.shape[0], 2 * x.shape[1])


@triton.jit
def key_channels(DIM: tl.constexpr, BITS: tl.constexpr):
    """Which channel every column of a key row, its parts padded to `part_width`, is, and whether it is one."""
    WIDTH: tl.constexpr = part_width(DIM, BITS)
    SPAN: tl.constexpr = DIM // parts(BITS)
    column = tl.arange(0, WIDTH * parts(BITS))
    return column // WIDTH * SPAN + column % WIDTH, column % WIDTH < SPAN


@triton.jit
def tile_order(BITS: tl.constexpr, N: tl.constexpr):
    """Tokens of a tile in the order of decoded values: part, block, token."""
    column = tl.arange(0, N)
    SPAN: tl.constexpr = BLOCK_TOKENS // parts(BITS)
    BLOCKS: tl.constexpr = N // BLOCK_TOKENS
    return column // (SPAN * BLOCKS) * SPAN + column // SPAN % BLOCKS * BLOCK_TOKENS + column % SPAN


# --- Parts of a word whose codes are nibbles.  In PTX, a register s then selects in a byte-permute.


@triton.constexpr_function
def ptx_high_half():
    """PTX: moves the high half of s to the low one, faster than a shift.

    Where the GPU shifts it also permutes, but it multiplies elsewhere.  Times 1.0 keeps every float16 that is neither
    infinite nor NaN, and selectors are not, their bit 11 being 0.
    """
    return "{ .reg .b16 l, h, o; mov.b32 {l, h}, s; mov.b16 o, 0x3C00; mul.rn.f16 l, h, o; mov.b32 s, {l, l}; }"


@triton.constexpr_function
def ptx_three_bits(part, first, second):
    """PTX: selectors of a quarter into the low half of s, from words of both planes (16 bits of the second's); uses t.

    Multiplications take the place of shifts and masks: they go to another unit of the GPU.
    """
    if part == 2:
        return f"and.b32 s, {second}, 0x77777777;"
    text = f"and.b32 s, {first}, 0x77777777;"
    if part == 1:
        text += ptx_high_half()
    elif part == 3:
        text += f"and.b32 t, {second}, 0x77777777;"
        text += f"mul.lo.u32 s, s, {-0x4001 & 0xFFFFFFFF:#x}; mad.lo.u32 s, {first}, 0x4001, s;"
        text += f"mad.lo.u32 s, t, {-0x8000 & 0xFFFFFFFF:#x}, s; mad.lo.u32 s, {second}, 0x8000, s;"
        text += "shr.u32 s, s, 17;"
    return text


@triton.jit
def plain_three_bits(low, high, second, PART: tl.constexpr):
    """`ptx_three_bits` in plain Triton: nibbles of a quarter, in whose bit 3 may be anything.

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
