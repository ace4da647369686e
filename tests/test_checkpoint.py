"""fp8 caches and checkpoints: what is declared, what is refused, whose scales are used, and what is then stored."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import CHECKPOINTS, FLOAT8, Checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedConfig
from typer.testing import CliRunner

from tq_cache import PRESETS, TurboQuantCache
from tq_cache.backends import hardware
from tq_cache.backends.hardware import ARCHITECTURES
from tq_cache.checkpoint import scales
from tq_cache.checkpoint.declaration import find_folder, read_declaration, scale_tensors
from tq_cache.formats import packing
from tq_cache.formats.packing import BLOCK_TOKENS
from tq_cache.formats.states import PackedStates
from tq_cache.planning.geometry import load_config
from tq_cache.tools.cli import app
from tq_cache.tools.evaluate import EvalSettings, evaluate
from tq_cache.tools.runs import EMBEDDED_MODEL, encode, generate, make_cache
from tq_cache.tools.tasks import heldout_text

LAYERS, HEADS, DIM = 6, 2, 32
FLOAT8_TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
ALL = {"residual_length": 0, "skip_layers": ()}  # every token of every layer packed
every_checkpoint = pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda row: row.name)
every_float8 = pytest.mark.parametrize("preset", FLOAT8_TYPES)


def plain_config(**changes) -> LlamaConfig:
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4)
    return LlamaConfig(**sizes, num_key_value_heads=HEADS, head_dim=DIM, **changes)


def write_checkpoint(folder: Path, checkpoint: Checkpoint, shards: int = 1) -> Path:
    """A folder with the configs and the scale tensors of a row: in layer n, (n + 1) / 64, for values half of that."""
    folder.mkdir(exist_ok=True)
    changes = {} if checkpoint.quantization is None else {"quantization_config": checkpoint.quantization}
    plain_config().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    if checkpoint.quant_file is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(checkpoint.quant_file))
    tensors = {
        f"model.layers.{layer}.{name}": torch.tensor([(layer + 1) / (128 if ".v_" in name else 64)])
        for layer in range(LAYERS)
        for name in checkpoint.scales
    }
    write_tensors(folder, tensors | {"model.embed_tokens.weight": torch.zeros(64, 64)}, shards)
    return folder


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def kv_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> PreTrainedConfig:
    """The config of a compressed-tensors checkpoint that declares fp8 KV scales and ships these tensors."""
    row = next(row for row in CHECKPOINTS if row.name == "compressed-tensors fp8 + KV")
    write_checkpoint(folder, row)
    write_tensors(folder, tensors, shards)
    return load_config(folder)


def pairs(value: float = 0.5, layers: int = LAYERS) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{n}.self_attn.{letter}_scale": torch.tensor([value]) for n in range(layers) for letter in "kv"
    }


def codes(states: PackedStates, tokens: int) -> torch.Tensor:
    """Stored bytes, uint8 [B, H, tokens, D]."""
    by_channel = states.role == "value"
    bytes_ = packing.unpack(states.packed, 8, BLOCK_TOKENS if by_channel else states.head_dim)
    return (bytes_.transpose(-1, -2) if by_channel else bytes_).flatten(2, 3)[:, :, :tokens]


def cast(x: torch.Tensor, scale: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """What torch makes of x / scale in a float8 dtype, saturating."""
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


def filled(cache: TurboQuantCache, tokens: int = 70, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Keys and values [layers, 2, B, H, tokens, D] that were put into a cache."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(cache.layers), 2, 2, HEADS, tokens, DIM, generator=generator).to(dtype)
    for layer_idx, (keys, values) in enumerate(x):
        cache.update(keys, values, layer_idx)
    return x


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
            assert torch.equal(codes(states, 70), cast(given, scale, torch.float8_e4m3fn).view(torch.uint8))


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
        assert torch.equal(codes(layer.storage.key, 70), expected.view(torch.uint8))


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
    message = r"expected a k_scale for every packed layer \(.*kv_cache_scheme.*got none for layers \[3\].*pass k_scale="
    with pytest.raises(ValueError, match=message):
        TurboQuantCache(config, "fp8_e4m3")
    (tmp_path / "checkpoint" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"got none for layers \[2, 3\]"):
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


def test_scales_of_too_many_heads_change_nothing(tmp_path):
    config = kv_checkpoint(tmp_path / "checkpoint", {name: torch.ones(3) for name in pairs()})
    cache = TurboQuantCache(config, "fp8_e4m3", **ALL)
    with pytest.raises(ValueError, match=r"expected a scale of keys with 1 or 2 elements \(KV heads\), got 3"):
        filled(cache)
    assert cache.get_seq_length() == 0 and cache.nbytes == 0


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
            assert torch.equal(codes(states, 70), expected.view(torch.uint8))
            assert torch.equal(read, (expected.float() * factor).to(dtype))


def test_the_users_scale_wins(tmp_path):
    config = kv_checkpoint(tmp_path / "checkpoint", pairs(0.5))
    cache = TurboQuantCache(config, "fp8_e4m3", k_scale=0.125, **ALL)
    assert [scales.source for scales in cache.scales.values()] == ["user", "checkpoint"]
    filled(cache)
    assert (cache.layers[3].storage.key.calibration.scale == 0.125).all()
    assert (cache.layers[3].storage.value.calibration.scale == 0.5).all()
    cache.reset()
    filled(cache, tokens=3)
    assert (copy.deepcopy(cache).layers[3].storage.key.calibration.scale == 0.125).all()


def test_a_scale_per_layer():
    per_layer = [None, 0.5, torch.tensor([1.0, 2.0]), 4.0, 8.0, None]
    cache = TurboQuantCache(plain_config(), "fp8_e4m3", v_scale=per_layer, residual_length=0, boundary_layers=1)
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
    """A power of two per sequence and KV head that leaves the first tokens a headroom of 4 to 8."""
    cache = TurboQuantCache(plain_config(), preset, **ALL)
    x = filled(cache)
    for n, layer in enumerate(cache.layers):
        scale = layer.storage.key.calibration.scale
        assert scale.shape == (2, HEADS, 1, 1) and torch.equal(torch.exp2(torch.log2(scale).round()), scale)
        headroom = torch.finfo(FLOAT8_TYPES[preset]).max * scale / x[n, 0].float().abs().amax((2, 3), keepdim=True)
        assert (headroom >= 4).all() and (headroom <= 8).all()


# ------------------------------------------------------------------------------------------------ formats and bytes


def test_bytes_are_ocp():
    """1.0 and -2.0 as OCP writes them; FNUZ' bytes for them would be 0x40 and 0xc8, or 0x40 and 0xc4."""
    for preset, expected in (("fp8_e4m3", [0x38, 0xC0]), ("fp8_e5m2", [0x3C, 0xC0])):
        cache = TurboQuantCache(plain_config(), preset, k_scale=1.0, v_scale=1.0, **ALL)
        x = torch.tensor([1.0, -2.0]).repeat(DIM // 2).expand(1, HEADS, 3, DIM)
        cache.update(x, x, 0)
        for states in (cache.layers[0].storage.key, cache.layers[0].storage.value):
            assert codes(states, 3)[0, 0, 0, :2].tolist() == expected


def test_no_format_is_read_as_another():
    """What is packed carries its format: neither the other role's nor a later preset's changes what is read."""
    formats = {"key": "fp8_e5m2", "value": "fp8_e4m3"}
    cache = TurboQuantCache(plain_config(), "fp8_e4m3", **formats, k_scale=0.25, v_scale=0.25, **ALL)
    x = filled(cache)
    cache.preset = PRESETS["fp8_e5m2"]
    for n, layer in enumerate(cache.layers):
        layer.storage.preset = PRESETS["fp8_e5m2"]
        for given, read, name in zip(x[n], (layer.keys, layer.values), formats.values(), strict=True):
            others = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, *FLOAT8_TYPES.values()]
            expected = cast(given, 0.25, FLOAT8_TYPES[name])
            assert torch.equal(read, (expected.float() * 0.25).to(read.dtype))
            for other in others:
                if other != FLOAT8_TYPES[name]:
                    assert not torch.equal(read, (expected.view(other).float() * 0.25).to(read.dtype))


