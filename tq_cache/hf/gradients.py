"""Where gradients end: a cache keeps no graph, so an update passes those of its own tokens, and of no earlier ones."""

from dataclasses import replace

import torch

from ..formats.states import KVView


@torch.library.custom_op("tq_cache::refuse_gradients", mutates_args=())
def refuse_gradients(x: torch.Tensor) -> torch.Tensor:
    """`x`, whose gradient raises RuntimeError: it would be partial.  A step may be run, and compiled, all the same."""
    return x.clone()


@torch.library.custom_op("tq_cache::raise_on_gradient", mutates_args=())
def _raise_on_gradient(gradient: torch.Tensor) -> torch.Tensor:
    raise RuntimeError(
        "expected a backward pass within one update of the cache, got one into tokens of an earlier update, whose "
        "gradients the cache did not keep; run earlier updates under torch.no_grad(), all tokens in one update, or use "
        "a DynamicCache"
    )


@refuse_gradients.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@_raise_on_gradient.register_fake
def _(gradient: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient)


# An operation, since torch.compile runs this function itself: the message is for the backward pass.
refuse_gradients.register_autograd(lambda _, gradient: _raise_on_gradient(gradient))


def with_gradients(view: KVView, keys: torch.Tensor, values: torch.Tensor, lost: bool) -> KVView:
    """A view whose new tokens [B, H_kv, T, D] have their gradients, in memory that later updates do not write to.

    lost: whether tokens held before came with gradients
    """
    held = view.tail_keys.shape[2] - keys.shape[2]
    tails = [
        torch.cat([tail[:, :, :held].detach(), new], dim=2) if held else new
        for tail, new in ((view.tail_keys, keys), (view.tail_values, values))
    ]
    tail_keys, tail_values = map(refuse_gradients, tails) if lost else tails
    return replace(view, tail_keys=tail_keys, tail_values=tail_values)


def with_newest(
    pair: tuple[torch.Tensor, ...], newest: tuple[torch.Tensor, ...], num_tokens: torch.Tensor, lost: bool
) -> list[torch.Tensor]:
    """Keys and values [B, H_kv, max_cache_len, D] of `num_tokens`, the newest one's, [B, H_kv, 1, D], with gradients.

    lost: whether tokens held before came with gradients
    """
    place = num_tokens[None] - 1
    result = [held.index_copy(2, place, new) for held, new in zip(pair, newest, strict=True)]
    return [refuse_gradients(x) for x in result] if lost else result
