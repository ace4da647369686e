"""What differs between the versions of transformers (5.17 to 5.23) and torch (2.11 to 2.13) supported, in one place."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, StaticCache, get_layer_types_and_kwargs

NEWEST_TESTED = Version("5.23")  # transformers: the newest that all tests have passed with; ARCHITECTURES.md is of it
_BEFORE_5_18 = Version(transformers.__version__) < Version("5.18")
# Up to 5.17 a positive argument of `crop` means the tokens to keep; 5.23 refuses it.
CROP_TAKES_LENGTH = _BEFORE_5_18
# Up to 5.17 `reset` of a growing layer makes its tensors zeros and keeps its length; 5.23 drops them.
RESET_KEEPS_LENGTH = _BEFORE_5_18

# Up to 5.17 generate() fails to make the masks of chunked attention before a step, which static caches need.
CHUNKED_MASKS_FAIL = _BEFORE_5_18

# Dynamo of torch 2.11 takes `is_exporting` for true in torch.compile, too.
COMPILING_LOOKS_LIKE_EXPORT = Version(torch.__version__) < Version("2.13")


@functools.cache
def warn_if_untested() -> None:
    """Warn, once in a process, of a transformers that is newer than what was tested.

    `enable` rests on a private method of `generate()`, which may come to mean something else.
    """
    version = Version(transformers.__version__)
    if version.release[:2] > NEWEST_TESTED.release:
        warnings.warn(
            f"tq_cache.enable was tested with transformers up to {NEWEST_TESTED}, and this is {version}: `generate()` "
            "may make its cache in another way by now. Compare its text with that of tq_cache.disable(model), or "
            f'pip install "transformers<{NEWEST_TESTED.major}.{NEWEST_TESTED.minor + 1}"',
            stacklevel=3,
        )


def exporting() -> bool:
    """Whether torch.export runs; before torch 2.13 only if not `strict`, which is its default."""
    if COMPILING_LOOKS_LIKE_EXPORT and torch.compiler.is_dynamo_compiling():
        return False
    return torch.compiler.is_exporting()


@torch.compiler.disable
def outside_graph(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` as a break in the graph of torch.compile.

    For what depends on lengths, or launches kernels: traced, it would be traced anew with every step.
    """
    return function(*args)


def decoder_config(config: Any) -> PreTrainedConfig:
    """The part of a config that describes the decoder.  Raises TypeError or ValueError unless it can have a cache."""
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"expected a transformers config (model.config), got {type(config).__name__}")
    decoder = config.get_text_config(decoder=True)
    if getattr(decoder, "num_hidden_layers", None) is None:
        raise ValueError(
            f"expected a decoder config with num_hidden_layers, got {type(decoder).__name__} without; "
            "pass the config of a decoder model"
        )
    return decoder


def layer_kinds(decoder: PreTrainedConfig) -> list[str]:
    """Kind of each cache layer of this decoder, as transformers names them (see `policy`)."""
    # A pair in both versions: the kinds, then the layers' arguments (5.17: one dict; 5.23: one a layer).
    return list(get_layer_types_and_kwargs(decoder)[0])


def own_layers(decoder: PreTrainedConfig, max_cache_len: int | None = None) -> list[Any]:
    """transformers' own cache layers for this decoder, one for each of `layer_kinds`; static with a max_cache_len."""
    if max_cache_len is None:
        return list(DynamicCache(config=decoder).layers)
    return list(StaticCache(config=decoder, max_cache_len=max_cache_len).layers)


def length_after_crop(tokens_to_remove: int, length: int) -> int:
    """Tokens left of `length` after transformers' `crop(tokens_to_remove)`.

    Negative or zero: so many tokens are removed.  Positive: so many are kept (5.17), ValueError (5.23).  Removing
    more than there are is a ValueError.  5.17 passes a tensor at times.
    """
    tokens_to_remove = int(tokens_to_remove)
    if tokens_to_remove > 0:
        if not CROP_TAKES_LENGTH:
            raise ValueError(f"expected a number of tokens to remove as zero or less, got {tokens_to_remove}")
        return min(tokens_to_remove, length)
    if -tokens_to_remove > length:
        raise ValueError(f"expected to remove at most the {length} tokens held, got {-tokens_to_remove}")
    return length + tokens_to_remove
