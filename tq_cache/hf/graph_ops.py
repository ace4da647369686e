"""A preallocated layer inside torch.compile and CUDA graphs: its states as flat lists, operations on them, a handle.

Custom operations take tensors, lists of tensors and strings, and no classes: here, and only here, is a layer flat.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch

from ..backends import choose_backend, reference
from ..formats.presets import Format, Role, get_format
from ..formats.states import Calibration, KVView, PackedStates, PreallocatedStates
from ..storage.checks import check_states
from .handles import LazyHandle
from .handles import materialize as materialize_view

CALIBRATION = ("center", "smooth", "scale")
REFERENCE = "reference"
Function = Callable[..., Any]
OUTSIDE = (torch.Tag.cudagraph_unsafe,)  # of CUDA graphs, which are of what is before and behind


class Flat(NamedTuple):
    """`PreallocatedStates` as operations take them.

    buffers:     ring of keys, ring of values; sinks of keys and of values; packed codes, scales, zeros of keys, then of
                 values; those there are
    calibration: `CALIBRATION` of keys, then of values, those there are
    num_tokens:  int64 []
    spec:        formats, which calibration there is, lengths and who computes: see `_Spec`
    """

    buffers: list[torch.Tensor]
    calibration: list[torch.Tensor]
    num_tokens: torch.Tensor
    spec: str


class _Spec(NamedTuple):
    """What does not change over the life of a layer.  Per role the format and which of `CALIBRATION` there are."""

    roles: tuple[Role, Role]
    formats: tuple[Format, Format]
    calibration: tuple[tuple[str, ...], tuple[str, ...]]
    residual_length: int
    sink_tokens: int
    max_length: int
    backend: str  # the one that "auto" chose


def flatten(states: PreallocatedStates) -> Flat:
    """The same tensors, flat.  Raises as `choose_backend`."""
    sides = (states.key, states.value)
    there = [states.ring_keys, states.ring_values, states.sink_keys, states.sink_values]
    for side in sides:
        there += [side.packed, side.scale, side.zero]
    buffers = [tensor for tensor in there if tensor is not None]
    measured = [[(name, getattr(side.calibration, name)) for name in CALIBRATION] for side in sides]
    present = [[name for name, tensor in side if tensor is not None] for side in measured]
    calibration = [tensor for side in measured for _, tensor in side if tensor is not None]
    formats = [f"{side.role}:{side.format.name}:{'+'.join(names)}" for side, names in zip(sides, present, strict=True)]
    lengths = map(str, (states.residual_length, states.sink_tokens, states.max_length))
    computes = choose_backend(states.backend, states.ring_keys, states.ring_values)
    spec = " ".join([*formats, *lengths, REFERENCE if computes is reference else "triton"])
    return Flat(buffers, calibration, states.num_tokens, spec)


def unflatten(flat: Flat) -> PreallocatedStates:
    """The inverse of `flatten`."""
    spec = _parse(flat.spec)
    buffers, calibration = iter(flat.buffers), iter(flat.calibration)
    rings = next(buffers), next(buffers)
    sinks = (next(buffers), next(buffers)) if spec.sink_tokens else (None, None)
    key, value = (
        PackedStates(
            role,
            fmt,
            ring.shape[3],
            next(buffers),
            None if fmt.scale in ("per_head", "exact") else next(buffers),
            next(buffers) if fmt.has_zero else None,
            Calibration(**{name: next(calibration) for name in names}),
        )
        for role, fmt, names, ring in zip(spec.roles, spec.formats, spec.calibration, rings, strict=True)
    )
    return PreallocatedStates(
        key, value, *rings, flat.num_tokens, spec.residual_length, spec.max_length, spec.backend, *sinks
    )


@lru_cache(maxsize=256)
def _parse(spec: str) -> _Spec:
    key, value, residual_length, sink_tokens, max_length, backend = spec.split()
    (first, key, key_names), (second, value, value_names) = (side.split(":") for side in (key, value))
    roles = cast(tuple[Role, Role], (first, second))
    return _Spec(
        roles,
        (get_format(roles[0], key), get_format(roles[1], value)),
        (tuple(filter(None, key_names.split("+"))), tuple(filter(None, value_names.split("+")))),
        int(residual_length),
        int(sink_tokens),
        int(max_length),
        backend,
    )


# ------------------------------------------------------------------------------------------------------- operations


def operation(name: str, spec: str) -> Any:
    """`torch.ops.tq_cache.NAME` for a layer of this `spec`."""
    return getattr(torch.ops.tq_cache, f"{name}_outside" if spec.endswith(REFERENCE) else name)


def _register(fake: Function, mutates: Iterable[str] = ()) -> Callable[[Function], Function]:
    """Register an operation, and as NAME_outside one that CUDA graphs leave out: the reference waits for the device.

    fake: what torch.compile takes for its result, of the same arguments
    """

    def register(function: Function) -> Function:
        for name, tags in ((function.__name__, ()), (f"{function.__name__}_outside", OUTSIDE)):
            made = torch.library.custom_op(f"tq_cache::{name}", function, mutates_args=mutates, tags=tags)
            made.register_fake(fake)
        return function

    return register


@_register(lambda *_: None, mutates=("buffers", "num_tokens"))
def update(
    keys: torch.Tensor,
    values: torch.Tensor,
    buffers: list[torch.Tensor],
    calibration: list[torch.Tensor],
    num_tokens: torch.Tensor,
    spec: str,
) -> None:
    """Write one token, [B, H_kv, 1, D] each, behind those held, and count it; packs a block if the ring is full.

    Writes nothing, and counts nothing, where there is no room: a step of a captured graph cannot raise.  Raises
    ValueError, before anything changes, unless shapes and dtypes are those held.
    """
    states = unflatten(Flat(buffers, calibration, num_tokens, spec))
    check_states(keys, values, (states.ring_keys, states.ring_values))
    choose_backend(states.backend, keys, values).update_preallocated(states, keys, values)


@_register(lambda query, buffers, *_: query.new_empty(*query.shape[:3], buffers[1].shape[3]))
def attend(
    query: torch.Tensor,
    buffers: list[torch.Tensor],
    calibration: list[torch.Tensor],
    num_tokens: torch.Tensor,
    mask: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    spec: str,
) -> torch.Tensor:
    """`Backend.attend_preallocated`: attention of queries [B, H_q, 1, D] over all tokens held, [B, H_q, 1, D_v].

    mask: [B, 1 or H_q, 1, max_length or more], or None
    """
    states = unflatten(Flat(buffers, calibration, num_tokens, spec))
    backend = choose_backend(states.backend, states.ring_keys, states.ring_values)
    return backend.attend_preallocated(query, states, mask, scaling, softcap=softcap, sink_logits=sink_logits)


@_register(lambda content, *_: content.new_empty(content.shape))
def attend_latents(
    content: torch.Tensor,
    rotary: torch.Tensor,
    buffers: list[torch.Tensor],
    calibration: list[torch.Tensor],
    num_tokens: torch.Tensor,
    mask: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    spec: str,
) -> torch.Tensor:
    """`Backend.attend_latents_preallocated`: of queries [B, H_q, 1, rank] and [B, H_q, 1, d], [B, H_q, 1, rank].

    mask: as that of `attend`
    """
    states = unflatten(Flat(buffers, calibration, num_tokens, spec))
    backend = choose_backend(states.backend, states.ring_keys, states.ring_values)
    return backend.attend_latents_preallocated(
        content, rotary, states, mask, scaling, softcap=softcap, sink_logits=sink_logits
    )


@torch.library.custom_op("tq_cache::materialize", mutates_args=(), tags=OUTSIDE)
def materialize(
    buffers: list[torch.Tensor], calibration: list[torch.Tensor], num_tokens: torch.Tensor, role: str, spec: str
) -> torch.Tensor:
    """All keys, or values, dequantised in the model's dtype, [B, H_kv, max_length, D], zeros behind the last.

    Waits for the device.
    """
    states = unflatten(Flat(buffers, calibration, num_tokens, spec))
    x = materialize_view(states.view(), "key" if role == "key" else "value")
    return torch.nn.functional.pad(x, (0, 0, 0, states.max_length - x.shape[2]))


@materialize.register_fake
def _(buffers, calibration, num_tokens, role, spec) -> torch.Tensor:  # type: ignore[no-untyped-def]
    ring = buffers[0] if role == "key" else buffers[1]
    return ring.new_empty(*ring.shape[:2], _parse(spec).max_length, ring.shape[3])


# ----------------------------------------------------------------------------------------------------------- handle


class PreallocatedHandle(LazyHandle):
    """Stands for the keys or the values of a preallocated layer, [B, H_kv, max_length, D]; torch.compile traces it."""

    _spec: str
    _role: Role
    _counts: tuple[int, int]
    num_tokens: torch.Tensor

    @staticmethod
    def __new__(cls, flat: Flat, role: Role) -> "PreallocatedHandle":
        ring = flat.buffers[0 if role == "key" else 1]
        shape = (*ring.shape[:2], _parse(flat.spec).max_length, ring.shape[3])
        handle = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=ring.dtype, device=ring.device)
        handle._spec, handle._role = flat.spec, role
        handle._counts = len(flat.buffers), len(flat.calibration)
        for name, tensor in zip(handle._names(), (*flat.buffers, *flat.calibration, flat.num_tokens), strict=True):
            setattr(handle, name, tensor)  # flat attributes are what torch.compile takes apart
        return handle

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PreallocatedHandle({self._role}, shape={list(self.shape)})"

    def _names(self) -> list[str]:
        names = [
            f"{name}_{i}"
            for name, count in zip(("buffer", "calibration"), self._counts, strict=True)
            for i in range(count)
        ]
        return [*names, "num_tokens"]

    @property
    def flat(self) -> Flat:
        inner = [getattr(self, name) for name in self._names()]
        return Flat(inner[: self._counts[0]], inner[self._counts[0] : -1], inner[-1], self._spec)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return self._names(), (self._spec, self._role, self._counts)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any
    ) -> "PreallocatedHandle":
        spec, role, (count, _) = context
        tensors = list(inner.values())
        return PreallocatedHandle(Flat(tensors[:count], tensors[count:-1], tensors[-1], spec), role)

    def make(self) -> torch.Tensor:
        """With zeros behind the last token."""
        flat = self.flat
        return torch.ops.tq_cache.materialize(flat.buffers, flat.calibration, flat.num_tokens, self._role, flat.spec)


def up_to(num_tokens: torch.Tensor, length: int, mask: torch.Tensor | None) -> torch.Tensor:
    """A mask, [B, H, S, length or more] or None, that shows no more than the first `num_tokens` (int64 []) tokens."""
    held = (torch.arange(length, device=num_tokens.device) < num_tokens)[None, None, None]
    if mask is None:
        return held
    mask = mask[..., :length]
    return mask & held if mask.dtype == torch.bool else mask.masked_fill(~held, -torch.inf)


# torch.compile takes the next four as they are: it could not follow the making of handles, nor what they hold.


@torch._dynamo.allow_in_graph
def handle_pair(
    buffers: list[torch.Tensor], calibration: list[torch.Tensor], num_tokens: torch.Tensor, spec: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The handles of keys and values of a preallocated layer."""
    flat = Flat(buffers, calibration, num_tokens, spec)
    return PreallocatedHandle(flat, "key"), PreallocatedHandle(flat, "value")


