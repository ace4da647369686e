"""Online softmax of flash attention: the state over the tokens so far.

Scores have base 2.  Log-sum-exps outside the state are natural ones.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..bits.layout import channels
from .base2 import divisor, log2_sum
from .scores import LOG2E

P_SHIFT = tl.constexpr(8.0)  # probabilities are scaled to at most 2**8: float16 then holds them down to 2**-32


class SoftmaxState(NamedTuple):
    """Of M queries, float32: the largest score [M], the sum [M] and the weighted values [M, channels]."""

    peak: Any
    sum: Any
    acc: Any


@triton.jit
def begin_softmax(packed, offset, index, inside, M: tl.constexpr, DIM: tl.constexpr):
    """State after the packed tokens, whose log-sum-exps are without `offset` (base 2); before any token if None."""
    CHANNELS: tl.constexpr = channels(DIM)
    if packed is None:
        zeros = tl.zeros((M,), tl.float32)
        return SoftmaxState(tl.full((M,), -1e30, tl.float32), zeros, tl.zeros((M, CHANNELS), tl.float32))
    else:
        lse = tl.load(packed.lse + index, mask=inside, other=0) * LOG2E
        if offset is not None:
            lse += tl.load(offset + index, mask=inside, other=0)
        total = tl.where(lse == float("-inf"), 0.0, 256.0)  # 2 ** P_SHIFT
        total = tl.where(lse == lse, total, lse)  # NaN stays, whatever a maximum makes of it
        channel = tl.arange(0, CHANNELS)
        used = inside[:, None] & (channel < DIM)[None, :]
        acc = tl.load(packed.out + index[:, None] * DIM + channel[None, :], mask=used, other=0).to(tl.float32)
        return SoftmaxState(tl.maximum(lse, -1e30), total, acc * total[:, None])


@triton.jit
def with_sink_logit(state, logit):
    """One more logit [M], which takes weight and gives nothing."""
    logit = logit.to(tl.float32) * LOG2E
    peak = tl.maximum(state.peak, logit)
    alpha = tl.exp2(state.peak - peak)
    return SoftmaxState(peak, state.sum * alpha + tl.exp2(logit - peak + P_SHIFT), state.acc * alpha[:, None])


@triton.jit
def accumulate(s, v, state, PRECISION: tl.constexpr):
    """One step of online softmax: scores [M, N], values [N, channels]."""
    peak = tl.maximum(state.peak, tl.max(s, 1))
    alpha = tl.exp2(state.peak - peak)
    p = tl.exp2(s - (peak - P_SHIFT)[:, None])
    total = state.sum * alpha + tl.sum(p, 1)
    return SoftmaxState(peak, total, tl.dot(p.to(v.dtype), v, state.acc * alpha[:, None], input_precision=PRECISION))


@triton.jit
def weighted_mean(state):
    """The output, float32 [M, channels]: zeros where no token was seen."""
    return state.acc / divisor(state.sum)[:, None]


@triton.jit
def log_sum(state):
    """Natural log-sum-exp."""
    return (state.peak - P_SHIFT + log2_sum(state.sum)) / LOG2E
