"""What `generate()` did with the cache of its last call, and why it does not compile its steps."""

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from ..formats.packing import BLOCK_TOKENS
from ..planning.layers import LayerPlan
from ..planning.preallocation import why_not_preallocated

COMPILED = "compiled"
COMPILED_MODES = ("greedy_search", "sample")  # transformers' GenerationMode; others reorder or crop
COMPILED_KINDS = ("full_attention", "sliding_attention", "chunked_attention")


class LastCall:
    """The last call's cache, referred to weakly, and what became of it: "compiled", "growing: beam search".

    When a growing cache goes, its report is made and kept, and its memory is free.  A preallocated one stays with its
    maker, who lends twins of it.
    """

    def __init__(self, kind: str = "none yet", cache: Any = None) -> None:
        self.kind = kind
        self.plans: list[LayerPlan] = [] if cache is None else cache.plans
        self.cache: Callable[[], Any] = (lambda: None) if cache is None else weakref.ref(cache)
        self._kept: Any = None
        if cache is not None and kind != COMPILED:
            parts = copy.copy(cache)  # with the same layers
            weakref.finalize(cache, self.keep, parts).atexit = False

    def keep(self, cache: Any) -> None:
        self._kept = cache.report()

    def report(self) -> Any:
        """The `CacheReport` of the cache as it is, or was when it went; None where there was none."""
        cache = self.cache()
        return self._kept if cache is None else cache.report()


def why_growing(
    module: PreTrainedModel,
    plans: Sequence[LayerPlan],
    options: Mapping[str, Any],
    bounded: bool,
    generation_config: Any,
    generation_mode: str | None,
) -> str:
    """What of the call or the model stands against compiled steps, in words; "" where it is left to transformers.

    options: the cache's; bounded: its user said how long it may get
    """
    devices = set((getattr(module, "hf_device_map", None) or {}).values())
    kinds = sorted({plan.kind for plan in plans if plan.kind not in COMPILED_KINDS})
    # What is returned may be continued, as far as nobody said how far.
    returned = generation_config.return_dict_in_generate and not bounded
    reasons: list[tuple[Any, str]] = [
        (generation_mode not in COMPILED_MODES, (generation_mode or "a loop of its own").replace("_", " ")),
        (not module._can_compile_fullgraph, f"transformers does not compile {type(module).__name__} in one graph"),
        (module.config.is_encoder_decoder, "encoder-decoder"),
        (reason := why_not_preallocated(module.config), reason),
        (returned, "return_dict_in_generate without max_cache_len"),
        (generation_config.is_assistant, "the assistant of assisted decoding"),
        (generation_config.prefill_chunk_size, "prefill_chunk_size"),  # whose chunks would be compiled
        (kinds, f"layers of kind {', '.join(kinds)}"),
        (not all(plan.packable for plan in plans), "layers of a width that no format takes"),
        (options.get("offloading"), "offloading"),
        (options.get("residual_length", 0) % BLOCK_TOKENS, f"residual_length is no multiple of {BLOCK_TOKENS}"),
        (len(devices) > 1, "several devices"),
        (hasattr(module, "_hf_hook"), "hooks of accelerate"),
        (getattr(module, "_device_mesh", None) is not None, "tensor parallel"),
    ]
    return next((reason for met, reason in reasons if met), "")


def why_eager(module: PreTrainedModel, generation_config: Any) -> str:
    """Why transformers compiles no steps of a call that nothing here stands against."""
    if generation_config.disable_compile:
        return "disable_compile=True"
    return f"transformers compiles no steps of this model on {module.device.type}"
