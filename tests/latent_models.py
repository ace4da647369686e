"""Tiny models of every MLA class of transformers: of `architectures`, and three that no causal LM mapping names."""

import importlib
from functools import lru_cache
from pathlib import Path

import torch
import transformers
from architectures import LAYERS, _spread_weights, build, tiny_config
from transformers import GenerationConfig, PreTrainedModel

from tq_cache.compat import RESET_KEEPS_LENGTH

MODELS_FOLDER = Path(transformers.__file__).parent / "models"

# Latents shared by layers, and layers without a rotary part; a rotary width of 0 everywhere.
_TEXT = {
    "mistral_large4": {
        "kv_source_layers": [0, 1, 0, 1],
        "no_rope_layers": [1, 0, 1, 0],
        "indexer_types": ["full"] * LAYERS,
        "layer_types": ["indexed_attention"] * LAYERS,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "glm5_next": {
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "indexer_types": ["full"] * LAYERS,
        "index_kpool": 4,
    },
    "mistral4": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        },
    },
}
_OUTSIDE = {
    "mistral4": "Mistral4ForCausalLM",
    "mistral_large4": "MistralLarge4ForConditionalGeneration",
    "glm5_next": "Glm5NextForConditionalGeneration",
}


# In the causal LM mapping, unlike those above; 5.17 lacks some.
_MODULES = (
    "axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 dots3_note glm4_moe_lite glm_moe_dsa hy_v4 "
    "kimi_linear longcat_flash minicpm3 youtu"
).split()
EXPANDING_MODELS: list[str] = [name for name in [*_MODULES, *_OUTSIDE] if (MODELS_FOLDER / name).is_dir()]
# Sparse attention (DSA): never preallocated, and up to 5.17 expanded before it is cached, as keys and values.
INDEXED = {"axk2", "deepseek_v32", "dots3_note", "glm_moe_dsa", "hy_v4", "mistral_large4", "glm5_next"}
INDEXED_LATENTS = not RESET_KEEPS_LENGTH  # of 5.18 on
LATENT_MODELS = [name for name in EXPANDING_MODELS if INDEXED_LATENTS or name not in INDEXED]


@lru_cache(maxsize=4)
def latent_model(name: str, attention: str = "turboquant") -> PreTrainedModel:
    """A tiny random float32 model, in eval mode."""
    if name not in _OUTSIDE:
        return build(name, attention)
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    model_class = getattr(module, _OUTSIDE[name])
    default = model_class.config_class()
    overrides = {"text_config": _TEXT[name]} if default.sub_configs else _TEXT[name]
    torch.manual_seed(0)
    model = model_class._from_config(
        tiny_config(default, overrides), dtype=torch.float32, attn_implementation=attention
    )
    _spread_weights(model, 0)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, bos_token_id=1)
    return model.eval()
