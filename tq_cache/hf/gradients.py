"""Where gradients end: a cache keeps no graph, so an update passes those of its own tokens, and of no earlier ones."""

import torch


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
