"""A quantised KV cache for Hugging Face transformers.

    import tq_cache
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="turboquant")
    out = model.generate(**inputs, past_key_values=tq_cache.TurboQuantCache(model.config))

Importing registers the attention function "turboquant" and its mask function, and does nothing else.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from .cache import TurboQuantCache
from .formats.presets import FORMATS, PRESETS
from .hf.attention import turboquant_attention
from .hf.caller import ATTENTION_NAME
from .hf.dense import densify_kv_b_proj
from .hf.masks import turboquant_mask
from .report import CacheReport

__version__ = "0.1.0"
__all__ = ["FORMATS", "PRESETS", "CacheReport", "TurboQuantCache", "__version__", "densify_kv_b_proj"]

AttentionInterface.register(ATTENTION_NAME, turboquant_attention)
AttentionMaskInterface.register(ATTENTION_NAME, turboquant_mask)
