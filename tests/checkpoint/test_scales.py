"""Scales of float8 keys and values: from the checkpoint's tensors, from the user, from the first tokens."""

import copy

import pytest
import torch
from checkpoints import CHECKPOINTS
from float8_checkpoints import (
    ALL,
    FLOAT8_TYPES,
    HEADS,
    cast,
    codes,
    every_checkpoint,
    every_float8,
    filled,
    kv_checkpoint,
    pairs,
    plain_config,
    write_checkpoint,
    write_tensors,
)

from tq_cache import TurboQuantCache
from tq_cache.checkpoint import scales
from tq_cache.checkpoint.declaration import scale_tensors
from tq_cache.planning.geometry import load_config

# ------------------------------------------------------------------------------------------- scales of checkpoints


@every_checkpoint
@pytest.mark.parametrize("shards", [1, 3])
def test_scales_of_every_format_are_those_of_its_files(checkpoint, shards, tmp_path):
    config = load_config(write_checkpoint(tmp_path / "checkpoint", checkpoint, shards=shards))
    cache = TurboQuantCache(config, "fp8_e4m3", **ALL)
    if not checkpoint.has_fp8_scales:
        assert not any(scales.given for scales in cache.scales.values())
        return
    x = filled(cache)
    of_values = 64 if checkpoint.scales[0].endswith("kv_scale") else 128
    for n, layer in enumerate(cache.layers):
        for states, given, scale in (
            (layer.storage.key, x[n, 0], (n + 1) / 64),
            (layer.storage.value, x[n, 1], (n + 1) / of_values),
        ):
            assert torch.equal(states.calibration.scale, torch.full((2, HEADS, 1, 1), scale))
            assert torch.equal(codes(states, 128), cast(given, scale, torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.{}.self_attn.{}_scale",
        "model.layers.{}.self_attn.attn.{}_scale",
        "model.layers.{}.self_attn.{}_proj.{}_scale",
        "model.layers.{}.self_attn.qkv_proj.{}_scale",
        "model.layers.{}.self_attn.{}_proj.output_scale",
        "model.language_model.layers.{}.self_attn.{}_scale",
        "backbone.layers.{}.mixer.{}_proj.{}_scale",
        "transformer.h.{}.attn.{}_scale",
    ],
)
def test_names_of_scales(name, tmp_path):
    others = [
        "model.layers.0.self_attn.k_proj.weight_scale",
        "model.layers.0.self_attn.k_proj.input_scale",
        "model.layers.0.self_attn.q_scale",
        "model.layers.0.self_attn.q_proj.output_scale",
        "model.layers.0.mlp.down_proj.output_scale",
        "model.vision_tower.layers.0.self_attn.k_scale",
        "visual.blocks.0.attn.v_scale",
        "mtp.layers.0.self_attn.k_scale",
    ]
    tensors = {name.format(0, letter, letter): torch.ones(1) for letter in "kv"}
    write_tensors(tmp_path, tensors | {other: torch.ones(1) for other in others})
    found = scale_tensors(tmp_path)
    assert {key: tensor.name for key, tensor in found.items()} == {
        ("key", 0): name.format(0, "k", "k"),
        ("value", 0): name.format(0, "v", "v"),
    }


def test_separate_scales_win_over_a_common_one(tmp_path):
    write_tensors(tmp_path, {f"model.layers.0.self_attn.{name}_scale": torch.ones(1) for name in ("kv", "k")})
    found = scale_tensors(tmp_path)
    assert found["key", 0].name.endswith("k_scale") and not found["key", 0].name.endswith("kv_scale")
    assert found["value", 0].name.endswith("kv_scale")


def test_two_tensors_that_could_be_meant(tmp_path):
    more = {"model.layers.1.self_attn.k_proj.output_scale": torch.ones(1)}
    config = kv_checkpoint(tmp_path / "checkpoint", pairs() | more)
    with pytest.raises(ValueError, match=r"expected one tensor of key scales for layer 1, got .*pass k_scale="):
        TurboQuantCache(config, "fp8_e4m3", **ALL)


