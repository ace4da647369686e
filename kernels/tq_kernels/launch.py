"""Launching the same kernel again and again without Triton's own look-up, which costs tens of microseconds."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

_COMPILED: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}
_NUMBERS: dict[Hashable, int] = {}


def launch(
    kernel: Any, key: Hashable, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any],
    **options: Any,
) -> None:  # fmt: skip
    """kernel[grid](*arguments, **constants, **options).

    arguments: in the order of the signature, before the constants
    key:       everything for which Triton would compile anew: device, constants, options, and of the arguments the
               dtypes, the alignment of pointers, which are None, and the integers that it may specialise on (all but
               those in `do_not_specialize`)
    """
    place = (id(kernel), key, grid)
    known = _COMPILED.get(place)
    if known is not None:
        run, values = known
        run(*arguments, *values)
        return
    compiled = kernel[grid](*arguments, **constants, **options)
    if compiled is not None:  # the interpreter compiles nothing
        values = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        _COMPILED[place] = (compiled[grid], values)


def number_of(key: Hashable) -> int:
    """A number in place of a long key: the same for equal keys, and for no others."""
    return _NUMBERS.setdefault(key, len(_NUMBERS))


class Signature(NamedTuple):
    """What of a tensor decides how it is read: part of a key."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool  # starts at a multiple of 16 bytes


def signature(x: torch.Tensor) -> Signature:
    return Signature(x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0)


def aligned(*tensors: Any) -> tuple[bool | None, ...]:
    """Whether each tensor starts at a multiple of 16 bytes, None for None: part of a key."""
    return tuple([None if tensor is None else tensor.data_ptr() % 16 == 0 for tensor in tensors])
