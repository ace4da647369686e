"""What the launches of decode share: scores (in base 2) before the softmax, masks, lengths."""

import triton
import triton.language as tl

from .primitives import BLOCK_TOKENS

LOG2E = tl.constexpr(1.4426950408889634)
NO_MASK, ROW_MASK, FULL_MASK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # one for all columns, or by column


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
def apply_mask(s, mask, base, columns, stride, place, inside, MASK: tl.constexpr):
    """Adds a float mask to scores [tokens, columns] of tokens `place`; a mask of bytes hides where it is 0.

    `base` is where one mask for all columns begins, `columns` where those of each column do.
    """
    if MASK == NO_MASK:
        return s
    else:
        if MASK == ROW_MASK:
            m = tl.load(mask + base + place * stride, mask=inside, other=0)[:, None]
        else:
            m = tl.load(mask + columns[None, :] + (place * stride)[:, None], mask=inside[:, None], other=0)
        if m.dtype == tl.uint8:
            return tl.where(m != 0, s, float("-inf"))
        else:
            return s + m.to(tl.float32) * LOG2E


@triton.jit
def lengths_now(total, tail, packed, residual):
    """Exact and packed tokens: as given, or as `total` on the device says (`tq_cache/static_parts.py`)."""
    if total is not None:
        count = tl.load(total).to(tl.int32)
        packed = tl.cdiv(tl.maximum(count - residual, 0), BLOCK_TOKENS) * BLOCK_TOKENS
        tail = count - packed
    return tail, packed