@pytest.mark.parametrize("shape", [(HEADS,), (HEADS, 1, 1)])
def test_scales_per_head(shape, tmp_path):
    scale = torch.tensor([0.25, 0.03125]).view(shape)
    config = kv_checkpoint(tmp_path / "checkpoint", {name: scale for name in pairs()})
    cache = TurboQuantCache(config, "fp8_e4m3", **ALL)
    x = filled(cache)
    assert "one per KV head" in str(cache.report())
    for n, layer in enumerate(cache.layers):
        expected = cast(x[n, 0], scale.view(1, HEADS, 1, 1), torch.float8_e4m3fn)
        assert torch.equal(codes(layer.storage.key, 128), expected.view(torch.uint8))


def test_only_scales_of_packed_layers_are_read(tmp_path, monkeypatch):
    config = kv_checkpoint(tmp_path / "checkpoint", pairs() | {"model.norm.weight": torch.zeros(64)}, shards=4)
    read = []
    plain_open = scales.safe_open

    class Recorder:
        def __init__(self, file, **kwargs):
            self.opened = plain_open(file, **kwargs)

        def __enter__(self):
            self.opened.__enter__()
            return self

        def __exit__(self, *args):
            self.opened.__exit__(*args)

        def get_tensor(self, name):
            read.append(name)
            return self.opened.get_tensor(name)

    monkeypatch.setattr(scales, "safe_open", Recorder)
    TurboQuantCache(config, "fp8_e4m3", skip_layers=(0, 1, 4, 5))
    assert sorted(read) == sorted(f"model.layers.{n}.self_attn.{letter}_scale" for n in (2, 3) for letter in "kv")
    read.clear()
    TurboQuantCache(config, "k8v4", skip_layers=(0, 1, 4, 5))
    TurboQuantCache(config, "4bit_nc", skip_layers=(0, 1, 4, 5))
    assert sorted(read) == [f"model.layers.{n}.self_attn.k_scale" for n in (2, 3)]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none(bad, tmp_path):
    name = "model.layers.3.self_attn.v_scale"
    config = kv_checkpoint(tmp_path / "checkpoint", pairs() | {name: torch.tensor([bad])})
    with pytest.raises(
        ValueError, match=f"expected scales that are positive and finite, got .* as {name} in .*safetens"
    ):
        TurboQuantCache(config, "fp8_e4m3")
    assert TurboQuantCache(config, "k8v4").scales["key"].source == "checkpoint"  # its values take none
    for given in (bad, torch.tensor(bad), [1.0, 1.0, bad, 1.0, 1.0, 1.0]):
        with pytest.raises(ValueError, match=r"expected scales that are positive and finite, got .* as k_scale"):
            TurboQuantCache(config, "fp8_e4m3", k_scale=given)


def test_scales_that_are_declared_and_not_there(tmp_path):
    config = kv_checkpoint(tmp_path / "checkpoint", pairs(layers=3))
    message = (
        r"expected a k_scale for every packed layer \(.*kv_cache_scheme.*got none for layers \[3, 4, 5\].*pass k_scale="
    )
    with pytest.raises(ValueError, match=message):
        TurboQuantCache(config, "fp8_e4m3")
    (tmp_path / "checkpoint" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"got none for layers \[0, 1, 2, 3, 4, 5\]"):
        TurboQuantCache(config, "fp8_e4m3")
    config.name_or_path = "somewhere/else"
    message = r"kv_cache_scheme.*got no files to read them from; set config.name_or_path .* or pass k_scale= \(1.0"
    with pytest.raises(ValueError, match=message):
        TurboQuantCache(config, "fp8_e4m3")
    given = TurboQuantCache(config, "fp8_e4m3", k_scale=1.0, v_scale=2.0).scales
    assert [scales.source for scales in given.values()] == ["user", "user"]


def test_a_shard_that_is_gone(tmp_path):
    config = kv_checkpoint(tmp_path / "checkpoint", pairs(), shards=2)
    (tmp_path / "checkpoint" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="expected the KV scales of this checkpoint in .*00002-of-00002"):
        TurboQuantCache(config, "fp8_e4m3")


def test_scales_of_too_many_heads(tmp_path):
    config = kv_checkpoint(tmp_path / "checkpoint", {name: torch.ones(3) for name in pairs()})
    with pytest.raises(ValueError, match=r"expected 1 or 2 scales of keys \(KV heads of the model\), got 3"):
        TurboQuantCache(config, "fp8_e4m3", **ALL)


