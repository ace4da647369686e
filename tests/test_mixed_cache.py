"""Caches whose layers are stored as different presets: each layer as it would be alone, whatever is done to them."""

import copy

import pytest
import torch
from architectures import build, prompt
from storages import assert_same_state, everything
from transformers import DynamicCache, LlamaConfig

from tq_cache import PRESETS, TurboQuantCache
from tq_cache.formats.presets import resolve_preset
from tq_cache.planning.geometry import model_geometry
from tq_cache.planning.memory import PlanSettings, cache_bytes
from tq_cache.tools.runs import demo_case, encode, generate, make_cache
from tq_cache.tools.scores import decode, prefill

LAYERS = 6
MIXED = dict(
    skip_layers=("boundary", 2), boundary_layers=1, skip_format="k8v4", layer_presets={2: "tq2", -2: "4bit_nc"}
)
STORED_AS = ("k8v4", "tq3", "tq2", "tq3", "4bit_nc", "k8v4")  # with tq3 as the cache's preset


def config(**changes) -> LlamaConfig:
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4)
    return LlamaConfig(**sizes | dict(num_key_value_heads=2, head_dim=32) | changes)


def filled(cache: TurboQuantCache, tokens: int = 300, batch: int = 3, seed: int = 0) -> TurboQuantCache:
    generator = torch.Generator().manual_seed(seed)
    for layer_idx in range(LAYERS):
        cache.update(*torch.randn(2, batch, 2, tokens, 32, generator=generator), layer_idx)
    return cache


def mixed(tokens: int = 300) -> TurboQuantCache:
    return filled(TurboQuantCache(config(), "tq3", residual_length=16, **MIXED), tokens)


def alone(preset: str, tokens: int = 300) -> TurboQuantCache:
    """The same tokens with this preset in every layer."""
    return filled(TurboQuantCache(config(), preset, residual_length=16), tokens)


def test_every_layer_is_what_it_is_alone():
    cache = mixed()
    assert [plan.preset for plan in cache.plans] == [PRESETS[name] for name in STORED_AS]
    for n, name in enumerate(STORED_AS):
        assert cache.layers[n].storage.preset == PRESETS[name]
        assert cache.layers[n].storage.packed_length == 256
        assert_same_state(everything(alone(name).layers[n].storage), everything(cache.layers[n].storage))


def operations() -> dict:
    def crop(cache):
        cache.crop(-70)

    def reorder(cache):
        cache.reorder_cache(torch.tensor([2, 0, 0]))

    def select(cache):
        cache.batch_select_indices(torch.tensor([1]))
        cache.batch_repeat_interleave(3)

    def grow(cache):
        filled(cache, 70, seed=1)
        filled(cache, 1, seed=2)

    def crop_and_grow(cache):
        cache.crop(-270)
        filled(cache, 170, seed=1)

    def start_again(cache):
        cache.reset()
        filled(cache, 90, batch=1, seed=1)

    return {function.__name__: function for function in (crop, reorder, select, grow, crop_and_grow, start_again)}


@pytest.mark.parametrize("name", operations())
def test_operations_do_to_each_layer_what_they_do_to_it_alone(name):
    """On a deep copy, which leaves what it was made of as it was."""
    cache, operation = mixed(), operations()[name]
    twin, before = copy.deepcopy(cache), [everything(layer.storage) for layer in cache.layers]
    operation(twin)
    for preset in dict.fromkeys(STORED_AS):
        expected = alone(preset)
        operation(expected)
        for n in (n for n, other in enumerate(STORED_AS) if other == preset):
            assert_same_state(everything(expected.layers[n].storage), everything(twin.layers[n].storage))
    for layer, state in zip(cache.layers, before, strict=True):
        assert_same_state(state, everything(layer.storage))
    assert [plan.preset for plan in twin.plans] == [plan.preset for plan in cache.plans]


def test_preallocated_layers_are_what_they_are_alone():
    def preallocated(preset: str, **layers) -> TurboQuantCache:
        cache = TurboQuantCache(config(), preset, residual_length=64, max_cache_len=512, **layers)
        return filled(filled(cache, 300), 1, seed=1)

    cache = preallocated("tq3", **MIXED)
    assert [layer.storage.view().packed_length for layer in cache.layers] == [192] * LAYERS
    for n, name in enumerate(STORED_AS):
        expected = preallocated(name).layers[n].storage.tensors()
        held = cache.layers[n].storage.tensors()
        assert len(held) == len(expected)
        assert all(torch.equal(ours, other) for ours, other in zip(held, expected, strict=True))


def test_report_says_what_each_layer_is_stored_as():
    cache = mixed()
    report = cache.report()
    assert [layer.stored for layer in report.layers] == [
        "K fp8_e4m3, V uniform4 (boundary)",
        "K tq3, V tq3",
        "K tq2, V tq2 (layer_presets)",
        "K tq3, V tq3",
        "K nc4, V uniform4 (layer_presets)",
        "K fp8_e4m3, V uniform4 (boundary)",
    ]
    table = str(report)
    assert all(layer.stored in table for layer in report.layers)
    alike = [2 * report.layers[0].nbytes, 2 * report.layers[1].nbytes, report.layers[2].nbytes, report.layers[4].nbytes]
    assert all(f"{nbytes:,}" in table for nbytes in alike)
    assert "preset tq3" in table and "scales of fp8_e4m3 keys: computed" in table
    assert report.nbytes == cache.nbytes == sum(layer.storage.nbytes for layer in cache.layers)


