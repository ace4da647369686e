"""The attention function behind `attn_implementation="turboquant"`.  No maths here.

Four ways, side by side in `turboquant_attention`: layers that are not packed, the first prefill (all tokens are still
exact), attention over packed tokens (decode, or a chunk over a packed past), and over latents (`absorbed`).
"""

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils import logging

from ..backends import choose_backend
from ..backends.masks import causal, with_indices
from ..compat import outside_graph
from ..formats.states import KVView
from .absorbed import absorption, attend_absorbed, expand, mask_of_records
from .caller import borrowed, is_lent
from .graph_ops import PreallocatedHandle, attend_handles, mask_of, shown
from .handles import paired_view, plain
from .latent import Record, plain_record
from .masks import with_bias

logger = logging.get_logger(__name__)


def turboquant_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` [B, H_q, S, D] over keys and values [B, H_kv, T, D], as tensors or as a cache's handles.

    Packed bits are read if key and value are what one update gave, and nothing was done with either; else attention is
    over what they show.  Tensors that were made of both have zeros behind the last token of a preallocated layer, which
    a mask must hide, as with transformers' StaticCache.  Positional arguments come in the order of transformers' sdpa.

    attention_mask: [B, H, S, T], bool (True takes part) or float (added), or None (causal, if the module is)
    scaling:        factor of the scores, D ** -0.5 by default; softcap: see `Backend.attend`
    s_aux:          [H_q], a logit per head that takes weight and gives nothing; `sinks` [B, H_q, S, 1] likewise
    position_bias:  added to the scores, [1 or B, H_q, S, T]
    indices:        int [B, S, top_k], the tokens that sparse attention chose (DSA)

    Returns the output [B, S, H_q, D_v], contiguous, and None for the weights.  Raises ValueError or
    NotImplementedError on what it cannot do rather than leave it out.
    """
    _refuse(kwargs, dropout, module)
    indices, bias = kwargs.get("indices"), kwargs.get("position_bias")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    sink_logits = _sink_logits(kwargs.get("sinks"), s_aux)
    options = dict(scaling=scaling, softcap=softcap, sink_logits=sink_logits, is_causal=is_causal)
    found = absorption(query, key, value)
    if found is not None and bias is None:
        out = attend_absorbed(module, query, found, attention_mask, indices, options)
        if out is not None:
            return _output(out)
        attention_mask, (key, value) = mask_of_records(found.update, attention_mask), expand(found)
    preallocated, mask, key, value = _behind(query, key, value, attention_mask)
    mask = mask if indices is None else with_indices(mask, indices, key.shape[2])
    if bias is not None:
        mask = with_bias(mask, bias, query.shape[2], key.shape[2], is_causal)
    if preallocated:
        return _output(attend_handles(query, key, value, mask, sink_logits, scaling, softcap))
    view, options = paired_view(key, value), options | {"mask": mask}
    out = None if view is None else _attend_view(query, view, options, attention_mask)
    if out is not None:
        return _output(out)
    key, value = (plain(key), plain(value)) if view is None else (view.tail_keys, view.tail_values)
    if softcap is None and bias is None and sink_logits is None:
        if mask is None and is_causal and 1 < query.shape[2] < key.shape[2]:
            mask = causal(query.shape[2], key.shape[2], query.device)  # sdpa's own would align the first query
        return sdpa_attention_forward(
            *(module, query, key, value, mask), dropout=dropout, scaling=scaling, is_causal=is_causal
        )
    backend = "auto" if view is None else view.backend  # sdpa knows none of these
    return _output(_attend(query, KVView(key, value, backend=backend), options))


def _behind(
    query: torch.Tensor, key: Any, value: Any, mask: torch.Tensor | None
) -> tuple[bool, torch.Tensor | None, Any, Any]:
    """Whether both are handles of preallocated layers, which `attend_handles` takes; the mask; keys and values.

    Tensors stand in place of records, and handles in place of lent tensors.  A single handle of a preallocated layer
    gives its tensor, and the mask then hides what is behind the last token.  So do two where gradients are asked for:
    the operations on packed bits have no backward pass.
    """
    for record in (key, value):
        if isinstance(record, Record):
            mask = mask_of_records(record.update, mask)
    key, value = plain_record(key), plain_record(value)
    if is_lent(key) or is_lent(value):
        key, value = outside_graph(borrowed, key, value)
    handles = [x for x in (key, value) if isinstance(x, PreallocatedHandle)]
    if not handles:
        return False, mask, key, value
    if len(handles) == 2 and not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))):
        return True, mask, key, value
    key, value = (shown(x) if isinstance(x, PreallocatedHandle) else x for x in (key, value))
    return False, mask_of(handles[0], mask), key, value


def _attend_view(
    query: torch.Tensor, view: KVView, options: dict[str, Any], padding: torch.Tensor | None
) -> torch.Tensor | None:
    """As `_attend`, over what a cache holds; None where all of it is exact and sdpa is to be taken.

    padding: the model's own mask, which tells what of the cache is padding
    """
    if torch.compiler.is_compiling():
        return outside_graph(_attend_view, query, view, options, padding)
    if view.observe is not None:
        view.observe(query, padding)
    if view.is_exact:
        of = query, view.tail_keys, view.tail_values
        needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in of)  # the operations have none
        backend = choose_backend(view.backend, view.tail_keys, view.tail_values)
        if needs_gradient or not backend.takes_exact(query, view):
            return None
    return _attend(query, view.on_device(), options)


def _attend(query: torch.Tensor, view: KVView, options: dict[str, Any]) -> torch.Tensor:
    """Attention [B, H_q, S, D_v]; `options` are those of `Backend.attend`."""
    return choose_backend(view.backend, view.tail_keys, view.tail_values).attend(query, view, **options)[0]


def _output(out: torch.Tensor) -> tuple[torch.Tensor, None]:
    """[B, H_q, S, D_v] as models want it, and no weights."""
    return out.transpose(1, 2).contiguous(), None


def _sink_logits(sinks: torch.Tensor | None, s_aux: torch.Tensor | None) -> torch.Tensor | None:
    """Extra logits as [1 or B, H_q, 1 or S].  Raises ValueError on both."""
    if sinks is not None and s_aux is not None:
        raise ValueError("expected sinks or s_aux, got both: they mean the same")
    if sinks is not None:
        return sinks[..., 0]
    return None if s_aux is None else s_aux[None, :, None]


def _refuse(kwargs: dict[str, Any], dropout: float, module: torch.nn.Module) -> None:
    """Raise on arguments that change the result and are not supported here; say, once, that there are no weights."""
    # As transformers' sdpa, which has no weights to return either; a prefill is not compiled, and says it.
    if kwargs.get("output_attentions") and not torch.compiler.is_compiling():
        logger.warning_once(
            "expected output_attentions=False, got True: attention over packed bits forms no weights, so none are "
            'returned; for weights call tq_cache.disable(model) and model.set_attn_implementation("eager")'
        )
    if dropout and module.training:
        raise NotImplementedError("attention dropout is not supported by 'turboquant'; call model.eval() or use sdpa")
    for name in ("block_indices", "head_mask", "cache"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"the attention argument {name} of {type(module).__name__} is not supported by 'turboquant'; "
                "load the model with attn_implementation='sdpa' (the cache then gives it dequantised tensors)"
            )
