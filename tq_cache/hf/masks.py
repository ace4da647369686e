"""Masks: the one that goes with `attn_implementation="turboquant"`, and what models hand over beside a mask."""

from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.masking_utils import eager_mask, sdpa_mask

from ..backends.masks import causal


def turboquant_mask(*args: Any, config: Any = None, **kwargs: Any) -> torch.Tensor | None:
    """The mask function registered beside the attention function.

    As for sdpa: bool [B, 1, S, T], True takes part, None where plain causal attention is meant.  Unlike sdpa, also
    for a chunk over a past, the last query seeing every token, so that no mask of S x T is ever made for it.  Models
    that know only their own eager attention, whatever is asked for (Bloom, CodeGen, ...), get the float mask that
    they add.
    """
    if not _takes_bool_masks(type(config)):
        return eager_mask(*args, config=config, **kwargs)
    if 1 < kwargs["q_length"] < kwargs["kv_length"]:
        if _is_plain_causal(**kwargs):
            return None
        kwargs["allow_is_causal_skip"] = False  # sdpa's None would mean that the first query sees one token
    return sdpa_mask(*args, config=config, **kwargs)


def _is_plain_causal(
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> bool:
    """Whether each query sees every token up to its own, and the last query is the last token."""
    if not allow_is_causal_skip or (local_size is not None and kv_length >= local_size):
        return False
    if not isinstance(q_offset, int) or q_offset + q_length != kv_offset + kv_length:
        return False
    if attention_mask is None or torch.compiler.is_compiling():
        return attention_mask is None
    return attention_mask.shape[-1] >= kv_length and bool(attention_mask.all())


@torch.compiler.assume_constant_result  # imports the models of the config, which Dynamo could not follow
def _takes_bool_masks(config: type) -> bool:
    """Whether the model of configs of this class runs more than its own eager attention; true where not known."""
    for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if config in mapping:
            found = mapping[config]
            models = found if isinstance(found, (tuple, list)) else (found,)
            return any(_runs_other_attention(model) for model in models)
    return True


def _runs_other_attention(model: Any) -> bool:
    compiled = model._supports_flash_attn or model._supports_flex_attn
    return model._supports_sdpa or (model._supports_attention_backend and compiled)


def with_bias(
    mask: torch.Tensor | None, bias: torch.Tensor, num_queries: int, length: int, is_causal: bool
) -> torch.Tensor:
    """Mask and position bias [1 or B, H_q, S, T] as one mask; no mask means causal attention if `is_causal`."""
    if mask is None and is_causal and num_queries > 1:
        mask = causal(num_queries, length, bias.device)
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask
