"""What a checkpoint says about its KV cache, and which presets that refuses."""

import json

import pytest
from checkpoints import CHECKPOINTS, FLOAT8
from float8_checkpoints import (
    ALL,
    every_checkpoint,
    kv_checkpoint,
    pairs,
    plain_config,
    write_checkpoint,
    write_tensors,
)

from tq_cache import PRESETS, TurboQuantCache
from tq_cache.backends import hardware
from tq_cache.backends.hardware import ARCHITECTURES
from tq_cache.checkpoint.declaration import find_folder, read_declaration
from tq_cache.planning.geometry import load_config

# --------------------------------------------------------------------------------------------- what is declared


@every_checkpoint
def test_declaration(checkpoint, tmp_path):
    """The same from the config in memory, from the folder alone, and when transformers dropped the field."""
    folder = write_checkpoint(tmp_path / "checkpoint", checkpoint)
    loaded, bare = load_config(folder), plain_config()
    assert find_folder(loaded) == folder
    for config in (loaded, bare):
        declaration = read_declaration(config, folder)
        assert declaration.method == checkpoint.method
        assert declaration.has_fp8_scales == checkpoint.has_fp8_scales
        assert checkpoint.field in declaration.field and bool(checkpoint.field) == bool(declaration.field)
    if "quantization_config" in checkpoint.field:
        assert read_declaration(loaded, None).has_fp8_scales == checkpoint.has_fp8_scales
    assert not read_declaration(bare, None).has_fp8_scales


def test_a_quantisation_config_may_be_an_object_or_lie_in_text_config(tmp_path):
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": FLOAT8}

    class Held:
        def to_dict(self):
            return scheme

    assert read_declaration(plain_config(quantization_config=Held()), None).has_fp8_scales
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": scheme}}))
    declaration = read_declaration(plain_config(), tmp_path)
    assert declaration.has_fp8_scales
    assert declaration.field == f"text_config.quantization_config.kv_cache_scheme in {tmp_path / 'config.json'}"


@pytest.mark.parametrize("name", ["compressed-tensors W4A16", "compressed-tensors fp8, null", "ModelOpt fp8", "AWQ"])
def test_no_field_means_no_scales_whatever_tensors_there_are(name, tmp_path):
    row = next(row for row in CHECKPOINTS if row.name == name)
    config = load_config(write_checkpoint(tmp_path / "checkpoint", row))
    write_tensors(tmp_path / "checkpoint", pairs())
    assert not read_declaration(config, find_folder(config)).has_fp8_scales
    assert TurboQuantCache(config, "fp8_e5m2").scales["key"].source == "computed"


def test_declaration_of_a_broken_file(tmp_path):
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(ValueError, match="expected JSON, got .*hf_quant_config.json"):
        read_declaration(plain_config(), tmp_path)


def test_folder_of_a_cached_hub_snapshot(tmp_path, monkeypatch):
    """The snapshot that the hub's cache holds; nothing is asked of the network."""
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    kv_checkpoint(snapshot, pairs(0.25))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = plain_config()
    config.name_or_path = "some/model"
    assert find_folder(config) == snapshot
    assert TurboQuantCache(config, "fp8_e4m3", **ALL).scales["key"].source == "checkpoint"
    for name in ("some/other", "/gone/far/away", ""):
        config.name_or_path = name
        assert find_folder(config) is None


# ----------------------------------------------------------------- checkpoint x preset x architecture: the rule


@every_checkpoint
def test_what_is_refused_depends_on_checkpoint_and_preset_alone(checkpoint, tmp_path, monkeypatch):
    """On every architecture: e5m2 where the checkpoint ships fp8 KV scales is refused, all else is accepted."""
    config = load_config(write_checkpoint(tmp_path / "checkpoint", checkpoint))
    for row in ARCHITECTURES.values():
        monkeypatch.setattr(hardware, "detect", lambda device, row=row: row)
        for preset in PRESETS.values():
            if checkpoint.has_fp8_scales and preset.name == "fp8_e5m2":
                with pytest.raises(ValueError, match="ships fp8 KV scales .*got 'fp8_e5m2'; use 'fp8_e4m3'") as refused:
                    TurboQuantCache(config, preset.name)
                assert checkpoint.field in str(refused.value)
                continue
            used = TurboQuantCache(config, preset.name).scales
            expected = "checkpoint" if checkpoint.has_fp8_scales else "computed"
            float8 = {"key": preset.key.float8, "value": preset.value.float8}
            assert {role: scales.source for role, scales in used.items()} == {
                role: expected for role, dtype in float8.items() if dtype is not None
            }


@pytest.mark.parametrize("formats", [{"key": "fp8_e5m2"}, {"value": "fp8_e5m2"}, {"value": "fp8_e5m2_token"}])
def test_formats_are_refused_as_presets_are(formats, tmp_path):
    config = kv_checkpoint(tmp_path / "checkpoint", pairs())
    name = next(iter(formats.values()))
    with pytest.raises(ValueError, match=f"ships fp8 KV scales .*kv_cache_scheme.*{name}'; use 'fp8_e4m3'"):
        TurboQuantCache(config, "4bit_nc", **formats)
    with pytest.raises(ValueError, match="ships fp8 KV scales"):  # also with scales of the user's
        TurboQuantCache(config, "fp8_e5m2", k_scale=1.0, v_scale=1.0)


def test_every_architecture_reads_what_the_cache_stores():
    """OCP bytes: multiplied as they are only where that is what tensor cores take, else converted; FNUZ never."""
    for row in ARCHITECTURES.values():
        if row.decode_path == hardware.FP8_DOT:
            assert row.fp8_multiply == hardware.OCP, row.name
        else:
            assert row.decode_path in (hardware.FP16_DOT, hardware.FP16_FMA, hardware.REFERENCE), row.name
