"""How likely continuations of a context are under a cache.

One forward over context and continuation, as is usual, has no past: nothing that a cache does changes it.  Here the
context goes into the cache first, and what is scored reads it from there.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .scores import decode, prefill

EXACT = "16bit"  # stands for DynamicCache among presets
CHUNK = 16  # tokens a forward, which see each other exactly; as `EvalSettings.chunk`


class Likelihood(NamedTuple):
    """Of one continuation: the sum of its tokens' log-probabilities, nats, and whether each is the most likely one."""

    logprob: float
    greedy: bool


@torch.inference_mode()
def likelihoods(
    model: Any, context: Sequence[int], continuations: Sequence[Sequence[int]], cache: Any
) -> list[Likelihood]:
    """Score `continuations` of one `context`, token ids, under `cache`, which is empty and is used up.

    All but the context's last token are prefilled, in one forward, as in `generate()`.  The last one and a continuation
    go through `CHUNK` at a time, so that the cache has a part in the first token of an answer, too; each continuation
    on a copy of the cache, so that it is scored as if it were alone.  Raises ValueError where the context or a
    continuation is empty.
    """
    if not context or not all(continuations):
        raise ValueError("expected a context and continuations of 1 token or more each, got an empty one")
    start = len(context) - 1
    if start:
        prefill(model, torch.tensor([context[:start]], device=model.device), cache)
    return [_score(model, context, own, copy.deepcopy(cache)) for own in continuations]


def _score(model: Any, context: Sequence[int], continuation: Sequence[int], cache: Any) -> Likelihood:
    """One continuation, where `cache` holds all of the context but its last token."""
    ids = torch.tensor([[*context, *continuation]], device=model.device)
    place, logprob, greedy = len(context), 0.0, True
    for logits in decode(model, ids, place - 1, CHUNK, cache):
        targets = ids[:, place : place + logits.shape[1]]
        logprob += logits.log_softmax(dim=-1).gather(-1, targets[..., None]).double().sum().item()
        greedy &= bool((logits.argmax(dim=-1) == targets).all())
        place += logits.shape[1]
    return Likelihood(logprob, greedy)