def test_bytes_per_layer_are_as_planned():
    cache = TurboQuantCache(config(), "tq3", **MIXED)
    for n in range(LAYERS):
        cache.update(*torch.randn(2, 2, 2, 3000, 32, dtype=torch.bfloat16), n)
    geometry = model_geometry(config(num_hidden_layers=1))
    for layer, name in zip(cache.report().layers, STORED_AS, strict=True):
        planned = cache_bytes(geometry, PRESETS[name], PlanSettings(3000, batch=2))
        assert layer.nbytes == pytest.approx(planned, rel=0.005)
    settings = PlanSettings(3000, 2, **MIXED)
    assert cache_bytes(model_geometry(config()), PRESETS["tq3"], settings) == pytest.approx(cache.nbytes, rel=0.005)


def test_the_caches_arguments_change_its_own_preset_only():
    changes = dict(key="nc4", value="uniform3", center=False, smooth=0.0)
    cache = TurboQuantCache(config(), "tq3", **changes, **MIXED)
    own = resolve_preset("tq3", **changes)
    assert cache.preset == own and (own.key.name, own.value.name, own.smooth) == ("nc4", "uniform3", 0.0)
    expected = [own if name == "tq3" else PRESETS[name] for name in STORED_AS]
    assert [layer.storage.preset for layer in cache.layers] == expected


def test_layers_left_in_the_models_dtype_beside_others():
    cache = filled(TurboQuantCache(config(), "tq4", skip_layers=(0, 1), layer_presets={1: "tq2"}), 300)
    exact = filled(DynamicCache(config=config()), 300)
    assert torch.equal(cache.layers[0].keys, exact.layers[0].keys)
    assert [layer.storage.packed_length for layer in cache.layers] == [0, *[128] * 5]
    assert [layer.stored for layer in cache.report().layers][:3] == [
        *("float32 (index in skip_layers)", "K tq2, V tq2 (layer_presets)", "K tq4, V tq4")
    ]


@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3_next", "falcon_h1", "deepseek_v3"])
def test_hybrids_from_packed_bits_and_dequantised(model_type):
    """Windows and recurrent states stay transformers' own; both attentions see the same keys and values.

    No keys are smoothed, since by queries only one of the two does that.
    """
    model, own = build(model_type, "turboquant"), build(model_type)
    kinds = [plan.kind for plan in TurboQuantCache(model.config).plans]
    packable = [n for n, plan in enumerate(TurboQuantCache(model.config).plans) if plan.packed]
    options = dict(
        residual_length=0, smooth=0.0, layer_presets={packable[0]: "fp8_e4m3", packable[-1] - len(kinds): "k8v4"}
    )
    logits, ids = [], prompt(model, 200)["input_ids"]
    for each in (model, own):
        cache = TurboQuantCache(each.config, "tq4", **options)
        with torch.no_grad():
            each(ids, past_key_values=cache)
            logits.append(each(ids[:, :1], past_key_values=cache).logits)
    names = {plan.index: plan.preset.name for plan in cache.plans if plan.packed}
    assert names == dict.fromkeys(packable, "tq4") | {packable[0]: "fp8_e4m3", packable[-1]: "k8v4"}
    assert all(cache.layers[n].storage.packed_length == 192 for n in packable)
    assert (logits[0] - logits[1]).norm() < 1e-3 * logits[1].norm()


def test_a_whole_model_with_mixed_presets(embedded):
    """It answers, and lies between its best and its worst preset."""
    model, tokenizer = embedded
    layers = model.config.num_hidden_layers
    case = demo_case(tokenizer, 400)
    half = dict(layer_presets={n: "fp8_e4m3" for n in range(0, layers, 2)})
    options = dict(residual_length=0)
    cache = make_cache(model, "tq3", **half, **options)
    assert case.matches(generate(model, tokenizer, case.prompt, cache, 20).text)
    ids = torch.tensor(encode(tokenizer, case.prompt))

    def log_probs(preset, **arguments):
        cache = make_cache(model, preset, **arguments)
        prefill(model, ids[None, :256], cache, None)
        return torch.cat(list(decode(model, ids[None], 256, 16, cache)), dim=1).log_softmax(-1)

    exact = log_probs(None)
    runs = [log_probs("fp8_e4m3", **options), log_probs("tq3", **half, **options), log_probs("tq3", **options)]
    kl = [(exact.exp() * (exact - run)).sum(-1).mean().item() for run in runs]
    assert 0 < kl[0] < kl[1] < kl[2]


@pytest.mark.parametrize("max_cache_len", [None, 256])
@pytest.mark.parametrize("name", ["gpt_oss", "gemma3_text"])
def test_dtype_may_not_change(name, max_cache_len):
    """Nor in sliding layers, transformers' own: they would take another, and let a later layer refuse it."""
    model = build(name, "turboquant")
    cache, ids = TurboQuantCache(model.config, max_cache_len=max_cache_len), prompt(model, 40)["input_ids"]
    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache)
        untouched = copy.deepcopy(cache)
        with pytest.raises(ValueError, match="expected keys in torch.float32, as this cache holds, got torch.float16"):
            copy.deepcopy(model).half()(ids[:, 30:31], past_key_values=cache)
        for x in (ids[:, 30:31], ids[:, 31:]):
            expected = model(x, past_key_values=untouched).logits
            assert torch.equal(model(x, past_key_values=cache).logits, expected)
