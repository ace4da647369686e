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

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

ATTENTION_NAME = "turboquant"
# Attribute of a lent tensor: its `Loan`.
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


class Loan(NamedTuple):
    """What is behind a lent tensor.

    handle:  might be in its place
    caller:  is to be told
    version: of the tensor, which counts writes in place; None: it counts none, and is the memory that the handle reads
    """

    handle: Any
    caller: Caller
    version: int | None


def lend(handle: Any, tensor: torch.Tensor, caller: Caller) -> torch.Tensor:
    """`tensor`, which `handle` stands for, so that `borrowed` finds the handle.

    One that inference mode made does not count writes: see `counting_writes`.
    """
    tensor = tensor.view_as(tensor)  # a tensor of its own, which the handle does not hold: no circle
    setattr(tensor, _LENT, Loan(handle, caller, None if tensor.is_inference() else tensor._version))
    return tensor


@contextmanager
def counting_writes() -> Iterator[None]:
    """Out of inference mode, so that tensors made here count writes; gradients as outside."""
    with_gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(with_gradients):
        yield


def is_lent(x: Any) -> bool:
    """Whether these keys or values were lent by a layer, and nothing was made of them; torch.compile follows it."""
    return hasattr(x, _LENT)


def borrowed(key: torch.Tensor, value: torch.Tensor) -> tuple[Any, Any]:
    """For "turboquant": handles in place of lent tensors, which show those that were written to, or are no pair."""
    pair = is_lent(key) and is_lent(value)
    return tuple(_handle_of(x, pair) if is_lent(x) else x for x in (key, value))  # type: ignore[return-value]


def _handle_of(tensor: torch.Tensor, of_a_pair: bool) -> Any:
    handle, caller, version = getattr(tensor, _LENT)
    caller.seen = True
    written = version is not None and version != tensor._version
    if written or not of_a_pair or (tensor.requires_grad and not handle.keeps_gradients):
        handle.show(tensor)
    return handle
