"""The operations on a preallocated layer that torch.compile takes as they are: custom operations on flat tensors.

What a layer's tensors are is drawn in `static_parts`.
"""

import torch

from .. import backends
from ..formats.static_parts import StaticParts, StaticSpec
from ..storage.growing import check_states
from .handles import materialize as dequantized


@torch.library.custom_op("tq_cache::update", mutates_args=("held", "total"))
def update(
    keys: torch.Tensor,
    values: torch.Tensor,
    held: list[torch.Tensor],
    calibration: list[torch.Tensor],
    total: torch.Tensor,
    spec: str,
) -> None:
    """Write one token, [B, H_kv, 1, D] each, as token `total`, and count it; packs a block first if the ring is full.

    Writes nothing, and counts nothing, when `total` is the most there is room for: a step of a captured graph cannot
    raise.  Raises ValueError, before anything changes, unless shapes and dtypes are those held.
    """
    parts = StaticParts(spec, held, calibration, total)
    check_states(keys, values, parts.ring)
    backends.implementation(StaticSpec.parse(spec).backend, *parts.ring).update_static(parts, keys, values)


@update.register_fake
def _(keys, values, held, calibration, total, spec) -> None:  # type: ignore[no-untyped-def]
    return None


@torch.library.custom_op("tq_cache::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    held: list[torch.Tensor],
    calibration: list[torch.Tensor],
    total: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    spec: str,
) -> torch.Tensor:
    """Attention of queries [B, H_q, 1, D] over all tokens held, [B, H_q, 1, D_v]; see `reference.attend`.

    mask: [B, 1 or H_q, 1, max_length or more], or None
    """
    parts = StaticParts(spec, held, calibration, total)
    run = backends.implementation(StaticSpec.parse(spec).backend, *parts.ring)
    return run.attend_static(query, parts, mask, scaling, softcap, sinks)


@attend.register_fake
def _(query, held, calibration, total, mask, sinks, scaling, softcap, spec) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return query.new_empty(*query.shape[:3], held[1].shape[3])


@torch.library.custom_op("tq_cache::materialize", mutates_args=())
def materialize(
    held: list[torch.Tensor], calibration: list[torch.Tensor], total: torch.Tensor, role: str, spec: str
) -> torch.Tensor:
    """All keys, or values, dequantised in the model's dtype, [B, H_kv, max_length, D], zeros behind the last."""
    view = StaticParts(spec, held, calibration, total).view()
    x = dequantized(view, "key" if role == "key" else "value")
    return torch.nn.functional.pad(x, (0, 0, 0, StaticSpec.parse(spec).max_length - x.shape[2]))


@materialize.register_fake
def _(held, calibration, total, role, spec) -> torch.Tensor:  # type: ignore[no-untyped-def]
    ring = held[0] if role == "key" else held[1]
    return ring.new_empty(*ring.shape[:2], StaticSpec.parse(spec).max_length, ring.shape[3])
