"""A quantised KV cache for Hugging Face transformers.

    import tq_cache
    tq_cache.enable(model)
    out = model.generate(**inputs)

or, with a cache in hand:

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="turboquant")
    out = model.generate(**inputs, past_key_values=tq_cache.TurboQuantCache(model.config))

Importing registers the attention function "turboquant" and its mask function, and does nothing else.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from .cache import TurboQuantCache
from .formats.presets import FORMATS, PRESETS
from .generation import Enabled, disable, enable
from .hf.attention import turboquant_attention
from .hf.caller import ATTENTION_NAME
from .hf.dense import densify_kv_b_proj
from .hf.masks import turboquant_mask
from .report import CacheReport
from .saving.folder import CacheFileError
from .version import __version__

__all__ = [
    "FORMATS",
    "PRESETS",
    "CacheFileError",
    "CacheReport",
    "Enabled",
    "TurboQuantCache",
    "__version__",
    "densify_kv_b_proj",
    "disable",
    "enable",
]

AttentionInterface.register(ATTENTION_NAME, turboquant_attention)
AttentionMaskInterface.register(ATTENTION_NAME, turboquant_mask)
