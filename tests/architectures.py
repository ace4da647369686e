"""Tiny random models of every decoder architecture of transformers that runs with a DynamicCache.

`python tests/architectures.py [model_type ...]` builds each, generates a few tokens, and prints
what its cache looks like.
"""

from __future__ import annotations

import dataclasses
import sys
import time

import torch
import transformers
from transformers import CONFIG_MAPPING, DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 4, 2, 32, 4, 128
HIDDEN = HEADS * HEAD_DIM
POSITIONS = 512
WINDOW = 16
WEIGHT_STD = 0.1


def _names(names: str, value: int) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


# Values of the config fields, by name; a field that a config class lacks is left out.
SIZES = {
    "vocab_size": VOCAB,
    # depth
    **_names("num_hidden_layers n_layer n_layers num_layers", LAYERS),
    **_names("decoder_layers num_decoder_layers num_blocks", LAYERS),
    # DynamicCache(config) counts the encoder layers of bart-like decoders: as many of both
    **_names("encoder_layers num_encoder_layers", LAYERS),
    "depth": 1,
    # width
    **_names("hidden_size n_embd d_model emb_dim embedding_size embedding_dim", HIDDEN),
    **_names("word_embed_proj_dim input_embedding_size output_embedding_size", HIDDEN),
    # heads
    **_names("num_attention_heads n_head n_heads num_heads attention_heads", HEADS),
    **_names("decoder_attention_heads num_decoder_attention_heads", HEADS),
    **_names("encoder_attention_heads num_encoder_attention_heads", HEADS),
    **_names("swa_num_attention_heads", HEADS),
    **_names("num_key_value_heads num_kv_heads swa_num_key_value_heads", KV_HEADS),
    **_names("head_dim dim_head kv_channels rotary_dim swa_head_dim d_head", HEAD_DIM),
    **_names("global_head_dim", HEAD_DIM),
    # multi-head latent attention, indexers
    **_names("kv_lora_rank", 64),
    **_names("q_lora_rank o_lora_rank", 32),
    **_names("qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim", 32),
    **_names("index_n_heads o_groups", 2),
    "index_topk": 16,
    # feed forward, experts
    **_names("intermediate_size intermediate_size_mlp dense_intermediate_size d_inner", 64),
    **_names("ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dff dim_ff n_inner", 64),
    **_names("expert_ffn_hidden_size moe_intermediate_size shared_intermediate_size", 32),
    **_names("shared_expert_intermediate_size shared_experts_intermediate_size", 32),
    **_names("moe_shared_expert_intermediate_size router_hidden_size", 32),
    **_names("num_experts n_routed_experts num_local_experts moe_num_experts", 4),
    **_names("num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts", 2),
    **_names("n_group topk_group num_expert_group first_k_dense_replace num_dense_layers", 1),
    **_names("n_shared_experts num_shared_experts moe_num_shared_experts", 1),
    "zero_expert_num": 2,
    # positions
    **_names("max_position_embeddings n_positions n_ctx max_seq_len", POSITIONS),
    **_names("model_max_length max_target_positions", POSITIONS),
    # recurrent layers
    **_names("mamba_d_state ssm_state_size state_size chunk_size mamba_chunk_size", 16),
    **_names("mamba_expand expand", 2),
    **_names("mamba_n_heads mamba_num_heads", 8),
    **_names("mamba_d_head mamba_head_dim", 32),
    **_names("mamba_d_ssm", 2 * HIDDEN),
    **_names("mamba_n_groups n_groups mamba_ngroups", 1),
    **_names("mamba_dt_rank time_step_rank", 8),
    **_names("linear_num_key_heads", 2),
    **_names("linear_num_value_heads linear_num_heads", 4),
    **_names("linear_key_head_dim linear_value_head_dim linear_head_dim", 32),
    # special tokens and roles
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "tie_word_embeddings": False,
    "is_decoder": True,
    "is_encoder_decoder": False,
}

# Two layers of each kind, for the models whose default pattern has one kind only.
SLIDING_FULL = ["sliding_attention", "full_attention"] * 2
LINEAR_FULL = ["linear_attention", "full_attention"] * 2
CONV_FULL = ["conv", "full_attention"] * 2
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

