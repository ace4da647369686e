"""The order of score rows, and loads in it.

A thread's accumulators of a 64-row wgmma are rows 8 apart, and 16 * SLOTS apart from one repeat to the next.  Giving
those rows to neighbouring tokens lets it store their probabilities, and load their scales, side by side.
"""

import triton
import triton.language as tl

from ..bits.layout import BLOCK_TOKENS, load_key_plane


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


@triton.jit
def load_key_rows(
    base, start, blocks,
    BITS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    REPEATS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The planes of the keys of `TILE` tokens from `start`, by score row, as `decode_part` takes them."""
    # The first plane is loaded in this order: only then does Triton swizzle it in shared memory.  Rows of the second
    # are so short that the order of the loads matters more.
    token = tl.arange(0, TILE)
    row = to_rows(token, SLOTS, REPEATS)
    first = load_key_plane(base, start, row, blocks, HEAD_DIM, WIDTH, BITS, 0, False, False, MASKED)
    if BITS == 3:
        second = load_key_plane(base, start, token, blocks, HEAD_DIM, WIDTH, BITS, 1, False, False, MASKED)
        return first, to_rows(second, SLOTS, REPEATS)
    else:
        return (first,)


@triton.jit
def load_row_scales(
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
