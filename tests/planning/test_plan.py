"""Planned geometry and bytes against what real models and caches hold."""

from dataclasses import replace

import pytest
import torch
from architectures import ARCHITECTURES, build, config_for
from transformers import BartConfig, DynamicCache, LlamaConfig, T5Config

from tq_cache import TurboQuantCache
from tq_cache.compat import layer_kinds
from tq_cache.formats.presets import PRESETS, resolve_preset
from tq_cache.formats.states import packed_length_of
from tq_cache.planning.geometry import load_config, model_geometry
from tq_cache.planning.memory import (
    MOST_TOKENS,
    PlanSettings,
    cache_bytes,
    longest_context,
    parse_memory,
    plan_memory,
)
from tq_cache.report import held_bytes

# GQA, MQA, latents, sliding windows, recurrent hybrids, shared layers, wide global heads, encoder-like field names
MODEL_TYPES = "llama gpt_bigcode deepseek_v3 gemma3_text qwen3_next gemma3n_text gemma4_text gpt_oss opt bloom".split()
LLAMA_8B = LlamaConfig(
    hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32, intermediate_size=64,
    max_position_embeddings=10**6,
)  # fmt: skip


class ShapeCache(DynamicCache):
    """Notes heads and dims of the keys and values of every layer."""

    def __init__(self, config):
        super().__init__(config=config)
        self.shapes = {}

    def update(self, key, value, layer_idx, *args, **kwargs):
        self.shapes[layer_idx] = (key.shape[1], key.shape[-1], value.shape[-1])
        return super().update(key, value, layer_idx, *args, **kwargs)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_geometry_is_what_the_model_caches(model_type):
    if model_type not in ARCHITECTURES:
        pytest.skip("not in this version of transformers")
    model = build(model_type)
    cache = ShapeCache(model.config)
    with torch.no_grad():
        model(torch.randint(3, 99, (1, 5)), past_key_values=cache)
    layers = model_geometry(model.config).layers
    assert [layer.kind for layer in layers] == layer_kinds(model.config.get_text_config(decoder=True))
    planned = {x.index: (x.num_kv_heads, x.key_dim, x.value_dim) for x in layers if x.num_kv_heads}
    assert planned == cache.shapes


@pytest.mark.parametrize("preset", [None, "fp8_e4m3", "k8v4", "3bit_nc", "tq4", "tq_k4v2"])
@pytest.mark.parametrize("residual_length, sinks", [(128, 0), (0, 4), (100, 7)])
@pytest.mark.parametrize("layers", [{}, {"skip_format": "fp8_e4m3", "layer_presets": {2: "tq2", -1: "3bit_nc"}}])
def test_bytes_are_those_of_a_cache(preset, residual_length, sinks, layers):
    """Any tensors of the planned shapes will do: a cache does not ask where they come from."""
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=6)
    arguments = {"residual_length": residual_length, "sink_tokens": sinks, "skip_layers": ("boundary",)}
    arguments |= {"boundary_layers": 1, **layers}
    cache = DynamicCache(config=config)
    if preset is not None:
        cache = TurboQuantCache(config, preset, **arguments)
    for index in range(6):
        cache.update(*torch.randn(2, 2, 2, 1500, 64, dtype=torch.bfloat16).unbind(), index)
    held = sum(held_bytes(layer) for layer in cache.layers)
    chosen = preset and resolve_preset(preset)
    planned = cache_bytes(model_geometry(config), chosen, PlanSettings(1500, 2, **arguments))
    assert planned == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("tokens", [1, 63, 132, 133, 195, 196, 197, 260, 1000])
@pytest.mark.parametrize("residual_length, sinks", [(0, 0), (0, 4), (64, 4), (100, 7)])
def test_tokens_are_packed_in_whole_blocks(tokens, residual_length, sinks):
    """As many as a storage packs; what is left holds the sinks, the newest, and up to 63 that wait for a block."""
    packed = packed_length_of(tokens, residual_length, sinks)
    assert packed % 64 == 0 and tokens - packed >= min(tokens, residual_length + sinks)
    assert tokens - packed < residual_length + sinks + 64
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=1)
    cache = TurboQuantCache(config, "tq3", residual_length=residual_length, sink_tokens=sinks)
    cache.update(*torch.randn(2, 1, 2, tokens, 32), 0)
    storage = cache.layers[0].storage
    assert storage.packed_length == packed
    sinks_held = 0 if storage.sink_keys is None else storage.sink_keys.shape[2]
    settings = PlanSettings(tokens, 1, residual_length, sinks)
    exact_bytes = 2 * 2 * 64 * (storage.tail_keys.shape[2] + sinks_held)
    tq3 = resolve_preset("tq3", center=False, smooth=0.0)
    assert cache_bytes(model_geometry(config), tq3, settings) == exact_bytes + 2 * packed * tq3.token_bytes(32, 32)