# Further fields, by the `model_type` of the config, text sub-configs included.
OVERRIDES: dict[str, dict] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": SLIDING_FULL,
        "rope_parameters": {
            "sliding_attention": ROPE | {"mrope_section": [6, 6, 4]},
            "full_attention": ROPE | {"mrope_section": [6, 6, 4]},
        },
    },
    # The modeling code reads `rope_theta`, which the config class does not define.
    "dbrx": {"attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v4": {
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
        ],
        "compress_rates": {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4},
    },
    "dots3_note": {
        "vision_config": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    },
    # Sliding layers have dims of their own: latent 32 rather than 64.
    "dots3_note_text": {
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 64,
        "swa_qk_nope_head_dim": 32,
        "swa_v_head_dim": 32,
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB,
    },
    "gemma4_unified_text": {"global_head_dim": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granitemoehybrid": {"layer_types": LINEAR_FULL},
    # Two stacks that are run 8 times each: 16 layers of cache.
    "hrm_text": {"num_hidden_layers": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": SLIDING_FULL},
    "lfm2": {"layer_types": CONV_FULL},
    "lfm2_moe": {"layer_types": CONV_FULL},
    "mellum": {"layer_types": SLIDING_FULL},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "ministral": {"layer_types": SLIDING_FULL},
    "musicgen_decoder": {"pad_token_id": VOCAB},
    "musicgen_melody_decoder": {"pad_token_id": VOCAB},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": WINDOW,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
    },
    "roc_bert": {"shape_vocab_size": VOCAB, "pronunciation_vocab_size": VOCAB},
    "xmod": {"default_language": "en_XX"},
    "zaya": {
        "num_experts_per_tok": 1,
        "sliding_window": WINDOW,
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
    },
}

# Per-layer lists: the distinct entries of the default list, repeated over the tiny depth.
PATTERNS = {"layer_types", "mlp_layer_types", "layers_block_type"}

# Attention windows, set only where the default config has one.
WINDOWS = set(
    "sliding_window sliding_window_size attention_chunk_size window_size local_attention attention_window_size".split()
)

UNBUILDABLE: dict[str, str] = {
    "blt": "DynamicCache(config) fails: BltConfig has no num_hidden_layers",
    "falcon_mamba": "no attention, recurrent state only: takes cache_params, not past_key_values",
    "gemma3n": "its vision tower needs timm (gemma3n_text is here)",
    "gemma4_assistant": "reads the keys and values of its target model, has no cache",
    "gemma4_unified_assistant": "reads the keys and values of its target model, has no cache",
    "mamba": "no attention, recurrent state only: takes cache_params, not past_key_values",
    "mamba2": "no attention, recurrent state only: takes cache_params, not past_key_values",
    "minimax": "raises ValueError for any cache but its own MiniMaxCache",
    "musicgen": "audio codebooks: a generate of its own, ids of shape (batch * codebooks, length)",
    "musicgen_melody": "audio codebooks: a generate of its own, as musicgen",
    "openai-gpt": "has no cache",
    "reformer": "keeps buckets and states in a cache of its own",
    "rwkv": "no attention: recurrent state of its own, ignores past_key_values",
    "xlm": "has no cache",
    "xlnet": "keeps mems, a tuple of hidden states, instead of a cache",
    "xlstm": "no attention: recurrent state of its own, ignores past_key_values",
}

ARCHITECTURES: list[str] = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in UNBUILDABLE]


def _cycle(entries: list, length: int) -> list:
    kinds = list(dict.fromkeys(entries))
    return [kinds[i % len(kinds)] for i in range(length)]


def _no_dropout(config: PreTrainedConfig, names: set[str]) -> dict:
    dropouts = [n for n in names if "dropout" in n or n.endswith(("_pdrop", "layerdrop"))]
    return {n: 0.0 for n in dropouts if isinstance(getattr(config, n, None), float)}


