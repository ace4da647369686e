"""Prefill over a packed past: attention of many queries over packed keys and values, then over exact ones.

First, rotation, smoothing and centre of the keys are undone in the query (`spaces`):

    q . k_hat = (R (smooth q)) . (scale * codes) + q . center

Then come the packed tokens, in one of two ways, each giving outputs and log-sum-exps of spans of them:

tiles      Flash attention: for every mask, soft cap, dtype and architecture.
segments   cuDNN's attention over a buffer of dequantised tokens: on Hopper and later, for queries that may see every
           packed token.

The spans are joined, and rotation and centre of the values undone (`spaces`).  From there, flash attention goes on over
the tokens that are still in the model's dtype: sink tokens, tail, chunk (`exact`).

Log-sum-exps that kernels hand on are natural logarithms; inside a kernel scores have base 2.
"""

import torch
import triton

from ..attention.masks import expand_logits, expand_mask
from ..device import describe
from ..launch import check_devices
from ..states import States
from . import tuning
from .arguments import Attended
from .exact import attend_exact_tokens
from .problem import Problem, check_exact, check_packed
from .segments import attend_segments, has_fast_segments
from .spaces import merge_spans, rotate_query
from .tiles import attend_tiles


def prefill(
    query: torch.Tensor,
    key: States | None,
    value: States | None,
    tail_keys: torch.Tensor,
    tail_values: torch.Tensor,
    *,
    packed_length: int,
    scaling: float,
    sink_tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    causal: bool = True,
    segments: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of many queries over sink tokens, packed tokens and exact tokens, in this order.

    query:       [B, H_q, S, D], bfloat16, float16 or float32; D and D_v at most 256
    key, value:  packed states with at least `packed_length` tokens; None if that is 0
    tail_keys, tail_values: the newest tokens, [B, H_kv, n, D] and [B, H_kv, n, D_v] in the query's dtype
    scaling:     factor of the scores; softcap: scores become softcap * tanh(scores / softcap), before the mask
    sink_tokens: first keys and values, like the newest ones
    mask:        [B or 1, H_q or 1, S, all tokens or more], bool (True takes part) or float (added), or None: causal,
                 the last query seeing every token, or everything if not `causal`
    sink_logits: [1 or B, H_q, 1 or S] or [H_q], one more logit per query that takes weight and gives nothing
    segments:    force one of the two ways (see above) for the packed tokens; segments take no mask and no soft cap

    Returns the output [B, H_q, S, D_v] in the query's dtype, contiguous, and the natural log of the softmax' sum,
    float32 [B, H_q, S].  A query that may see no token gets zeros and -inf.  Raises ValueError for anything else.
    """
    check_devices(query, tail_keys, tail_values, *(sink_tokens or ()), mask, sink_logits)
    check_exact(query, tail_keys, tail_values, causal and mask is None)
    if sink_logits is not None:
        sink_logits = expand_logits(sink_logits[None, :, None] if sink_logits.dim() == 1 else sink_logits, query)
    exact_keys, exact_values, num_sinks = tail_keys, tail_values, 0
    if sink_tokens is not None:
        num_sinks = sink_tokens[0].shape[2]
        exact_keys = torch.cat([sink_tokens[0], tail_keys], 2)
        exact_values = torch.cat([sink_tokens[1], tail_values], 2)
        check_exact(query, exact_keys, exact_values, False)  # as many of both
    if mask is not None:
        mask = expand_mask(mask, query, packed_length + exact_keys.shape[2])
    if segments and (mask is not None or softcap is not None):
        raise ValueError("expected no mask and no softcap with segments=True; give segments=None")
    problem = Problem(
        describe(query.device), query, key, value, exact_keys, exact_values, packed_length, num_sinks, query.shape[2],
        scaling, softcap, mask, sink_logits, causal,
    )  # fmt: skip
    if packed_length:
        check_packed(key, value, packed_length, problem.dims, tail_keys)
        check_devices(query, key and key.layout, value and value.layout)
    return attend(problem, segments)


def attend(problem: Problem, segments: bool | None = None) -> Attended:
    """`prefill` of a problem: launch after launch."""
    if problem.packed_length == 0:
        return attend_exact_tokens(problem, None)
    if segments is None:
        segments = has_fast_segments(problem)
    if segments:
        problem = problem._replace(rows=triton.cdiv(problem.rows, tuning.QUERY_UNIT) * tuning.QUERY_UNIT)
    rotated = rotate_query(problem)
    spans = attend_segments(problem, rotated) if segments else attend_tiles(problem, rotated)
    packed = merge_spans(problem, spans, last=True)
    return attend_exact_tokens(problem, packed, rotated.offset if problem.softcap is None else None)
