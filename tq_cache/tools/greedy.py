"""Greedy decoding with the exact cache, and how far another cache goes along with it.

Until their first difference two greedy runs hold the same tokens.  So a run of its own is not needed to find it: the
exact run's tokens are given, and the first one that is not the most likely under the cache is where they part.  What
comes behind is compared as well, each token with those of the exact run before it.
"""

from dataclasses import dataclass
from typing import Any

import torch

from .scores import decode


@dataclass(frozen=True)
class Agreement:
    """Of G greedy tokens per text.

    first: int64 [N], position of the first token that differs, 0 to G; G where none does
    same:  float64 [N], share of the G tokens that are the most likely ones, given the exact run before them
    """

    first: torch.Tensor
    same: torch.Tensor


@torch.inference_mode()
def greedy_tokens(model: Any, prompts: torch.Tensor, logits: torch.Tensor, cache: Any, count: int) -> torch.Tensor:
    """`prompts` int64 [N, P] and, behind, the `count` most likely tokens, one after the other; no token ends a text.

    `cache` holds the prompts, `logits` [N, vocabulary] are those behind their last tokens.
    """
    tokens = [logits.argmax(dim=-1, keepdim=True)]
    while len(tokens) < count:
        tokens.append(model(tokens[-1], past_key_values=cache).logits[:, -1].argmax(dim=-1, keepdim=True))
    return torch.cat([prompts, *tokens], dim=1)


def agreement(model: Any, ids: torch.Tensor, start: int, chunk: int, cache: Any) -> Agreement:
    """How far `cache`, which holds the first `start` tokens of `ids` [N, T], agrees with the greedy tokens behind.

    The first of them follows from the prefill, whose attention is exact, and is the same for every cache.
    """
    tops = [logits.argmax(dim=-1) for logits in decode(model, ids, start, chunk, cache)]
    given = ids[:, start : start + 1]
    return compare((torch.cat([given, *tops], dim=1) == ids[:, start:]).cpu())


def compare(equal: torch.Tensor) -> Agreement:
    """From bool [N, G], whether each token is the same."""
    return Agreement(equal.long().cumprod(dim=1).sum(dim=1), equal.double().mean(dim=1))