@pytest.mark.parametrize("model_type", ["gemma3_text", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_bytes_of_a_real_run(model_type):
    """Windows, latents and hybrids, after a prefill and a step."""
    model = build(model_type, "turboquant").to(torch.bfloat16)
    cache = TurboQuantCache(model.config, "tq3")
    ids = torch.randint(3, 99, (1, 700))
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        model(ids[:, -1:], past_key_values=cache)
    geometry = model_geometry(model.config)
    planned = cache_bytes(geometry, resolve_preset("tq3"), PlanSettings(700))
    with_kv = [layer for layer, shape in zip(cache.layers, geometry.layers, strict=True) if shape.num_kv_heads]
    assert planned == pytest.approx(sum(map(held_bytes, with_kv)), rel=0.02)
    assert ("recurrent state" in " ".join(geometry.notes)) == (model_type == "qwen3_next")


def test_sliding_windows_hold_a_token_less_than_they_see():
    layer = next(x for x in model_geometry(config_for("gemma3_text")).layers if x.window)
    assert layer.window == 16
    geometry = model_geometry(config_for("gemma3_text"))
    windowed = sum(x.window is not None for x in geometry.layers)
    growth = [cache_bytes(geometry, None, PlanSettings(n)) for n in (14, 15, 16, 1000)]
    token = 2 * 2 * layer.num_kv_heads * layer.key_dim
    full = len(geometry.layers) - windowed
    assert growth[1] - growth[0] == token * len(geometry.layers)
    assert growth[2] - growth[1] == token * full
    assert growth[3] == token * (full * 1000 + windowed * 15)


def test_llama_8b_numbers():
    """32 layers of 8 KV heads of 128: 128 KiB a token at 16 bits; 4bit_nc takes 134 of 512 bytes where it packs."""
    plan = plan_memory(LLAMA_8B, ["4bit_nc"], PlanSettings(32768), 24 * 10**9)
    exact, packed = plan.rows
    assert exact.nbytes == 32768 * 131072
    assert exact.longest_context == 24 * 10**9 // 131072
    assert packed.nbytes == 32 * 8 * _head_bytes("4bit_nc", 134)
    assert packed.longest_context / exact.longest_context == pytest.approx(512 / 134, rel=0.01)
    assert packed.bits_per_element == pytest.approx(16 / packed.ratio)


def _head_bytes(name: str, token_bytes: int) -> int:
    """One KV head of 128 of one layer at 32,768 tokens: 4 sinks, 32,576 packed, 188 exact in room for 192."""
    preset = PRESETS[name]
    elements = 128 * (len(preset.center) + bool(preset.smooth))
    elements += sum(fmt.scale == "per_head" for fmt in (preset.key, preset.value))
    return 32576 * token_bytes + (4 + 192) * 512 + 4 * elements


def test_boundary_layers_are_counted_at_16_bits_or_as_they_are_packed():
    boundary = PlanSettings(32768, skip_layers=("boundary",))
    plan = plan_memory(LLAMA_8B, ["4bit_nc"], boundary)
    assert sum(layer.packed for layer in plan.layer_plans) == 28
    packed = 28 * 8 * _head_bytes("4bit_nc", 134)
    assert plan.rows[1].nbytes == packed + 4 * 8 * (32768 + 64) * 512  # room for a block
    assert plan.memory is None and plan.rows[1].longest_context is None
    fp8 = plan_memory(LLAMA_8B, ["4bit_nc"], replace(boundary, skip_format="fp8_e4m3"))
    assert fp8.rows[0].nbytes == plan.rows[0].nbytes  # the 16-bit cache is what it was
    assert fp8.rows[1].nbytes == packed + 4 * 8 * _head_bytes("fp8_e4m3", 256)
    assert [layer.preset.name for layer in fp8.layer_plans] == ["fp8_e4m3"] * 2 + ["4bit_nc"] * 28 + ["fp8_e4m3"] * 2


def test_layer_presets_count_in_every_row():
    plain, mixed = (
        plan_memory(LLAMA_8B, ["4bit_nc", "tq3"], PlanSettings(32768, layer_presets=own)) for own in (None, {-1: "tq2"})
    )
    for before, after, name, size in zip(plain.rows[1:], mixed.rows[1:], ("4bit_nc", "tq3"), (134, 100), strict=True):
        heads = [_head_bytes(name, size), _head_bytes("tq2", 68)]
        assert before.nbytes - after.nbytes == 8 * (heads[0] - heads[1])
    assert [plan.preset.name for plan in mixed.layer_plans] == ["4bit_nc"] * 31 + ["tq2"]
    assert plan_memory(LLAMA_8B, [], PlanSettings(1, layer_presets={0: "tq4"})).layer_plans[0].packed
    with pytest.raises(ValueError, match="expected a layer index from -32 to 31, got 32 in layer_presets"):
        plan_memory(LLAMA_8B, [], PlanSettings(1, layer_presets={32: "tq4"}))


@pytest.mark.parametrize("preset", [None, "tq3", "fp8_e5m2"])
@pytest.mark.parametrize("memory", [1, 10**7, 3 * 10**9])
def test_longest_context_fits_and_one_token_more_does_not(preset, memory):
    geometry, chosen = model_geometry(LLAMA_8B), preset and resolve_preset(preset)
    tokens = longest_context(geometry, chosen, PlanSettings(1, 2), memory)
    assert cache_bytes(geometry, chosen, PlanSettings(tokens + 1, 2)) > memory
    assert tokens == 0 or cache_bytes(geometry, chosen, PlanSettings(tokens, 2)) <= memory


def test_windows_alone_fit_at_any_length():
    config = config_for("gemma3_text")
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    assert longest_context(model_geometry(config), None, PlanSettings(1), 10**6) == MOST_TOKENS


def test_every_preset_has_a_row():
    plan = plan_memory(LLAMA_8B, list(PRESETS), PlanSettings(4096))
    assert [row.name for row in plan.rows] == ["16-bit", *PRESETS]


@pytest.mark.parametrize("text, expected", [("24GB", 24e9), ("80 GiB", 80 * 2**30), ("0.5mb", 5e5)])
def test_memory_sizes(text, expected):
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["24", "GB", "-1GB", "24 gigs", ""])
def test_bad_memory_sizes(text):
    with pytest.raises(ValueError, match="expected a memory size such as 24GB"):
        parse_memory(text)


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="where there is none"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="model_type"):
        load_config(tmp_path / "config.json")
    for field in ('"hidden_size": "x"', '"num_attention_heads": 0', '"quantization_config": 5'):
        (tmp_path / "config.json").write_text(f'{{"model_type": "llama", {field}}}')
        with pytest.raises(ValueError, match="that transformers can read, got .*config.json"):
            load_config(tmp_path)
    with pytest.raises(ValueError, match="context and batch"):
        PlanSettings(0)
    with pytest.raises(ValueError, match="memory left"):
        plan_memory(LLAMA_8B, [], PlanSettings(1), -5)


