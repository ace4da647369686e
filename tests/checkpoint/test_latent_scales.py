"""Float8 scales where latents are cached (MLA): one for both uses of a latent, and for a float8 rotary key."""

import json

import pytest
import torch
from architectures import config_for
from float8_checkpoints import ALL, FLOAT8_TYPES, cast, codes, every_float8, write_tensors

from tq_cache import TurboQuantCache
from tq_cache.planning.geometry import load_config

LAYERS = 4
NAMES = ["self_attn.{}_scale", "self_attn.{}_proj.{}_scale", "self_attn.mla_attn.mla_attn.{}_scale"]


def checkpoint(folder, tensors, declared: bool = True):
    """A tiny DeepSeek-V3's folder with these tensors, beside weights; compressed-tensors says that there are scales."""
    config_for("deepseek_v3").save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    if declared:
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
        content["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
        (folder / "config.json").write_text(json.dumps(content))
    write_tensors(folder, tensors | {"model.layers.0.self_attn.kv_b_proj.weight_scale": torch.ones(1)})
    return load_config(folder)


def shipped(name: str, letters: str = "k", value: float = 1 / 64) -> dict[str, torch.Tensor]:
    """In layer n, (n + 1) times a value."""
    return {
        f"model.layers.{n}.{name.format(letter, letter)}": torch.tensor([(n + 1) * value])
        for n in range(LAYERS)
        for letter in letters
    }


def filled(cache) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    pairs = [[torch.randn(2, 1, 128, dim, generator=generator) for dim in (64, 32)] for _ in range(LAYERS)]
    for index, pair in enumerate(pairs):
        cache.update(*pair, index)
    return pairs


def check_codes(cache, scales: list[float], rotary: str | None = None, preset: str = "fp8_e4m3") -> None:
    for layer, pair, scale in zip(cache.layers, filled(cache), scales, strict=True):
        sides = [(layer.storage.key, preset)] + ([] if rotary is None else [(layer.storage.value, rotary)])
        for (states, fmt), x in zip(sides, pair, strict=False):
            assert torch.equal(states.calibration.scale, torch.full((2, 1, 1, 1), scale))
            assert torch.equal(codes(states, 128), cast(x, scale, FLOAT8_TYPES[fmt]).view(torch.uint8))
        assert rotary is not None or layer.storage.value.calibration.scale is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("letters", ("k", "kv"))
@pytest.mark.parametrize("declared", (True, False))
@pytest.mark.parametrize("rotary", ("exact", "fp8_e4m3"))
def test_a_checkpoints_scale_is_of_latents_and_of_rotary_keys(name, letters, declared, rotary, tmp_path):
    config = checkpoint(tmp_path, shipped(name, letters), declared)
    cache = TurboQuantCache(config, "fp8_e4m3", rotary=rotary, **ALL)
    assert {scales.source for scales in cache.scales.values()} == {"checkpoint"}
    check_codes(cache, [(n + 1) / 64 for n in range(LAYERS)], None if rotary == "exact" else rotary)
    report = " ".join(str(cache.report()).split())
    assert "scales of fp8_e4m3 keys: checkpoint (model.layers.0." in report
    assert ("scales of fp8_e4m3 rotary keys: checkpoint" in report) == (rotary != "exact")


def test_a_common_scale(tmp_path):
    cache = TurboQuantCache(checkpoint(tmp_path, shipped("self_attn.kv_scale")), "fp8_e4m3", **ALL)
    check_codes(cache, [(n + 1) / 64 for n in range(LAYERS)])


def test_scales_of_values_that_are_others(tmp_path):
    """A latent is both; whoever wants one of them says so."""
    tensors = shipped(NAMES[0]) | shipped(NAMES[0], "v", 1 / 128)
    config = checkpoint(tmp_path, tensors)
    message = (
        r"expected model.layers.0.self_attn.v_scale to be model.layers.0.self_attn.k_scale, since latents are keys and "
        r"values at once, got \[0.0078125\] and \[0.015625\] in .*; pass k_scale="
    )
    for arguments in ({}, {"key": "tq4", "rotary": "fp8_e4m3"}):
        with pytest.raises(ValueError, match=message):
            TurboQuantCache(config, "fp8_e4m3", **arguments)
    assert TurboQuantCache(config, "tq4").scales == {}  # nothing is float8
    cache = TurboQuantCache(config, "fp8_e4m3", k_scale=0.5, rotary="fp8_e4m3", **ALL)
    check_codes(cache, [0.5] * LAYERS, "fp8_e4m3")


def test_formats_that_a_checkpoints_scales_do_not_fit(tmp_path):
    config = checkpoint(tmp_path, shipped(NAMES[0]))
    for arguments in ({"preset": "fp8_e5m2"}, {"preset": "tq4", "rotary": "fp8_e5m2"}):
        with pytest.raises(
            ValueError, match="expected e4m3 for float8 keys and values, since this checkpoint ships fp8"
        ):
            TurboQuantCache(config, **arguments)
    cache = TurboQuantCache(config, "tq4", rotary="fp8_e4m3", **ALL)
    assert list(cache.scales) == ["rotary"] and sorted(cache.scales["rotary"].given) == list(range(LAYERS))


def test_a_checkpoint_without_scales_of_keys(tmp_path):
    config = checkpoint(tmp_path, shipped(NAMES[0], "v"))
    with pytest.raises(
        ValueError, match=r"expected a k_scale for every packed layer .*got none for layers \[0, 1, 2, 3\]"
    ):
        TurboQuantCache(config, "fp8_e4m3")


@every_float8
@pytest.mark.parametrize("rotary", FLOAT8_TYPES)
@pytest.mark.parametrize("values", (None, 0.25, [None, 0.25, None, torch.tensor(0.25)]), ids=str)
def test_the_users_scale(preset, rotary, values):
    cache = TurboQuantCache(config_for("deepseek_v3"), preset, rotary=rotary, k_scale=0.25, v_scale=values, **ALL)
    assert [(role, scales.source) for role, scales in cache.scales.items()] == [("key", "user"), ("rotary", "user")]
    check_codes(cache, [0.25] * LAYERS, rotary, preset)


@pytest.mark.parametrize(("keys", "values"), [
    (0.25, 0.5), (None, 0.25), ([0.25] * LAYERS, [0.25, 0.25, 0.5, 0.25]), (0.25, torch.tensor([0.25, 0.25])),
])  # fmt: skip
def test_a_scale_of_values_that_is_another(keys, values):
    with pytest.raises(ValueError, match="expected a v_scale that is k_scale, or none, for layer .*leave v_scale out"):
        TurboQuantCache(config_for("deepseek_v3"), "fp8_e4m3", k_scale=keys, v_scale=values)


def test_scales_that_nothing_takes():
    config = config_for("deepseek_v3")
    with pytest.raises(ValueError, match="expected no k_scale for keys in tq4 and rotary keys in int8, got one"):
        TurboQuantCache(config, "tq4", rotary="int8", k_scale=1.0)
    cache = TurboQuantCache(config, "tq4", rotary="fp8_e5m2", k_scale=0.5, **ALL)
    assert list(cache.scales) == ["rotary"]
    with pytest.raises(ValueError, match="expected v_scale for 4 layers, got 3"):
        TurboQuantCache(config, "fp8_e4m3", k_scale=1.0, v_scale=[1.0] * 3)


def test_without_a_scale_the_first_tokens_say_it():
    cache = TurboQuantCache(config_for("deepseek_v3"), "fp8_e4m3", rotary="fp8_e5m2", **ALL)
    for layer, pair in zip(cache.layers, filled(cache), strict=True):
        for states, x, limit in zip((layer.storage.key, layer.storage.value), pair, (448, 57344), strict=True):
            headroom = limit * states.calibration.scale / x.abs().amax((2, 3), keepdim=True)
            assert (headroom >= 64).all() and (headroom <= 128).all()
