"""The handles that a packed layer gives a model in place of keys and values.

A handle has the shape, dtype and device of the tensor it stands for and holds a `KVView`.  The registered attention
function recognises the two handles of one update and reads the packed parts; any other operation on a handle
dequantises it first, so a model that changes keys or values on the way still gets right answers.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_map

from .. import backends
from ..formats.presets import Role
from ..formats.states import KVView
from ..formats.static_parts import StaticParts, StaticSpec


class _Handle(torch.Tensor):
    """Any operation but those of attention gets the tensor that it stands for."""

    # The dispatch below sees every operation.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def dequantize(self) -> torch.Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(plain, (args, kwargs or {}))
        return func(*args, **kwargs)


class KVHandle(_Handle):
    """Stands for the keys or the values of `view`, [B, H_kv, view.length, D]."""

    view_of_cache: KVView
    role: Role

    @staticmethod
    def __new__(cls, view: KVView, role: Role) -> "KVHandle":
        like = view.keys if role == "key" else view.values
        batch, heads, _, dim = like.shape
        shape = (batch, heads, view.length, dim)
        handle = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        handle.view_of_cache, handle.role = view, role
        return handle

    def __repr__(self) -> str:  # type: ignore[override]
        return f"KVHandle({self.role}, shape={list(self.shape)}, packed={self.view_of_cache.packed_length})"

    def dequantize(self) -> torch.Tensor:
        """The tensor that this handle stands for, contiguous as the handle says it is."""
        return materialize(self.view_of_cache, self.role).contiguous()


class StaticHandle(_Handle):
    """Stands for the keys or the values of a preallocated layer, [B, H_kv, max_length, D]; torch.compile traces it."""

    _spec: str
    _role: Role
    _sizes: tuple[int, int]
    total: torch.Tensor

    @staticmethod
    def __new__(cls, parts: StaticParts, role: Role) -> "StaticHandle":
        ring = parts.held[0 if role == "key" else 1]
        shape = (*ring.shape[:2], StaticSpec.parse(parts.spec).max_length, ring.shape[3])
        handle = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=ring.dtype, device=ring.device)
        handle._spec, handle._role = parts.spec, role
        handle._sizes = len(parts.held), len(parts.calibration)
        for name, tensor in zip(handle._names(), (*parts.held, *parts.calibration, parts.total), strict=True):
            setattr(handle, name, tensor)  # flat attributes are what torch.compile takes apart
        return handle

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StaticHandle({self._role}, shape={list(self.shape)})"

    def _names(self) -> list[str]:
        held, calibration = self._sizes
        return [*(f"held_{i}" for i in range(held)), *(f"calibration_{i}" for i in range(calibration)), "total"]

    @property
    def parts(self) -> StaticParts:
        inner = [getattr(self, name) for name in self._names()]
        return StaticParts(self._spec, inner[: self._sizes[0]], inner[self._sizes[0] : -1], inner[-1])

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return self._names(), (self._spec, self._role, self._sizes)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> "StaticHandle":
        spec, role, (held, _) = context
        tensors = list(inner.values())
        return StaticHandle(StaticParts(spec, tensors[:held], tensors[held:-1], tensors[-1]), role)

    def dequantize(self) -> torch.Tensor:
        """The tensor that this handle stands for; zeros behind the last token."""
        parts = self.parts
        return torch.ops.tq_cache.materialize(parts.held, parts.calibration, parts.total, self._role, self._spec)


# torch.compile takes the next two as they are: it could not follow the making of handles, nor what they hold.


@torch._dynamo.allow_in_graph
def static_pair(
    held: list[torch.Tensor], calibration: list[torch.Tensor], total: torch.Tensor, spec: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The handles of keys and values of a preallocated layer."""
    parts = StaticParts(spec, held, calibration, total)
    return StaticHandle(parts, "key"), StaticHandle(parts, "value")


@torch._dynamo.allow_in_graph
def attend_static(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention [B, H_q, 1, D_v] of one query per sequence over what the handle of keys belongs to."""
    assert isinstance(key, StaticHandle)
    held, calibration, total, spec = key.parts.held, key.parts.calibration, key.total, key._spec
    return torch.ops.tq_cache.attend(query, held, calibration, total, mask, sinks, scaling, softcap, spec)


def plain(x: Any) -> Any:
    """`x`, dequantised if it is a handle."""
    return x.dequantize() if isinstance(x, _Handle) else x


def materialize(view: KVView, role: Role) -> torch.Tensor:
    """All keys, or values, of a view in the model's dtype: [B, H_kv, view.length, D]."""
    exact, sinks, packed = (
        (view.keys, view.sink_keys, view.key) if role == "key" else (view.values, view.sink_values, view.value)
    )
    if view.is_exact:
        return exact
    parts = [] if sinks is None else [sinks]
    if packed is not None:
        run = backends.implementation(view.backend, view.keys, view.values)
        parts.append(run.dequantize(packed, view.packed_length, exact.dtype))
    return torch.cat([*parts, exact], dim=2)


def paired_view(key: torch.Tensor, value: torch.Tensor) -> KVView | None:
    """The view behind an untouched pair of handles; None if these are anything else."""
    if (
        isinstance(key, KVHandle)
        and isinstance(value, KVHandle)
        and key.view_of_cache is value.view_of_cache
        and (key.role, value.role) == ("key", "value")
    ):
        return key.view_of_cache
    return None
