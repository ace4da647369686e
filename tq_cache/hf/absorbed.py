"""Attention over latents (MLA): what the records of keys and values come down to, and which way is taken.  No maths."""

from typing import Any, NamedTuple

import torch

from ..backends import choose_backend
from ..backends.latents import KVProjection, attend_expanded
from ..backends.masks import with_indices
from ..parallel import group_of_rows
from .graph_ops import operation, up_to
from .latent import Joined, Part, Shared, Update


class Absorption(NamedTuple):
    """What records of keys and values come down to."""

    update: Update
    projection: KVProjection


def absorption(query: torch.Tensor, key: Any, value: Any) -> Absorption | None:
    """What is behind records of keys and values, if they are those of `expand_kv`, untouched; else None.

    Attention asks, so the layer's caller is "turboquant".  A record whose tensor was made may have been written to.
    """
    if not (isinstance(key, Joined) and isinstance(value, Part)) or key._made is not None or len(key.slots) != 2:
        return None
    (first, middle, nope), (second, last, shared) = key.slots
    if not (isinstance(nope, Part) and isinstance(shared, Shared)) or nope.whole is not value.whole:
        return None
    joined = (first, middle, last) == (0, second, key.shape[3]) and last == query.shape[3]
    halves = (nope.start, nope.end, value.start, value.end) == (0, middle, middle, value.whole.shape[3])
    if not joined or not halves or shared.update is not key.update or query.shape[1] != key.shape[1]:
        return None
    rows = value.whole.rows
    steps = (value, nope, shared, shared.rotary, value.whole, rows, rows.projected, rows.projected.latents)
    if any(step._made is not None for step in steps):
        return None
    if not torch.compiler.is_compiling():
        key.update.layer.caller.seen = True
    weight = rows.projected.weight
    return Absorption(key.update, KVProjection(weight.view(key.shape[1], -1, weight.shape[1]), middle))


def attend_absorbed(
    module: torch.nn.Module,
    query: torch.Tensor,
    found: Absorption,
    mask: torch.Tensor | None,
    indices: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor | None:
    """Attention [B, H, S, v] of `query` [B, H, S, n + d]; None where all is exact and expanding it costs less.

    mask:    as that of `Backend.attend`, the model's own, which tells what of the cache is padding
    indices: of sparse attention, see `Backend.attend_latents`; options are those of `Backend.attend`
    """
    update, projection = found
    with_gradients = torch.is_grad_enabled() and any(
        x.requires_grad for x in (query, projection.weight)
    )  # of which the operations have none
    if update.flat is not None:
        if with_gradients:  # here, too
            update.layer.path = "expanded: gradients"
            return None
        return _attend_preallocated(query, found, mask, indices, options)
    view = update.view
    assert view is not None
    if view.observe is not None:  # latents are whole on every process, so they are packed by the queries of all heads
        group = group_of_rows(
            getattr(getattr(module, "kv_b_proj", None), "weight", None), projection.weight.shape[:2].numel()
        )
        view.observe(query, mask, projection.content, group)
    few = projection.absorbs(query.shape[2], query.shape[3] - projection.nope)
    if view.is_exact and (with_gradients or view.tail_keys.requires_grad or view.tail_values.requires_grad):
        update.layer.path = "expanded: gradients"
        return None
    if few:
        update.layer.path = "absorbed"
        content, rotary = projection.absorb(query)
        view = view.on_device()
        backend = choose_backend(view.backend, view.tail_keys, view.tail_values)
        return projection.values_of(backend.attend_latents(content, rotary, view, mask, indices=indices, **options)[0])
    update.layer.path = "expanded: many queries"
    if view.is_exact:
        return None
    if indices is not None:
        mask = with_indices(mask, indices, view.length)
    return attend_expanded(query, view.on_device(), projection, mask, **options)[0]


def _attend_preallocated(
    query: torch.Tensor,
    found: Absorption,
    mask: torch.Tensor | None,
    indices: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """One query per sequence over a preallocated layer, maybe in a graph: it sees what the mask says, or everything."""
    update, projection = found
    assert update.flat is not None
    if indices is not None:
        mask = with_indices(mask, indices, update.length)
    content, rotary = projection.absorb(query)
    means = operation("attend_latents", update.flat.spec)(
        *(content, rotary, update.flat.buffers, update.flat.calibration, update.flat.num_tokens, mask),
        *(options["sink_logits"], options["scaling"], options["softcap"], update.flat.spec),
    )
    update.layer.path = "absorbed"
    return projection.values_of(means)


def expand(found: Absorption) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [B, H, T, n + d] and values [B, H, T, v], as the model would have expanded them."""
    return found.projection.expand(found.update.dequantize("key"), found.update.dequantize("rotary"))


def mask_of_records(update: Update, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask of what an update's records stand for; behind the last token of a preallocated layer there are zeros."""
    return mask if update.flat is None else up_to(update.flat.num_tokens, update.length, mask)