# --------------------------------------------------------------------------------------- scales of the user, none


@every_float8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.0137, torch.tensor(0.5), torch.tensor([0.02, 0.3])], ids=str)
def test_round_trip_is_torchs(preset, dtype, scale):
    """With a given scale, bytes and what is read back are those of torch's own float8, whatever the model's dtype."""
    cache = TurboQuantCache(plain_config(), preset, k_scale=scale, v_scale=scale, **ALL)
    x = filled(cache, dtype=dtype)
    factor = torch.as_tensor(scale, dtype=torch.float32).view(1, -1, 1, 1)
    for n, layer in enumerate(cache.layers):
        for states, given, read in zip(
            (layer.storage.key, layer.storage.value), x[n], (layer.keys, layer.values), strict=True
        ):
            expected = cast(given, factor, FLOAT8_TYPES[preset])
            assert torch.equal(codes(states, 128), expected.view(torch.uint8))
            assert torch.equal(read, (expected.float() * factor).to(dtype))


def test_the_users_scale_wins(tmp_path):
    config = kv_checkpoint(tmp_path / "checkpoint", pairs(0.5))
    cache = TurboQuantCache(config, "fp8_e4m3", k_scale=0.125, **ALL)
    assert [scales.source for scales in cache.scales.values()] == ["user", "checkpoint"]
    filled(cache)
    assert (cache.layers[3].storage.key.calibration.scale == 0.125).all()
    assert (cache.layers[3].storage.value.calibration.scale == 0.5).all()
    cache.reset()
    filled(cache, tokens=64)
    assert (copy.deepcopy(cache).layers[3].storage.key.calibration.scale == 0.125).all()


def test_a_scale_per_layer():
    per_layer = [None, 0.5, torch.tensor([1.0, 2.0]), 4.0, 8.0, None]
    edge = dict(skip_layers="boundary", boundary_layers=1)
    cache = TurboQuantCache(plain_config(), "fp8_e4m3", v_scale=per_layer, **edge, **ALL)
    filled(cache)
    for n in range(1, 5):
        held = cache.layers[n].storage.value.calibration.scale
        assert torch.equal(held, torch.as_tensor(per_layer[n]).view(1, -1, 1, 1).expand(2, HEADS, 1, 1))
    with pytest.raises(ValueError, match=r"expected a scale for every packed layer, got none as v_scale\[0\]"):
        TurboQuantCache(plain_config(), "fp8_e4m3", v_scale=per_layer, **ALL)
    with pytest.raises(ValueError, match="expected k_scale for 6 layers, got 5"):
        TurboQuantCache(plain_config(), "fp8_e4m3", k_scale=[1.0] * 5)


@pytest.mark.parametrize(("preset", "argument"), [("4bit_nc", "k_scale"), ("k8v4", "v_scale")])
def test_formats_that_take_no_scale(preset, argument):
    with pytest.raises(ValueError, match=f"expected no {argument} for .*s in .*, got one"):
        TurboQuantCache(plain_config(), preset, **{argument: 1.0})


@every_float8
def test_without_a_scale_the_first_tokens_say_it(preset):
    """A power of two per sequence and KV head that leaves the first tokens a headroom of 64 to 128."""
    cache = TurboQuantCache(plain_config(), preset, **ALL)
    x = filled(cache)
    for n, layer in enumerate(cache.layers):
        scale = layer.storage.key.calibration.scale
        assert scale.shape == (2, HEADS, 1, 1) and torch.equal(torch.exp2(torch.log2(scale).round()), scale)
        headroom = torch.finfo(FLOAT8_TYPES[preset]).max * scale / x[n, 0].float().abs().amax((2, 3), keepdim=True)
        assert (headroom >= 64).all() and (headroom <= 128).all()


# ------------------------------------------------------------------------------------- float8 in some layers only


