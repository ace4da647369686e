"""The lazy handles that a packed layer gives a model in place of keys and values.

A handle has the shape, dtype and device of the tensor it stands for.  The registered attention function recognises the
two handles of one update and reads the packed parts; any other operation on a handle dequantises it first, so a model
that changes keys or values on the way still gets right answers.  The tensor that it then gets may be written to, in
place or by a view of it, and nobody tells: from then on the handle stands for that tensor, and no longer for what the
cache holds.  Those of a preallocated layer are in `graph_ops`.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..backends import choose_backend
from ..formats.presets import Role
from ..formats.states import KVView
from .caller import Caller


class LazyHandle(torch.Tensor):
    """Any operation but those of attention gets the tensor that it stands for.

    caller:          is told of such an operation; None: nobody is
    keeps_gradients: whether what is read in its place has the gradients of a tensor that is lent for it
    """

    caller: Caller | None = None
    keeps_gradients = False
    _made: torch.Tensor | None = None

    # The dispatch below sees every operation.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def make(self) -> torch.Tensor:
        """A new tensor of what this handle stands for."""
        raise NotImplementedError

    def dequantize(self) -> torch.Tensor:
        """The tensor that this handle stands for, made once."""
        if self._made is None:
            self.show(self.make())
        assert self._made is not None
        return self._made

    def show(self, tensor: torch.Tensor) -> None:
        """Stand for this tensor, whatever becomes of it."""
        self._made = tensor

    @property
    def is_untouched(self) -> bool:
        """Whether it still stands for what the cache holds: nobody has had a tensor that could be written to."""
        return self._made is None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(plain, (args, kwargs or {}))
        return func(*args, **kwargs)


class KVHandle(LazyHandle):
    """Stands for the keys or the values of `view`, [B, H_kv, view.length, D]."""

    view_of_cache: KVView
    role: Role
    keeps_gradients = True

    @staticmethod
    def __new__(cls, view: KVView, role: Role, caller: Caller | None = None) -> "KVHandle":
        like = view.tail_keys if role == "key" else view.tail_values
        batch, heads, _, dim = like.shape
        shape = (batch, heads, view.length, dim)
        handle = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        handle.view_of_cache, handle.role, handle.caller = view, role, caller
        return handle

    def __repr__(self) -> str:  # type: ignore[override]
        return f"KVHandle({self.role}, shape={list(self.shape)}, packed={self.view_of_cache.packed_length})"

    def make(self) -> torch.Tensor:
        """Contiguous, as the handle says it is, in memory of its own."""
        return owned(self.view_of_cache, self.role)

    def show(self, tensor: torch.Tensor) -> None:
        if self.view_of_cache.observe is not None:
            self.view_of_cache.observe(None, None)  # whoever has the tensor keeps the queries to itself
        super().show(tensor)


def plain(x: Any) -> Any:
    """`x`, dequantised if it is a handle."""
    if not isinstance(x, LazyHandle):
        return x
    if x.caller is not None:
        x.caller.seen = False
    return x.dequantize()


def materialize(view: KVView, role: Role) -> torch.Tensor:
    """All keys, or values, of a view in the model's dtype: [B, H_kv, view.length, D]."""
    view = view.on_device()
    tail, sinks, packed = (
        (view.tail_keys, view.sink_keys, view.key)
        if role == "key"
        else (view.tail_values, view.sink_values, view.value)
    )
    if view.is_exact:
        return tail
    pieces = [] if sinks is None else [sinks]
    if packed is not None:
        backend = choose_backend(view.backend, view.tail_keys, view.tail_values)
        pieces.append(backend.dequantize(packed, view.packed_length, tail.dtype))
    return torch.cat([*pieces, tail], dim=2)


def owned(view: KVView, role: Role) -> torch.Tensor:
    """As `materialize`, contiguous, and never memory of the cache or the model."""
    x = materialize(view, role)
    return x.clone(memory_format=torch.contiguous_format) if view.is_exact else x


def paired_view(key: torch.Tensor, value: torch.Tensor) -> KVView | None:
    """The view behind an untouched pair of handles; None if these are anything else."""
    if (
        isinstance(key, KVHandle)
        and isinstance(value, KVHandle)
        and key.view_of_cache is value.view_of_cache
        and (key.role, value.role) == ("key", "value")
        and key.is_untouched
        and value.is_untouched
    ):
        return key.view_of_cache
    return None