def test_heads_that_no_format_takes_are_counted_at_16_bits():
    narrow = LlamaConfig(hidden_size=96, num_attention_heads=4, num_hidden_layers=6)
    plan = plan_memory(narrow, ["tq4"], PlanSettings(1000))
    assert {layer.reason for layer in plan.layer_plans} == {
        "head_dim 24: only multiples of 16 from 32 to 576 are packed"
    }
    exact, packed = plan.rows
    assert exact.nbytes == 6 * 4 * 1000 * 24 * 4 and packed.nbytes == 6 * 4 * 1024 * 24 * 4  # room for a block


def test_heads_of_an_encoder_decoder_are_its_decoders():
    config = BartConfig(d_model=64, encoder_attention_heads=4, decoder_attention_heads=2, decoder_layers=3)
    layers = model_geometry(config).layers
    assert [(layer.num_kv_heads, layer.key_dim) for layer in layers] == [(2, 32)] * 3


def test_config_files_and_encoder_decoders(tmp_path):
    LLAMA_8B.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        assert model_geometry(load_config(path)) == model_geometry(LLAMA_8B)
    t5 = model_geometry(T5Config(num_layers=5, d_kv=48, num_heads=6))
    assert len(t5.layers) == 5 and t5.layers[0].key_dim == 48
    assert "cross attention" in t5.notes[0]