def tiny_config(default: PreTrainedConfig, overrides: dict | None = None) -> PreTrainedConfig:
    """A config of the class of `default`, small; sub-configs are made small too."""
    overrides = OVERRIDES.get(default.model_type, {}) | (overrides or {})
    names = {field.name for field in dataclasses.fields(default)} | set(vars(default))
    values = {name: value for name, value in SIZES.items() if name in names}
    for name in WINDOWS.intersection(names):
        if getattr(default, name) is not None:
            values[name] = WINDOW
    for name in PATTERNS.intersection(names):
        if getattr(default, name):
            values[name] = _cycle(getattr(default, name), LAYERS)
    if "kv_lora_rank" in names:
        values["num_key_value_heads"] = HEADS  # latent attention has no grouped heads
    values |= _no_dropout(default, names)
    values |= overrides
    for name in default.sub_configs:
        sub_config = getattr(default, name, None)
        if sub_config is not None:
            values[name] = tiny_config(sub_config, overrides.get(name))
    return type(default)(**values)


def config_for(model_type: str) -> PreTrainedConfig:
    """The tiny config; of a composite model whose causal LM is text only, the text config."""
    config = tiny_config(CONFIG_MAPPING[model_type]())
    if not isinstance(config, _model_class(model_type).config_class):
        config = config.get_text_config(decoder=True)
    return config


def _model_class(model_type: str) -> type[PreTrainedModel]:
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def build(model_type: str, attn_implementation: str | None = None, seed: int = 0) -> PreTrainedModel:
    """A tiny random float32 model in eval mode, whose greedy runs never stop early."""
    choice = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    config = config_for(model_type)
    torch.manual_seed(seed)
    model = _model_class(model_type)._from_config(config, dtype=torch.float32, **choice)
    _spread_weights(model, seed)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, bos_token_id=1)
    return model.eval()


@torch.no_grad()
def _spread_weights(model: PreTrainedModel, seed: int) -> None:
    """Larger random matrices than the usual 0.02: outputs depend on the context, few near ties."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim >= 2 and parameter.is_floating_point():
            parameter.normal_(0.0, WEIGHT_STD, generator=generator)


def prompt(model: PreTrainedModel, length: int = 24, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random token ids (never the special ones, 0 to 2) for a batch of two rows."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCAB, (2, length), generator=generator).to(model.device)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


class RecordingCache(DynamicCache):
    """A DynamicCache that notes, by layer, the heads and dims of the keys and values it gets."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config=config)
        self.shapes: dict[int, str] = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        key, value = (f"{x.shape[1]}x{x.shape[-1]}" for x in (key_states, value_states))
        self.shapes[layer_idx] = f"{key}/{value}"
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def sweep_one(model_type: str, new_tokens: int = 12) -> str:
    """One line: cache layers, heads x dim of keys/values, seconds, and ok or the reason why not."""
    start = time.perf_counter()
    layers = shapes = ""
    try:
        model = build(model_type)
        cache = RecordingCache(model.config)
        layers = _counts([type(layer).__name__ for layer in cache.layers])
        result = _run(model, cache, new_tokens)
        shapes = _counts(list(cache.shapes.values()))
    except Exception as error:
        result = f"FAIL {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    seconds = time.perf_counter() - start
    return f"{model_type:24} {layers:40} {shapes:24} {seconds:5.2f}s  {result}"


def _run(model: PreTrainedModel, cache: RecordingCache, new_tokens: int) -> str:
    inputs = prompt(model)
    out = model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[:, inputs["input_ids"].shape[1] :]
    if tokens.shape[1] != new_tokens:
        return f"FAIL only {tokens.shape[1]} tokens"
    if not cache.shapes:
        return "FAIL the cache was not used"
    logits = torch.stack(out.logits)
    best, second = logits.topk(2, dim=-1).values.unbind(-1)
    gap = ((best - second) / logits.std(-1)).min().item()
    distinct = len(set(tokens.flatten().tolist()))
    return f"ok (smallest top-2 gap {gap:.4f} std, {distinct} distinct tokens)"


def _counts(names: list[str]) -> str:
    return ",".join(f"{names.count(name)}:{name}" for name in dict.fromkeys(names))


def main(model_types: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}: {len(ARCHITECTURES)} architectures")
    for model_type in model_types or ARCHITECTURES:
        print(sweep_one(model_type), flush=True)
    if not model_types:
        for model_type, reason in UNBUILDABLE.items():
            print(f"{model_type:24} not buildable: {reason}")


if __name__ == "__main__":
    main(sys.argv[1:])