@every_float8
def test_one_scale_per_token_and_head(preset):
    """Two bytes more per vector; every vector has the least power of two that holds it."""
    formats = {"key": f"{preset}_token", "value": f"{preset}_token"}
    cache = TurboQuantCache(plain_config(), preset, **formats, **ALL)
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-9, 9, (2, HEADS, 64, 1), generator=generator))
    x = (torch.randn(2, HEADS, 64, DIM, generator=generator) * sizes).to(torch.bfloat16)
    cache.update(x, x, 0)
    key = cache.layers[0].storage.key
    largest = x.float().abs().amax(-1) / torch.finfo(FLOAT8_TYPES[preset]).max
    assert key.calibration.scale is None and key.scale.dtype == torch.float16
    assert (key.scale >= largest).all() and (key.scale < 2 * largest).all()
    expected = cast(x, key.scale[..., None].float(), FLOAT8_TYPES[preset])
    assert torch.equal(codes(key, 64), expected.view(torch.uint8))
    assert torch.equal(cache.layers[0].keys, (expected.float() * key.scale[..., None]).to(x.dtype))
    packed = sum(part.nbytes for part in (key.packed, key.scale))
    assert packed == 2 * HEADS * 64 * (DIM + 2) == 2 * HEADS * 64 * cache.preset.key.token_bytes(DIM)
    assert {(scales.source, scales.reason) for scales in cache.scales.values()} == {
        ("computed", "the format takes one per token and KV head")
    }


