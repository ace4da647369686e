"""Layers that cache latents (MLA): which they are, what they are stored as, and their bytes."""

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, RecordingCache, build, config_for, tiny_config
from transformers import CONFIG_MAPPING, DynamicCache

from tq_cache import TurboQuantCache
from tq_cache.formats.presets import FORMATS, PRESETS
from tq_cache.planning.geometry import latent_layers, model_geometry
from tq_cache.planning.layers import plan_layers
from tq_cache.planning.memory import PlanSettings, cache_bytes, plan_memory
from tq_cache.report import held_bytes

ROTARY = list(FORMATS["rotary"])
MODEL_TYPES = (
    "axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 dots3_note_text glm4_moe_lite glm_moe_dsa hy_v4 "
    "kimi_linear longcat_flash minicpm3 youtu"
).split()
MODEL_TYPES = [name for name in MODEL_TYPES if name in ARCHITECTURES]  # 5.17 lacks some
# Models without a causal LM of their own: latents that other layers read, layers without rotary keys.
TEXT_MODELS = {
    "mistral_large4_text": (
        "MistralLarge4TextModel",
        {"kv_source_layers": [0, 0, 2, 3], "indexer_types": ["full"] * 4, "no_rope_layers": [1, 1, 1, 0]},
    ),
    "glm5_next_text": ("Glm5NextTextModel", {"qk_rope_head_dim": 0, "head_dim": 0}),
}
TEXT_MODELS = {name: model for name, model in TEXT_MODELS.items() if hasattr(transformers, model[0])}


def check_geometry(model) -> dict[int, int]:
    """Planned shapes are those that a cache gets; returns the latent layers."""
    cache = RecordingCache(model.config)
    with torch.no_grad():
        model(torch.randint(3, 99, (1, 40)), past_key_values=cache)
    layers = model_geometry(model.config).layers
    planned = {x.index: f"{x.num_kv_heads}x{x.key_dim}/{x.num_kv_heads}x{x.value_dim}" for x in layers if x.key_dim}
    assert planned == cache.shapes
    for layer, held in zip(layers, cache.layers, strict=True):
        indexer_keys = getattr(held, "indexer_keys", None)
        assert layer.indexer_dim == (0 if indexer_keys is None else indexer_keys.shape[-1])
    latents = latent_layers(model.config)
    packable = {x.index: x.value_dim for x in layers if x.latent and x.kind != "sliding_attention"}
    assert latents == packable
    return latents


def expands(config) -> bool:
    """Sparse attention up to 5.17 makes keys and values of its latents before it caches them."""
    return "deepseek_sparse_attention" in (getattr(config, "layer_types", None) or ())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_latents_are_where_a_model_caches_them(model_type):
    model = build(model_type)
    latents = check_geometry(model)
    assert set(latents.values()) == (set() if expands(model.config) else {32})


@pytest.mark.parametrize("model_type", TEXT_MODELS)
def test_latents_that_are_shared_and_layers_without_rotary_keys(model_type):
    expected = {"mistral_large4_text": {0: 32, 1: 0, 2: 32, 3: 0}, "glm5_next_text": {1: 0, 3: 0}}[model_type]
    name, fields = TEXT_MODELS[model_type]
    config = tiny_config(CONFIG_MAPPING[model_type](), fields)
    latents = check_geometry(getattr(transformers, name)._from_config(config, dtype=torch.float32).eval())
    assert latents == ({} if expands(config) else expected)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_next", "gpt_oss"])
def test_other_models_have_none(model_type):
    assert latent_layers(config_for(model_type)) == {}
    assert not any(layer.latent for layer in model_geometry(config_for(model_type)).layers)


FULL, LINEAR = "full_attention", "linear_attention"


@pytest.mark.parametrize("rotary", ROTARY)
def test_presets_of_latent_layers(rotary):
    """Rotary keys without any elements are exact; other layers, and those that are not packed, are as ever."""
    plans = plan_layers([FULL] * 4 + [LINEAR], PRESETS["k8v4"], 3, 0, None, {2: "tq3"}, {1: 64, 2: 0, 3: 64}, rotary)
    assert [plan.latent for plan in plans] == [False, True, True, True, False]
    assert plans[0].preset == PRESETS["k8v4"] and plans[3].preset is plans[4].preset is None
    assert plans[1].preset == PRESETS["k8v4"].for_latents(FORMATS["rotary"][rotary])
    assert plans[2].preset == PRESETS["tq3"].for_latents(FORMATS["rotary"]["exact"])
    assert (plans[2].preset.name, plans[2].reason) == ("tq3", "layer_presets")


