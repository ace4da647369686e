"""Launching the same kernel again and again without Triton's own look-up, which costs tens of microseconds."""

from collections.abc import Hashable
from typing import Any

_COMPILED: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}


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
    place = (id(kernel), key)
    if place in _COMPILED:
        compiled, values = _COMPILED[place]
        compiled[grid](*arguments, *values)
        return
    compiled = kernel[grid](*arguments, **constants, **options)
    if compiled is not None:  # the interpreter compiles nothing
        values = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        _COMPILED[place] = (compiled, values)


def aligned(*tensors: Any) -> tuple[bool | None, ...]:
    """Whether each tensor starts at a multiple of 16 bytes, None for None: part of a key."""
    return tuple(None if tensor is None else tensor.data_ptr() % 16 == 0 for tensor in tensors)