def test_scales_per_token_have_no_kernels():
    with pytest.raises(NotImplementedError, match="the kernels have no float8 scales per token"):
        TurboQuantCache(plain_config(), "fp8_e4m3", key="fp8_e4m3_token", backend="triton")
    assert TurboQuantCache(plain_config(), key="fp8_e4m3_token", **ALL).layers[0].storage.backend == "reference"
    with pytest.raises(ValueError, match="expected no k_scale for keys in fp8_e4m3_token, got one"):
        TurboQuantCache(plain_config(), key="fp8_e4m3_token", k_scale=1.0)


# ----------------------------------------------------------------------------------------------------------- reports


def test_report_says_where_scales_come_from(tmp_path):
    config = kv_checkpoint(tmp_path / "checkpoint", pairs())
    report = " ".join(str(TurboQuantCache(config, "fp8_e4m3", v_scale=1.0).report()).split())
    assert "scales of fp8_e4m3 keys: checkpoint (model.layers.2.self_attn.k_scale, ..., one per layer; " in report
    assert "config.quantization_config.kv_cache_scheme: 8-bit float, static)" in report
    assert "scales of fp8_e4m3 values: user (v_scale=)" in report
    report = " ".join(str(TurboQuantCache(plain_config(), "k8v4").report()).split())
    assert "scales of fp8_e4m3 keys: computed (the checkpoint (not quantised) has no scales" in report
    assert "values:" not in report
    assert "scales" not in str(TurboQuantCache(plain_config(), "tq4").report())


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("AWQ", ["ships no fp8 KV scales", "quantised by awq", "fp8_e5m2 keys: computed", "fp8_e4m3 values: computed"]),
        (
            "ModelOpt fp8 + KV",
            [
                "ships fp8 KV scales (quantization.kv_cache_quant_algo",
                "fp8_e4m3 keys: checkpoint",
                "refused: expected e4m3",
            ],
        ),
        ("compressed-tensors int8 KV", ["ships no fp8 KV scales", "8-bit int, static", "fp8_e5m2 keys: computed"]),
    ],
)
def test_info_on_a_checkpoint(name, lines, tmp_path):
    row = next(row for row in CHECKPOINTS if row.name == name)
    folder = write_checkpoint(tmp_path / "checkpoint", row)
    result = CliRunner().invoke(app, ["info", "--model", str(folder)])
    assert result.exit_code == 0, result.output
    output = " ".join(result.output.replace("│", " ").split())
    assert "float8 scales: those of k_scale=, v_scale=; else those that the checkpoint ships" in output
    for line in lines:
        assert line in output


