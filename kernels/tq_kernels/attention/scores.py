"""Scores (in base 2) before the softmax: soft cap, masks, and how many tokens there are."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..bits.layout import BLOCK_TOKENS

LOG2E = tl.constexpr(1.4426950408889634)
NO_MASK, ROW_MASK, FULL_MASK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # one for all columns, or by column


class ScoreFactors(NamedTuple):
    """scaling: of scores, times log2 e; softcap: see `soft_cap`, 0 where there is none."""

    scaling: float
    softcap: float


@triton.jit
def soft_cap(s, softcap):
    """softcap * tanh(s / softcap) of scores in base 2."""
    x = s / (softcap * LOG2E)
    t = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    tanh = tl.where(x < 0, t - 1, 1 - t) / (1 + t)
    y = x * x  # near 0 the difference above would cancel
    near = x * (1 - y * (0.33333333 - y * (0.13333333 - y * 0.053968254)))
    return tl.where(y < 0.04, near, tanh) * (softcap * LOG2E)


@triton.jit
def load_mask(mask, base, columns, step, token, inside, AXIS: tl.constexpr, MASK: tl.constexpr):
    """The mask of tokens, the first of all 0, for scores that have tokens along `AXIS` and columns along the other one.

    `base` is where one mask for all columns begins, `columns` where those of each column do, `step` the next token.
    """
    if MASK == ROW_MASK:
        return tl.expand_dims(tl.load(mask + base + token * step, mask=inside, other=0), 1 - AXIS)
    elif MASK == FULL_MASK:
        pointer = mask + tl.expand_dims(columns, AXIS) + tl.expand_dims(token * step, 1 - AXIS)
        return tl.load(pointer, mask=tl.expand_dims(inside, 1 - AXIS), other=0)
    else:
        return inside  # is not looked at


@triton.jit
def apply_mask(s, m, MASK: tl.constexpr):
    """Scores with a loaded mask: a float one is added, one of bytes hides where it is 0.

    What is hidden, by 0 or by -inf, becomes -inf, also NaN: never by an addition alone.
    """
    if MASK == NO_MASK:
        return s
    elif m.dtype == tl.uint8:
        return tl.where(m != 0, s, float("-inf"))
    else:
        m = m.to(tl.float32)
        return tl.where(m == float("-inf"), m, s + m * LOG2E)


@triton.jit
def lengths_now(num_tokens, num_sinks, tail_length, packed_length, residual_length):
    """Sinks, tokens in the tail and packed: as given, or as `num_tokens` on the device says of a preallocated layer."""
    if num_tokens is not None:
        count = tl.load(num_tokens).to(tl.int32)
        others = tl.maximum(count - num_sinks, 0)
        num_sinks = count - others
        # Rounded down, by rounding up 63 fewer: where LLVM sees a multiple of 64 that is positive, it unfolds which
        # tokens of a tile count, and the loop over tiles has a tenth more instructions (4 and 3 bits, sm_90).
        packed_length = tl.maximum(others - residual_length - (BLOCK_TOKENS - 1), 0)
        packed_length = tl.cdiv(packed_length, BLOCK_TOKENS) * BLOCK_TOKENS
        tail_length = others - packed_length
    return num_sinks, tail_length, packed_length