@torch._dynamo.allow_in_graph
def shown(handle: torch.Tensor) -> torch.Tensor:
    """The tensor that a handle stands for."""
    assert isinstance(handle, PreallocatedHandle)
    return handle.dequantize()


@torch._dynamo.allow_in_graph
def mask_of(handle: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The mask of what a handle stands for, which also hides the zeros behind the last token; see `up_to`."""
    assert isinstance(handle, PreallocatedHandle)
    return up_to(handle.num_tokens, handle.shape[2], mask)


@torch._dynamo.allow_in_graph
def attend_handles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attention [B, H_q, 1, D_v] of one query per sequence over two handles.

    From the bits, if they are the pair of one layer and untouched, else over what they show.
    """
    assert isinstance(key, PreallocatedHandle) and isinstance(value, PreallocatedHandle)
    flat = key.flat
    if not _are_untouched_pair(key, value):
        view = KVView(key.dequantize(), value.dequantize(), backend=_parse(flat.spec).backend)
        mask = up_to(flat.num_tokens, key.shape[2], mask)
        backend = choose_backend(view.backend, view.tail_keys, view.tail_values)
        return backend.attend(query, view, mask, scaling, softcap=softcap, sink_logits=sink_logits)[0]
    return operation("attend", flat.spec)(
        query, flat.buffers, flat.calibration, flat.num_tokens, mask, sink_logits, scaling, softcap, flat.spec
    )


def _are_untouched_pair(key: PreallocatedHandle, value: PreallocatedHandle) -> bool:
    """Whether these are keys and values of one layer, as it holds them."""
    return (
        (key._role, value._role) == ("key", "value")
        and key.num_tokens is value.num_tokens
        and key.is_untouched
        and value.is_untouched
    )
