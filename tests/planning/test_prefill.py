"""What a prefill takes: counted on shapes alone, against an H200's allocator and against real tensors."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, VOCAB, WINDOW, config_for
from packaging.version import Version
from transformers import AutoModelForCausalLM, BartConfig, LlamaConfig, Qwen3Config, Qwen3VLConfig, ViTConfig

from tq_cache.planning.memory import PlanSettings, plan_memory
from tq_cache.planning.prefill import FUSED_ATTENTION, build_model, forward_peak, prefill_bytes
from tq_cache.tools.tables import geometry_table

RESULTS = Path(__file__).parents[2] / "benchmarks/results/generate_h200.json"
LLAMA_8B = LlamaConfig(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=140000,
)  # fmt: skip
SMALL = LlamaConfig(
    vocab_size=100, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, head_dim=16
)
# GQA, windows with masks, latents and experts, linear attention, absolute positions, ALiBi in an attention of its own,
# sink logits
MODEL_TYPES = "llama gemma3_text deepseek_v3 qwen3_next gpt2 mpt gpt_oss".split()
BEFORE_5_18 = Version(transformers.__version__) < Version("5.18")
# Said, not guessed: experts chosen token by token in Python, a class that is in no mapping, decoders of Bart's kind,
# which make a padding mask and look into it; up to 5.17 also some more that look for padding.
UNKNOWN = set("dbrx emu3 jetmoe longcat_flash mllama qwen4_exp qwen4_exp_text xmod".split())
UNKNOWN |= set("bart biogpt blenderbot blenderbot-small marian mbart pegasus plbart".split())
UNKNOWN |= set("aria_text big_bird megatron-bert rembert roformer".split()) if BEFORE_5_18 else set()


def real_peak(config, input_ids) -> int:
    """The same count of a model with weights and content, on the CPU."""
    return forward_peak(build_model(config, AutoModelForCausalLM, torch.bfloat16), input_ids)


def agree(model_type: str) -> bool:
    """Whether shapes and tensors give the same; False where it is said that it is not known."""
    batch, tokens = 2, 3 * WINDOW
    try:
        planned = prefill_bytes(config_for(model_type), tokens, batch)
    except NotImplementedError as error:
        assert "is not known" in str(error)
        return False
    real = real_peak(config_for(model_type), torch.randint(3, VOCAB, (batch, tokens)))
    # torch.native_layer_norm of bfloat16 returns mean and deviation of each token in float32, as on a GPU; on a CPU in
    # bfloat16.
    statistics = 2 * (4 - 2) * batch * tokens
    assert 0 <= planned - real <= statistics, (model_type, planned, real)
    return True


def test_an_8b_model_takes_what_an_h200_held():
    measured = {
        row["peak_bytes"] - row["cache_bytes"]
        for row in json.loads(RESULTS.read_text())["rows"]
        if row.get("peak_bytes") and (row["model"], row["batch"], row["tokens"]) == ("llama-8b", 1, 32768)
    }
    assert measured == {3_909_353_472}  # with any cache
    assert prefill_bytes(LLAMA_8B, 32768) == 3_909_353_472  # cuBLAS' workspaces were there before the measurement


def test_it_is_quick():
    prefill_bytes(SMALL, 8)
    start = time.process_time()
    prefill_bytes(LLAMA_8B, 32768)
    assert time.process_time() - start < 10  # 0.5 s on a free core


def test_it_grows_with_tokens_and_batch():
    one, two, three = (prefill_bytes(SMALL, 1000 * count) for count in (1, 2, 3))
    assert three - two == two - one > 0
    shared = 1000 * (2 * 2 * 16 + 8)  # cosines and sines, positions
    # Four times the residual stream; of the MLP the activated gate, the other half, and their product.
    assert one == 1000 * 2 * (4 * 64 + 3 * 256) + shared
    assert prefill_bytes(SMALL, 1000, 2) == 2 * one - shared


def test_layers_and_dtype():
    deep = LlamaConfig(**{**SMALL.to_dict(), "num_hidden_layers": 5})
    assert prefill_bytes(deep, 500) == prefill_bytes(SMALL, 500)  # a layer is done before the next begins
    wide = LlamaConfig(**SMALL.to_dict())
    wide.dtype = torch.float32
    assert 1.9 < prefill_bytes(wide, 500) / prefill_bytes(SMALL, 500) < 2


def test_the_config_stays_as_it_is():
    config = LlamaConfig(**SMALL.to_dict())
    prefill_bytes(config, 8)
    assert config.dtype is None and config._attn_implementation != FUSED_ATTENTION


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_shapes_give_what_tensors_give(model_type):
    assert agree(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_shapes_give_what_tensors_give_or_it_is_not_known(model_type):
    if model_type == "inkling2_text":
        pytest.skip("its router does not run in bfloat16 on a CPU")
    assert agree(model_type) or model_type in UNKNOWN


def test_a_mask_of_a_window_is_counted():
    window = config_for("gemma3_text").sliding_window
    short, long = (prefill_bytes(config_for("gemma3_text"), tokens) for tokens in (window - 1, 64 * window))
    assert long - 64 * short > (64 * window) ** 2 // 2


@pytest.mark.parametrize(("config", "reason"), [
    (BartConfig(), "BartConfig is not known: its prompt goes through an encoder"),
    (ViTConfig(), "ViTConfig is not known: transformers has no causal language model of it"),
])  # fmt: skip
def test_what_is_not_known_is_said(config, reason):
    with pytest.raises(NotImplementedError, match=reason):
        prefill_bytes(config, 8)


def test_text_alone_of_a_model_that_takes_images():
    text = Qwen3VLConfig().text_config
    decoder = {name: getattr(text, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")}
    heads = dict(num_attention_heads=text.num_attention_heads, num_key_value_heads=text.num_key_value_heads)
    alike = Qwen3Config(**decoder, **heads, num_hidden_layers=2)
    assert prefill_bytes(Qwen3VLConfig(), 4096) == pytest.approx(prefill_bytes(alike, 4096), rel=0.01)


def test_operations_that_look_into_tensors_are_named():
    with pytest.raises(NotImplementedError, match=r"JetMoeConfig is not known: .* \(NotImplementedError: .*meta"):
        prefill_bytes(config_for("jetmoe"), 8)


@pytest.mark.parametrize(("tokens", "batch"), [(0, 1), (8, 0)])
def test_no_tokens(tokens, batch):
    with pytest.raises(ValueError, match=f"expected tokens and batch of 1 or more, got {tokens} and {batch}"):
        prefill_bytes(SMALL, tokens, batch)


def test_a_plan_has_it_where_asked_for():
    settings = PlanSettings(1000)
    assert plan_memory(SMALL, ["tq4"], settings).prefill_bytes is None
    assert geometry_table(plan_memory(SMALL, ["tq4"], settings)).caption is None
    plan = plan_memory(SMALL, ["tq4"], replace(settings, batch=3), prefill=True)
    assert plan.prefill_bytes == prefill_bytes(SMALL, 1000, 3) and not plan.prefill_unknown
    line = "a prefill of 3 x 1,000 tokens takes, beside weights and cache, "
    assert geometry_table(plan).caption == f"{line}{plan.prefill_bytes:,} bytes (0.006 GB) at its peak"


def test_a_plan_says_why_it_is_not_known():
    plan = plan_memory(config_for("jetmoe"), ["tq4"], PlanSettings(1000), prefill=True)
    assert plan.prefill_bytes is None and "JetMoeConfig is not known" in plan.prefill_unknown
    assert plan.prefill_unknown in geometry_table(plan).caption.replace("\\[", "[")