# ------------------------------------------------------------------------------------------------ the embedded model

SKIP = ("sliding_window",)


@pytest.fixture(scope="module")
def calibrated(embedded, tmp_path_factory):
    """The embedded model saved as compressed-tensors saves one with fp8 keys and values: largest element / 448.

    Its folder, and the model loaded from there.  transformers loads such a config only with the compressed-tensors
    package; so the weights, which are not quantised, are loaded with the config less its quantization_config, and the
    cache finds that in the folder's config.json.
    """
    model, tokenizer = embedded
    cache = make_cache(model, None)
    with torch.inference_mode():
        story = heldout_text(1024, lambda text: len(encode(tokenizer, text)), seed=100)
        model(torch.tensor([encode(tokenizer, story)]), past_key_values=cache)
    folder = tmp_path_factory.mktemp("calibrated")
    shutil.copytree(EMBEDDED_MODEL, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    for n, layer in enumerate(cache.layers):
        for letter, states in (("k", layer.keys), ("v", layer.values)):
            tensors[f"model.layers.{n}.self_attn.{letter}_scale"] = (
                (states.abs().max() / 448).to(torch.bfloat16).view(1)
            )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": FLOAT8,
    }
    (folder / "config.json").write_text(json.dumps(content))
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    return folder, AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def test_a_saved_checkpoint_generates_with_its_scales(calibrated, embedded):
    """Bytes are torch's cast of the exact keys and values by the very scales of the file, in every layer."""
    folder, model = calibrated
    tokenizer = embedded[1]
    prompt = "The secret code of Mira is 48213. It was cold.\n\nQuestion: What is the secret code of Mira?\nAnswer:"
    exact = make_cache(model, None)
    ids = torch.tensor([encode(tokenizer, prompt)])
    with torch.inference_mode():
        model(ids, past_key_values=exact)
    cache = make_cache(model, "fp8_e4m3", residual_length=0, skip_layers=SKIP)
    run = generate(model, tokenizer, prompt, cache, 6)
    assert run.text.strip().startswith("48213")
    shipped = load_file(folder / "model.safetensors")
    for n, layer in enumerate(cache.layers):
        for letter, states, given in (
            ("k", layer.storage.key, exact.layers[n].keys),
            ("v", layer.storage.value, exact.layers[n].values),
        ):
            scale = shipped[f"model.layers.{n}.self_attn.{letter}_scale"].float()
            assert (states.calibration.scale == scale).all()
            expected = cast(given, scale, torch.float8_e4m3fn).view(torch.uint8)
            assert torch.equal(codes(states, ids.shape[1]), expected)
    report = " ".join(str(cache.report()).split())
    assert "scales of fp8_e4m3 keys: checkpoint (model.layers.0.self_attn.k_scale" in report
    with pytest.raises(ValueError, match="ships fp8 KV scales .*kv_cache_scheme.*use 'fp8_e4m3'"):
        make_cache(model, "fp8_e5m2")
    assert isinstance(make_cache(model, None), DynamicCache)


def test_perplexity_stays(embedded, calibrated):
    """Every token packed: e4m3 within 0.1 % of the 16-bit cache, also with a checkpoint's scales, e5m2 within 0.5 %."""
    model, tokenizer = embedded
    settings = EvalSettings(256, 512, 64, texts=4, cases=0, residual_length=0, skip_layers=SKIP)
    exact, e4m3, e5m2 = evaluate(model, tokenizer, ["fp8_e4m3", "fp8_e5m2"], settings).rows
    _, shipped = evaluate(calibrated[1], tokenizer, ["fp8_e4m3"], settings).rows
    assert e4m3.perplexity == pytest.approx(exact.perplexity, rel=1e-3)
    assert e5m2.perplexity == pytest.approx(exact.perplexity, rel=5e-3)
    assert shipped.perplexity == pytest.approx(exact.perplexity, rel=1e-3)
    assert 0 < e4m3.kl < 1e-3 and 0 < e5m2.kl < 5e-3 and 0 < shipped.kl < 1e-3
