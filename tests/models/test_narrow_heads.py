"""Models whose heads are too narrow to be packed, doing what transformers' generation tests do (GenerationTesterMixin).

transformers' test files are no part of its package, so these do likewise: each way to generate, by tiny random models
with heads of 4 to 16 channels, gives what it gives without `enable`.
"""

import functools
import warnings

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BartConfig,
    BartForConditionalGeneration,
    DeepseekV3Config,
    FalconConfig,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
)

import tq_cache
from tq_cache import TurboQuantCache

SMALL = dict(vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4)
SMALL |= dict(max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=98)
LATENT = dict(kv_lora_rank=16, q_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=12)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=16, mamba_chunk_size=16, mamba_n_groups=1, mamba_expand=2)
CONFIGS = {
    "llama": LlamaConfig(**SMALL, num_key_value_heads=2),
    "opt": OPTConfig(**SMALL | dict(ffn_dim=37, word_embed_proj_dim=32)),
    "gpt_neox": GPTNeoXConfig(**SMALL),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=16, num_key_value_heads=2, sliding_window=8,
                               layer_types=["sliding_attention", "full_attention"]),
    "bamba": BambaConfig(**SMALL, **MAMBA, num_key_value_heads=2, attn_layer_indices=[1]),
    "bart": BartConfig(**SMALL | dict(d_model=16, hidden_size=16, encoder_layers=2,
                                      decoder_layers=2, encoder_attention_heads=4,
                                      decoder_attention_heads=4, encoder_ffn_dim=4, decoder_ffn_dim=4,
                                      decoder_start_token_id=1, forced_eos_token_id=None)),
    "deepseek_v3": DeepseekV3Config(**SMALL, **LATENT, **EXPERTS, num_key_value_heads=4, first_k_dense_replace=1),
    "falcon": FalconConfig(**SMALL, multi_query=True),
}  # fmt: skip
HEAD_DIMS = {"gemma3": 16, "bart": 4}  # else 8; DeepSeek's latents have 16
WAYS = {
    "greedy": {},
    "sampling": dict(do_sample=True, top_k=20),
    "beams": dict(num_beams=3, num_return_sequences=2),
    "beam_sample": dict(num_beams=2, do_sample=True),
    "sequences": dict(do_sample=True, num_return_sequences=3),
    "prompt_lookup": dict(prompt_lookup_num_tokens=2),
    "assisted": dict(assistant=True),
    "padded": dict(padding=4),
    "embeddings": dict(embeddings=True),
    "no_cache": dict(use_cache=False),
    "static": dict(cache_implementation="static"),
    "continued": dict(continued=True),
}
# Recurrent states are not rolled back; Bamba's generate() takes no embeddings, an encoder's are no prompt of a decoder.
LACKING = {
    ("bamba", "assisted"),
    ("bamba", "prompt_lookup"),
    ("bamba", "embeddings"),
    ("bart", "embeddings"),
    ("bart", "continued"),
}
CASES = [(family, way) for family in CONFIGS for way in WAYS if (family, way) not in LACKING]

IN_DEFAULT_SUITE = {"greedy"}


@pytest.fixture(scope="module")
def models():
    def make(family: str, seed: int = 0):
        torch.manual_seed(seed)
        config = CONFIGS[family]
        build = BartForConditionalGeneration if family == "bart" else AutoModelForCausalLM.from_config
        model = build(config).eval()
        for parameter in model.parameters():  # so that tokens differ
            torch.nn.init.normal_(parameter, std=0.2)
        return model

    return functools.cache(make)


def generate(models, family: str, way: str):
    """What a way to generate returns, with scores."""
    model, options = models(family), dict(WAYS[way])
    ids = torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(0))
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    if padding := options.pop("padding", 0):
        inputs["input_ids"][1, :padding] = 0
        inputs["attention_mask"][1, :padding] = 0
    if "prompt_lookup_num_tokens" in options or options.get("assistant"):
        inputs = {name: x[:1] for name, x in inputs.items()}
    if options.pop("assistant", False):
        options["assistant_model"] = models(family, 1)
    if options.pop("embeddings", False):
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    fixed = dict(max_new_tokens=9, return_dict_in_generate=True, output_scores=True) | options
    fixed.setdefault("do_sample", False)
    continued = fixed.pop("continued", False)
    torch.manual_seed(0)
    out = model.generate(**inputs, **fixed)
    if continued:
        ids = torch.cat([out.sequences, ids[:, :3]], dim=1)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=out.past_key_values, **fixed)
    return out


@pytest.mark.parametrize(("family", "way"), [
    pytest.param(*case, marks=() if case[1] in IN_DEFAULT_SUITE else pytest.mark.slow) for case in CASES
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_way_gives_what_it_gives_without(models, family, way):
    expected = generate(models, family, way)
    with tq_cache.enable(models(family)):
        got = generate(models, family, way)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.scores, expected.scores, rtol=1e-4, atol=1e-4)
    cache = getattr(got.past_key_values, "self_attention_cache", got.past_key_values)
    assert isinstance(cache, TurboQuantCache) == (way not in ("no_cache", "static"))


@pytest.mark.parametrize("family", CONFIGS)
def test_one_warning_and_the_report_say_so(models, family):
    model = models(family)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with tq_cache.enable(model):
            model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
            out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, return_dict_in_generate=True)
    of_widths = [str(x.message) for x in said if "only multiples of 16 from 32 to 576 are packed" in str(x.message)]
    assert len(of_widths) == 1, of_widths
    cache = getattr(out.past_key_values, "self_attention_cache", out.past_key_values)
    width = "latents of 16" if family == "deepseek_v3" else f"head_dim {HEAD_DIMS.get(family, 8)}"
    exact = [layer.stored for layer in cache.report().layers if layer.kind in ("full_attention", "hybrid")]
    assert exact and all(f"float32 ({width}: " in stored for stored in exact)
