"""Which attention function the calling model runs: what it does with what a layer hands out decides, no config.

transformers tells a cache neither the model nor its attention function.  The config that the cache was made from is the
first guess, no more: it may be a copy, or that of another model.

    guess             handed out          what shows the attention function
    "turboquant"      handles, records    nothing need be known: whoever else takes one gets the tensor behind it
    another, or none  tensors, lent       "turboquant" knows lent tensors, and reads the bits behind them
                      records of latents  "turboquant" finds what is behind them, others ask for tensors

The next update hands out what fits, and whoever does otherwise shows it again.  Inside a graph nobody can show
anything: there it stays as the last update outside one has shown, at the latest that of the prompt.
"""

from typing import Any

import torch
from transformers import PreTrainedConfig

ATTENTION_NAME = "turboquant"
# Attribute of a lent tensor: the handle that might be in its place, and the caller that is to be told.
_LENT = "tq_lent"


class Caller:
    """What is known of the attention function; one for all layers of a cache.

    config: its attention function is the first guess
    seen:   whether "turboquant" was seen to attend, or another one; None before
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config
        self.seen: bool | None = None

    @property
    def reads_bits(self) -> bool | None:
        """Whether attention is "turboquant"; None: it may be."""
        return True if self.config._attn_implementation == ATTENTION_NAME else self.seen


def lend(handle: Any, tensor: torch.Tensor, caller: Caller) -> torch.Tensor:
    """`tensor`, which `handle` stands for, so that `borrowed` finds the handle."""
    tensor = tensor.view_as(tensor)  # a tensor of its own, which the handle does not hold: no circle
    setattr(tensor, _LENT, (handle, caller))
    return tensor


def is_lent(key: Any) -> bool:
    """Whether these keys were lent by a layer, and nothing was made of them; torch.compile follows it."""
    return hasattr(key, _LENT)


def borrowed(key: torch.Tensor, value: torch.Tensor) -> tuple[Any, Any]:
    """The handles in whose place lent tensors are, for "turboquant"; where these are no pair, what came."""
    if not (is_lent(key) and is_lent(value)):
        return key, value
    (key_handle, caller), (value_handle, _) = getattr(key, _LENT), getattr(value, _LENT)
    caller.seen = True
    return key_handle, value_handle