@pytest.mark.parametrize("shards", [1, 3])
def test_float8_layers_among_others_get_the_checkpoints_scales(shards, tmp_path):
    """In layer n, (n + 1) / 64 for keys and half of that for values; the other layers get none."""
    row = next(row for row in CHECKPOINTS if row.name == "compressed-tensors fp8 + KV")
    config = load_config(write_checkpoint(tmp_path / "checkpoint", row, shards=shards))
    mixed = dict(layer_presets={1: "fp8_e4m3", -2: "k8v4"}, skip_layers="boundary", boundary_layers=1)
    cache = TurboQuantCache(config, "tq4", skip_format="fp8_e4m3", **mixed, **ALL)
    assert {role: sorted(own.given) for role, own in cache.scales.items()} == {"key": [0, 1, 4, 5], "value": [0, 1, 5]}
    assert {own.source for own in cache.scales.values()} == {"checkpoint"}
    x = filled(cache)
    for n, layer in enumerate(cache.layers):
        key, value = layer.storage.key, layer.storage.value
        assert key.packed.shape[2] == value.packed.shape[2] == 2
        if n in (2, 3):
            assert key.calibration.scale is None and value.calibration.scale is None
            continue
        assert (key.calibration.scale == (n + 1) / 64).all()
        if n != 4:
            assert (value.calibration.scale == (n + 1) / 128).all()
            expected = cast(x[n, 1], (n + 1) / 128, torch.float8_e4m3fn)
            assert torch.equal(codes(value, 128), expected.view(torch.uint8))
    report = " ".join(str(cache.report()).split())
    assert "scales of fp8_e4m3 keys: checkpoint (model.layers.0.self_attn.k_scale" in report


def test_a_layer_in_a_format_that_the_scales_do_not_fit(tmp_path):
    config = kv_checkpoint(tmp_path / "checkpoint", pairs())
    with pytest.raises(ValueError, match="ships fp8 KV scales .*got 'fp8_e5m2'; use 'fp8_e4m3'"):
        TurboQuantCache(config, "tq4", layer_presets={3: "fp8_e5m2"})
    with pytest.raises(ValueError, match="ships fp8 KV scales"):
        TurboQuantCache(config, "fp8_e4m3", skip_layers=0, skip_format="fp8_e5m2")
    TurboQuantCache(config, "fp8_e5m2", layer_presets=dict.fromkeys(range(6), "tq4"))  # no layer is


def test_only_scales_that_a_layer_takes_must_be_there(tmp_path):
    config = kv_checkpoint(tmp_path / "checkpoint", pairs(layers=3))
    assert sorted(TurboQuantCache(config, "tq4", layer_presets={2: "fp8_e4m3"}).scales["value"].given) == [2]
    with pytest.raises(ValueError, match=r"got none for layers \[3\]"):
        TurboQuantCache(config, "tq4", layer_presets={3: "fp8_e4m3", 0: "k8v4"})


def test_given_scales_are_for_float8_layers():
    mixed = dict(layer_presets={1: "fp8_e4m3", 2: "k8v4"}, **ALL)
    cache = TurboQuantCache(plain_config(), "tq4", k_scale=0.25, v_scale=[None, 0.5, *[None] * 4], **mixed)
    filled(cache)
    scales = {n: (layer.storage.key.calibration.scale, layer.storage.value.calibration.scale) for n, layer in
              enumerate(cache.layers)}  # fmt: skip
    assert (scales[1][0] == 0.25).all() and (scales[2][0] == 0.25).all() and (scales[1][1] == 0.5).all()
    assert scales[2][1] is None and all(scales[n] == (None, None) for n in (0, 3, 4, 5))
    with pytest.raises(ValueError, match=r"expected a scale for every packed layer, got none as v_scale\[1\]"):
        TurboQuantCache(plain_config(), "tq4", v_scale=[0.5, *[None] * 5], **mixed)
    with pytest.raises(ValueError, match="expected no k_scale for keys in nc3, tq4, got one; only float8 formats"):
        TurboQuantCache(plain_config(), "tq4", k_scale=1.0, layer_presets={0: "3bit_nc"})


def test_scales_per_token_beside_scales_per_head():
    """The kernels' door is shut only for the layers that need it."""
    presets = dict(key="fp8_e4m3_token", layer_presets={0: "fp8_e4m3"})
    cache = TurboQuantCache(plain_config(), "tq4", **presets, k_scale=0.5)
    assert [layer.storage.backend for layer in cache.layers] == ["auto", *["reference"] * 5]
    assert str(cache.scales["key"]) == "scales of fp8_e4m3 keys: user (k_scale=)"
    assert sorted(cache.scales["key"].given) == [0]
