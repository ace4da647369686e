"""A model's attention: "turboquant" while the model is enabled, and what it was before."""

import gc
import warnings
import weakref
from collections import deque
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..compat import decoder_config, layer_kinds
from ..planning.layers import BLOCK_SPARSE
from .caller import ATTENTION_NAME


class AttentionBefore:
    """The attention of every config of a model and its parts, to put back later.

    Models may share a config: the one that was enabled first and the one that is disabled last need not be the same.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.configs = _attention_of(model)
        self.number: int = 1 + max((other.number for other in _KEPT), default=0)
        _KEPT.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy of the model, which has configs of its own
        self.__dict__.update(state)
        _KEPT.add(self)

    def restore(self) -> None:
        """Put it back, but for configs that others have set since: the first of those puts it back in our place."""
        _KEPT.discard(self)
        restored = []
        for config, attention in self.configs:
            if self._heirs(config):
                gc.collect()  # a model that nobody has any more is in cycles with its hooks
            if heirs := self._heirs(config):
                heir = min(heirs, key=lambda other: other.number)
                heir.configs = [(held, attention if held is config else own) for held, own in heir.configs]
                attention = config._attn_implementation
            restored.append((config, attention))
        for config, attention in restored:  # setting that of a config sets those below it, which come later
            config._attn_implementation = attention

    def _heirs(self, config: PreTrainedConfig) -> list["AttentionBefore"]:
        later = [other for other in _KEPT if other.number > self.number]
        return [other for other in later if any(held is config for held, _ in other.configs)]


_KEPT: "weakref.WeakSet[AttentionBefore]" = weakref.WeakSet()  # of all models that are enabled


def _attention_of(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, Any]]:
    """Every config of the model and its parts with its attention, those above others first."""
    found: dict[int, PreTrainedConfig] = {}
    left = deque([model.config, *[x.config for x in model.modules() if isinstance(x, PreTrainedModel)]])
    while left:
        config = left.popleft()
        if id(config) not in found:
            found[id(config)] = config
            left.extend(part for name in config.sub_configs if (part := getattr(config, name, None)) is not None)
    return [(config, config._attn_implementation) for config in found.values()]


def set_attention(model: PreTrainedModel) -> bool:
    """`attn_implementation="turboquant"`, or one warning that says why not.  Returns whether it could be set."""
    settable = any(x._can_set_attn_implementation() for x in model.modules() if isinstance(x, PreTrainedModel))
    if settable and not set(layer_kinds(decoder_config(model.config))) & set(BLOCK_SPARSE):
        model.set_attn_implementation(ATTENTION_NAME)
        for part in model.modules():  # 5.17 leaves out a part whose config is another one of the model's own class (T5)
            if isinstance(part, PreTrainedModel) and part._can_set_attn_implementation():
                part.set_attn_implementation(ATTENTION_NAME)
    is_set = decoder_config(model.config)._attn_implementation == ATTENTION_NAME
    if not is_set:
        warnings.warn(
            f"{type(model).__name__} has an attention of its own, which cannot read packed bits: each layer gets all "
            "its keys and values dequantised at every step.  Memory is saved between layers and steps, but a step is "
            "slower than with a 16-bit cache, the more so the longer the text",
            stacklevel=4,
        )
    return is_set


def still_reads_packed(model: PreTrainedModel) -> bool:
    """Whether the attention is that of `set_attention`; a warning if it is not."""
    attention = decoder_config(model.config)._attn_implementation
    if attention == ATTENTION_NAME:
        return True
    warnings.warn(
        f"expected the attention that enable set, {ATTENTION_NAME!r}, got {attention!r}, which cannot read packed "
        "bits: each layer gets all its keys and values dequantised at every step. Call model.set_attn_implementation("
        f"{ATTENTION_NAME!r}), or tq_cache.disable(model) for a 16-bit cache",
        stacklevel=5,
    )
    return False
