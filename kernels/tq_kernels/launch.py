"""A launch is data: a kernel, grid, arguments, constants and options.  Production runs it, tests compile it.

Triton's own look-up of what it has compiled takes tens of microseconds.  Here it is found by all that Triton
specialises on (`kind`), and by whoever keeps a `Program` for arguments of one kind without any look-up.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from .device import Device

MOST_COMPILED = 1024  # the oldest are forgotten here; Triton still has them

_COMPILED: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}


class Program:
    """A kernel with its constants and options on a device: a launch but for its grid and arguments.

    kernel:    a function of `triton.jit`
    constants: the last parameters of the kernel, by name
    options:   those of the compiler that are not its defaults: num_warps, num_stages, maxnreg, launch_pdl

    One that is kept for more than one launch takes arguments of one `kind` alone.
    """

    __slots__ = ("kernel", "device", "constants", "options", "compiled")

    def __init__(self, kernel: Any, device: Device, constants: dict[str, Any], options: dict[str, Any]) -> None:
        self.kernel, self.device, self.constants, self.options = kernel, device, constants, options
        self.compiled: tuple[Any, tuple[Any, ...]] | None = None  # once launched: by Triton, and the constants' values

    def key(self, arguments: tuple[Any, ...]) -> Hashable:
        """All for which Triton may compile anew."""
        never, names = (
            getattr(self.kernel, "do_not_specialize", ()),
            self.kernel.arg_names,
        )  # an interpreted one has none
        sized = self.device.backend == "hip"
        kinds = [kind(x, name not in never, sized) for name, x in zip(names, arguments, strict=False)]
        constants, options = self.constants, self.options
        return id(self.kernel), self.device, *kinds, tuple(constants.items()), tuple(options.items())


class Launch(NamedTuple):
    """A launch: of `program`, on `grid`, with `arguments` in the order of the signature, before the constants."""

    program: Program
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]

    def run(self) -> None:
        program, arguments = self.program, self.arguments
        if program.compiled is None and not _find(program, self.grid, arguments):
            return
        compiled, values = program.compiled  # type: ignore[misc]
        compiled[self.grid](*arguments, *values)


def _find(program: Program, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> bool:
    """Whether what was compiled for the program was there; if not, it is compiled, launched and kept."""
    key = program.key(arguments)
    program.compiled = _COMPILED.get(key)
    if program.compiled is not None:
        return True
    kernel, constants = program.kernel, program.constants
    compiled = kernel[grid](*arguments, **constants, **program.options)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_COMPILED) >= MOST_COMPILED:
            _COMPILED.pop(next(iter(_COMPILED)), None)
        values = tuple([constants[name] for name in kernel.arg_names[len(arguments) :]])
        program.compiled = _COMPILED[key] = compiled, values
    return False


def kind(x: Any, specialised: bool = True, sized: bool = False) -> Any:
    """What Triton specialises on of an argument: two of one kind share what is compiled.

    Of an integer whether it is 1, a multiple of 16, and its width; of those in `do_not_specialize` (not `specialised`)
    the width alone.  Of a tensor the dtype, whether it starts at a multiple of 16 bytes, and on AMD GPUs (`sized`)
    whether 31 bits hold any offset in its memory.  Of a float or a bool nothing.
    """
    if isinstance(x, tuple):
        return tuple([kind(item, True, sized) for item in x])
    if isinstance(x, torch.Tensor):
        if not specialised:
            return x.dtype
        return x.dtype, x.data_ptr() % 16 == 0, sized and x.untyped_storage().nbytes() < 1 << 31
    if type(x) is int:
        width = 32 if -(1 << 31) <= x < 1 << 31 else 64 if x < 1 << 63 else 65
        return width + (0 if not specialised else 100 if x == 1 else 200 if x % 16 == 0 else 300)
    return None if x is None else type(x)


class Signature(NamedTuple):
    """What of a tensor decides how it is read: part of the key of a plan."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    aligned: bool  # starts at a multiple of 16 bytes
    device: torch.device


new = tuple.__new__  # in place of a NamedTuple's constructor, where that takes longer than all else: every launch


def signature(x: torch.Tensor) -> Signature:
    return new(Signature, (x.shape, x.stride(), x.dtype, x.data_ptr() % 16 == 0, x.device))


def signatures(*tensors: torch.Tensor | None) -> tuple[Signature | None, ...]:
    return tuple([None if x is None else signature(x) for x in tensors])


def check_devices(*given: Any) -> None:
    """Raise ValueError unless all that have a `device`, None aside, are on one."""
    found = dict.fromkeys(str(x.device) for x in given if x is not None and x.device is not None)
    if len(found) > 1:
        raise ValueError(
            f"expected all tensors on one device, got {', '.join(found)}; move them there, or begin with a new cache"
        )


def aligned(*tensors: Any) -> tuple[bool | None, ...]:
    """Whether each tensor starts at a multiple of 16 bytes, None for None: part of the key of a plan."""
    return tuple([None if tensor is None else tensor.data_ptr() % 16 == 0 for tensor in tensors])