def test_formats_of_rotary_keys():
    names = r"\['exact', 'fp8_e4m3', 'fp8_e5m2', 'int8'\]"
    with pytest.raises(ValueError, match=f"expected a rotary format of {names}, got 'tq4'"):
        plan_layers([FULL], PRESETS["tq4"], (), 0, latents={0: 64}, rotary="tq4")
    with pytest.raises(ValueError, match="no layer that can be packed caches latents .*got 'int8'; leave rotary out"):
        plan_layers([FULL], PRESETS["tq4"], (), 0, rotary="int8")
    with pytest.raises(ValueError, match="no layer that can be packed caches latents"):
        plan_memory(config_for("llama"), ["tq4"], PlanSettings(1000, rotary="int8"))


@pytest.mark.parametrize("preset", [None, "fp8_e4m3", "k8v4", "4bit_nc", "tq3"])
@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("residual_length, sinks", [(128, 4), (0, 0)])
def test_bytes_are_those_of_a_cache(preset, rotary, residual_length, sinks):
    """Latents and rotary keys of four layers, one of them at 16 bits, one with a preset of its own."""
    config = config_for("deepseek_v3")
    arguments = {"residual_length": residual_length, "sink_tokens": sinks, "skip_layers": (0,), "rotary": rotary}
    arguments["layer_presets"] = {-1: "tq2"}
    cache = DynamicCache(config=config) if preset is None else TurboQuantCache(config, preset, **arguments)
    for index in range(4):
        cache.update(*(torch.randn(2, 1, 1500, dim, dtype=torch.bfloat16) for dim in (64, 32)), index)
    planned = cache_bytes(model_geometry(config), preset and PRESETS[preset], PlanSettings(1500, 2, **arguments))
    assert planned == pytest.approx(sum(map(held_bytes, cache.layers)), rel=0.003)


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("model_type", TEXT_MODELS)
def test_bytes_where_layers_have_no_rotary_keys_or_no_latents(model_type, rotary):
    name, fields = TEXT_MODELS[model_type]
    config = tiny_config(CONFIG_MAPPING[model_type](), fields)
    options = {} if expands(config) else {"rotary": rotary}
    cache = TurboQuantCache(config, "tq4", **options)
    layers = model_geometry(config).layers
    for layer in layers:
        if layer.num_kv_heads:
            heads, widths = layer.num_kv_heads, (layer.key_dim, layer.value_dim)
            cache.update(*(torch.randn(2, heads, 1500, dim, dtype=torch.bfloat16) for dim in widths), layer.index)
    held = sum(held_bytes(cache.layers[layer.index]) for layer in layers if layer.num_kv_heads)
    held += 2 * 2 * 1500 * sum(layer.indexer_dim for layer in layers)  # of the indexers, which were given nothing
    planned = cache_bytes(model_geometry(config), PRESETS["tq4"], PlanSettings(1500, 2, **options))
    assert planned == pytest.approx(held, rel=0.003)


def test_deepseek_v3_numbers():
    """61 layers of 512 + 64: 70,272 bytes a token at 16 bits; tq4 takes 258 + 128, with int8 rotary keys 258 + 66."""
    config = transformers.DeepseekV3Config()
    sizes = {"exact": 258 + 128, "int8": 258 + 66, "fp8_e4m3": 258 + 64}
    for rotary, size in sizes.items():
        plan = plan_memory(config, ["tq4", "fp8_e4m3"], PlanSettings(131072, rotary=rotary), 80 * 10**9)
        assert plan.rows[0].nbytes == 61 * 131072 * 1152
        packed = 131072 - 4 - 128 - 60
        calibration = 4 * (2 * 512 + (rotary == "fp8_e4m3"))
        assert plan.rows[1].nbytes == 61 * (packed * size + calibration + (4 + 192) * 1152)
        assert plan.rows[2].nbytes - plan.rows[1].nbytes == 61 * (packed * (512 - 258) - 4 * 511)


def test_rotary_keys_of_a_width_that_cannot_be_packed():
    config = config_for("deepseek_v3")
    config.qk_rope_head_dim = 16
    assert plan_memory(config, ["tq4"], PlanSettings(1000)).rows[1].nbytes > 0
    with pytest.raises(
        ValueError, match="expected a width of rotary keys in int8 that is .* got 16; use rotary='exact'"
    ):
        plan_memory(config, ["tq4"], PlanSettings(1000, rotary="int8"))
