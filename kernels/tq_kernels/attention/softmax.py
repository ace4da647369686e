"""Online softmax of flash attention: the state over the tokens so far, (largest score, sum, accumulator).

Scores have base 2; M queries, [M], [M] and [M, channels], float32.  Log-sum-exps outside the state are natural ones.
"""

import triton
import triton.language as tl

from ..bits.layout import channels
from .scores import LOG2E

P_SHIFT = tl.constexpr(8.0)  # probabilities are scaled to at most 2**8: float16 then holds them down to 2**-32


@triton.jit
def begin_softmax(partial, partial_lse, offset, index, inside, M: tl.constexpr, DIM: tl.constexpr):
    """State after the packed tokens, from outputs and log-sum-exps without `offset`; before any token if None."""
    CHANNELS: tl.constexpr = channels(DIM)
    if partial is None:
        return tl.full((M,), -1e30, tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M, CHANNELS), tl.float32)
    else:
        lse = tl.load(partial_lse + index, mask=inside, other=0) * LOG2E
        if offset is not None:
            lse += tl.load(offset + index, mask=inside, other=0)
        total = tl.where(lse == float("-inf"), 0.0, 256.0)  # 2 ** P_SHIFT
        channel = tl.arange(0, CHANNELS)
        used = inside[:, None] & (channel < DIM)[None, :]
        acc = tl.load(partial + index[:, None] * DIM + channel[None, :], mask=used, other=0).to(tl.float32)
        return tl.maximum(lse, -1e30), total, acc * total[:, None]


@triton.jit
def with_extra_logit(state, logit):
    """One more logit [M], which takes weight and gives nothing."""
    logit = logit.to(tl.float32) * LOG2E
    peak = tl.maximum(state[0], logit)
    alpha = tl.exp2(state[0] - peak)
    return peak, state[1] * alpha + tl.exp2(logit - peak + P_SHIFT), state[2] * alpha[:, None]


@triton.jit
def accumulate(s, v, state, PRECISION: tl.constexpr):
    """One step of online softmax: scores [M, N], values [N, channels], state (largest score, sum, accumulator)."""
    peak = tl.maximum(state[0], tl.max(s, 1))
    alpha = tl.exp2(state[0] - peak)
    p = tl.exp2(s - (peak - P_SHIFT)[:, None])
    total = state[1] * alpha + tl.sum(p, 1)
    return peak, total, tl.dot(p.to(v.dtype), v, state[2] * alpha[:, None], input_precision=PRECISION)


@triton.jit
def log_sum(state):
    """Natural log-sum-exp."""
    lse = state[0] - P_SHIFT + tl.log2(tl.maximum(state[1], 1e-30))
    return tl.where(state[1] > 0, lse / LOG2E, float("-inf"))
