"""`TurboQuantCache` of models that cache latents (MLA): arguments, what each layer holds, reports."""

import copy

import pytest
import torch
from architectures import ARCHITECTURES, build, config_for
from transformers import LlamaConfig

from tq_cache import TurboQuantCache
from tq_cache.formats.presets import FORMATS
from tq_cache.report import held_bytes

ROTARY = list(FORMATS["rotary"])


def deepseek(**arguments) -> TurboQuantCache:
    return TurboQuantCache(config_for("deepseek_v3"), **arguments)


def filled(cache: TurboQuantCache, tokens: int = 400) -> TurboQuantCache:
    generator = torch.Generator().manual_seed(0)
    for index in range(len(cache.layers)):
        cache.update(*(torch.randn(2, 1, tokens, dim, generator=generator) for dim in (64, 32)), index)
    return cache


@pytest.mark.parametrize("length", (None, 512))
def test_every_layer_holds_latents(length):
    cache = filled(
        deepseek(preset="k8v4", rotary="int8", skip_layers=0, layer_presets={-1: "tq3"}, max_cache_len=length)
    )
    assert [plan.latent for plan in cache.plans] == [True] * 4
    stored = [(layer.storage.preset.key.name, layer.storage.preset.value.name) for layer in cache.layers[1:]]
    assert stored == [("fp8_e4m3", "int8"), ("fp8_e4m3", "int8"), ("tq3", "int8")]
    assert all(layer.storage.preset.holds_latents for layer in cache.layers)
    assert [layer.storage.view().packed_length for layer in cache.layers] == [0, 256, 256, 256]
    twin = copy.deepcopy(cache)
    for layer, other in zip(cache.layers, twin.layers, strict=True):
        assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)


def test_rotary_keys_are_exact_unless_told():
    cache = filled(deepseek())
    generator = torch.Generator().manual_seed(0)
    for layer in cache.layers:
        _, rotary_keys = (torch.randn(2, 1, 400, dim, generator=generator) for dim in (64, 32))
        assert layer.storage.packed_length == 256 and torch.equal(layer.values, rotary_keys)


@pytest.mark.parametrize("absorb", (True, False))
def test_absorb_reaches_the_layers_that_hold_latents(absorb):
    assert [layer.absorbs for layer in deepseek(absorb=absorb, skip_layers=2).layers] == [absorb] * 4
    paths = [layer.path for layer in deepseek(absorb=absorb).report().layers]
    assert paths == ["" if absorb else "expanded: absorb=False"] * 4
    if "bailing_hybrid" in ARCHITECTURES:  # two layers with a state beside two with latents
        cache = TurboQuantCache(config_for("bailing_hybrid"), absorb=absorb)
        assert [getattr(layer, "absorbs", None) for layer in cache.layers] == [None, absorb] * 2
    llama = TurboQuantCache(LlamaConfig(hidden_size=128, num_attention_heads=4, num_hidden_layers=2), absorb=absorb)
    assert not any(layer.absorbs for layer in llama.layers)


@pytest.mark.parametrize("rotary", ROTARY)
def test_report_says_what_latents_and_rotary_keys_are_stored_as(rotary):
    cache = filled(deepseek(rotary=rotary, skip_layers="boundary", boundary_layers=1, layer_presets={1: "fp8_e5m2"}))
    cache.layers[2].path = "expanded: kv_b_proj is hooked"
    report = cache.report()
    exact = "float32 (boundary)"
    expected = [exact, f"latent fp8_e5m2, rotary {rotary} (layer_presets)", f"latent tq4, rotary {rotary}", exact]
    assert [layer.stored for layer in report.layers] == expected
    assert [layer.path for layer in report.layers] == ["", "", "expanded: kv_b_proj is hooked", ""]
    assert report.bytes_16bit == 4 * 2 * 400 * (64 + 32) * 2
    assert [layer.nbytes for layer in report.layers] == [held_bytes(layer) for layer in cache.layers]
    text = " ".join(str(report).split())
    assert " attention " in text and "kv_b_proj" in text
    cache.layers[2].path = ""
    text = str(cache.report())
    assert " attention " not in text.splitlines()[2] and f"{report.nbytes:,}" in text


@pytest.mark.parametrize("name", ("fp8_e4m3_token", "nc3", "tq2", "fp8_e5m2"))
def test_formats_of_keys_are_those_of_latents(name):
    cache = filled(deepseek(key=name, center="both"))
    for layer in cache.layers:
        assert layer.storage.key.format.name == name and layer.storage.packed_length == 256
        assert layer.storage.value.calibration.center is None
        assert layer.storage.backend == ("reference" if name.endswith("token") else "auto")


@pytest.mark.parametrize(
    ("model_type", "rotary"),
    [*(("deepseek_v3", rotary) for rotary in ROTARY), ("minicpm3", "int8"), ("kimi_linear", "fp8_e4m3")],
)
@pytest.mark.parametrize(("attention", "length"), [("sdpa", None), ("turboquant", None), ("turboquant", 512)])
def test_steps_of_a_model(model_type, rotary, attention, length):
    """Float8 latents and rotary keys of 8 bits or more: logits are near those of the exact cache."""
    model = build(model_type, attention)
    ids = torch.randint(3, 99, (2, 300), generator=torch.Generator().manual_seed(0))
    logits = []
    for cache in (None, TurboQuantCache(model.config, "fp8_e4m3", rotary=rotary, max_cache_len=length)):
        with torch.no_grad():
            out = model(ids[:, :-1], past_key_values=cache, use_cache=True)
            logits.append(model(ids[:, -1:], past_key_values=out.past_key_values).logits)
    assert (logits[0] - logits[1]).norm() < 0.2 * logits[0].norm()


# -------------------------------------------------------------------------------------------------------- bad input


def test_bad_arguments():
    with pytest.raises(ValueError, match="expected a rotary format of .*'exact'.*'int8'.*, got 'tq4'"):
        deepseek(rotary="tq4")
    with pytest.raises(ValueError, match="expected no format of values, since this model caches latents, .*got 'tq4'"):
        deepseek(value="tq4")
    with pytest.raises(ValueError, match="expected no format of rotary keys, .* got 'int8'; leave rotary out"):
        TurboQuantCache(LlamaConfig(), rotary="int8")
    with pytest.raises(ValueError, match="expected a rotary format"):
        TurboQuantCache(LlamaConfig(), rotary="int4")


@pytest.mark.parametrize("length", (None, 512))
def test_rotary_keys_of_a_width_that_cannot_be_packed_change_nothing(length):
    cache = deepseek(rotary="int8", max_cache_len=length)
    with pytest.raises(ValueError, match="expected a width of rotary keys in int8 .* got 24; use rotary='exact'"):
        cache.update(torch.randn(2, 1, 5, 64), torch.randn(2, 1, 5, 24), 0)
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
