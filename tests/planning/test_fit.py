"""The longest context that fits: with weights, with its prefill, and within the model's positions."""

from dataclasses import replace

import pytest
from architectures import ARCHITECTURES, config_for
from transformers import AutoModelForCausalLM, LlamaConfig, T5Config

from tq_cache.formats.presets import PRESETS
from tq_cache.planning.geometry import model_geometry
from tq_cache.planning.memory import PlanSettings, cache_bytes, default_context, plan_memory
from tq_cache.planning.prefill import Prefill, prefill_bytes
from tq_cache.tools.runs import EMBEDDED_MODEL, load_model
from tq_cache.tools.tables import plan_table

SMALL = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3,
    vocab_size=1000, max_position_embeddings=100_000,
)  # fmt: skip
PLAIN = PlanSettings(1000)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "bloom"])
@pytest.mark.parametrize("preset", [None, "tq4"])
def test_a_context_fits_with_its_prefill_and_one_token_more_does_not(model_type, preset):
    """Also where masks or scores of tokens x tokens make it no straight line."""
    config = SMALL if model_type == "llama" else config_for(model_type)
    config.max_position_embeddings = 100_000
    memory = 60_000_000
    plan = plan_memory(config, [preset] if preset else [], PLAIN, memory, prefill=True)
    tokens = plan.rows[-1].longest_context

    def needed(tokens):
        held = cache_bytes(model_geometry(config), preset and PRESETS[preset], replace(PLAIN, context=tokens))
        return held + prefill_bytes(config, tokens)

    assert needed(tokens) <= memory < needed(tokens + 2)


def test_prefills_are_run_a_few_times_for_all_rows(monkeypatch):
    runs = []
    real = Prefill.measure

    def measure(self, tokens):
        runs.append(tokens)
        return real(self, tokens)

    monkeypatch.setattr(Prefill, "measure", measure)
    plan_memory(SMALL, list(PRESETS), PLAIN, 60_000_000, prefill=True)
    assert len(set(runs)) < 3 * (len(PRESETS) + 1)


def test_weights_are_those_of_the_model():
    model, _ = load_model(EMBEDDED_MODEL, device="cpu")
    plan = plan_memory(model.config, ["tq4"], PLAIN, 10**9, weights=None)
    assert plan.weights_bytes == sum(x.nbytes for x in model.parameters())  # tied ones once
    free = plan_memory(model.config, ["tq4"], PLAIN, 10**9 - plan.weights_bytes)
    assert plan.rows == free.rows
    with pytest.raises(ValueError, match="expected memory left for keys and values"):
        plan_memory(model.config, ["tq4"], PLAIN, plan.weights_bytes, weights=None)


def test_weights_that_a_config_does_not_tell_are_asked_for():
    with pytest.raises(NotImplementedError, match="T5Config is not known: .*give the bytes of the weights"):
        plan_memory(T5Config(), ["tq4"], PLAIN, 10**9, weights=None)
    assert plan_memory(T5Config(), ["tq4"], PLAIN, weights=None).weights_bytes is None
    assert plan_memory(T5Config(), ["tq4"], PLAIN, 10**9, weights=5).weights_bytes == 5


def test_no_context_is_longer_than_the_positions():
    config = LlamaConfig(**SMALL.to_diff_dict() | {"max_position_embeddings": 5000})
    plan = plan_memory(config, ["tq4"], replace(PLAIN, context=6000), 10**10, prefill=True)
    assert [row.longest_context for row in plan.rows] == [5000, 5000] and plan.positions == 5000
    text = " ".join(str(plan_table(plan).caption).split())
    assert "6,000 tokens are more than the model has positions (5,000)" in text
    assert "beside no weights and the peak of its prefill" in text and "at most the model's 5,000 positions" in text
    assert default_context(config) == 5000 and default_context(SMALL) == 32768
    if "bloom" in ARCHITECTURES:  # it has no such limit
        assert default_context(config_for("bloom")) == 32768


def test_a_prefill_that_is_not_known_is_said_to_be_left_out():
    plan = plan_memory(config_for("jetmoe"), ["tq4"], PLAIN, 10**9, prefill=True)
    assert "beside no weights and no prefill, which is not known" in plan_table(plan).caption


def test_every_auto_class_of_prefills_builds_the_model_whose_weights_are_counted():
    real = AutoModelForCausalLM.from_config(SMALL)
    assert Prefill(SMALL).weight_bytes() == sum(2 * x.numel() for x in real.parameters())
