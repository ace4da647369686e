"""float8 as stored: OCP bytes, a scale per token; the report; whole models with scales of their own."""

import json
import shutil

import pytest
import torch
from checkpoints import CHECKPOINTS, FLOAT8
from float8_checkpoints import (
    ALL,
    DIM,
    FLOAT8_TYPES,
    HEADS,
    cast,
    codes,
    every_float8,
    filled,
    kv_checkpoint,
    pairs,
    plain_config,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from typer.testing import CliRunner

from tq_cache import PRESETS, TurboQuantCache
from tq_cache.formats.packing import BLOCK_TOKENS
from tq_cache.tools.evaluate import EvalSettings, evaluate
from tq_cache.tools.runs import EMBEDDED_MODEL, demo_case, encode, generate, make_cache
from tq_cache.tools.tasks import heldout_text
from tq_cli.app import app

# ------------------------------------------------------------------------------------------------ formats and bytes


def test_bytes_are_ocp():
    """1.0 and -2.0 as OCP writes them; FNUZ' bytes for them would be 0x40 and 0xc8, or 0x40 and 0xc4."""
    for preset, expected in (("fp8_e4m3", [0x38, 0xC0]), ("fp8_e5m2", [0x3C, 0xC0])):
        cache = TurboQuantCache(plain_config(), preset, k_scale=1.0, v_scale=1.0, **ALL)
        x = torch.tensor([1.0, -2.0]).repeat(DIM // 2).expand(1, HEADS, 64, DIM)
        cache.update(x, x, 0)
        for states in (cache.layers[0].storage.key, cache.layers[0].storage.value):
            assert codes(states, 64)[0, 0, 0, :2].tolist() == expected


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
    assert "scales of fp8_e4m3 keys: checkpoint (model.layers.0.self_attn.k_scale, ..., one per layer; " in report
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
    case = demo_case(tokenizer, 200)
    exact = make_cache(model, None)
    ids = torch.tensor([encode(tokenizer, case.prompt)])
    with torch.inference_mode():
        model(ids, past_key_values=exact)
    cache = make_cache(model, "fp8_e4m3", **ALL)
    run = generate(model, tokenizer, case.prompt, cache, 20)
    assert case.matches(run.text)
    shipped = load_file(folder / "model.safetensors")
    for n, layer in enumerate(cache.layers):
        for letter, states, given in (
            ("k", layer.storage.key, exact.layers[n].keys),
            ("v", layer.storage.value, exact.layers[n].values),
        ):
            scale = shipped[f"model.layers.{n}.self_attn.{letter}_scale"].float()
            assert (states.calibration.scale == scale).all()
            expected = cast(given, scale, torch.float8_e4m3fn).view(torch.uint8)
            whole = ids.shape[1] // BLOCK_TOKENS * BLOCK_TOKENS
            assert torch.equal(codes(states, whole), expected[:, :, :whole])
    report = " ".join(str(cache.report()).split())
    assert "scales of fp8_e4m3 keys: checkpoint (model.layers.0.self_attn.k_scale" in report
    with pytest.raises(ValueError, match="ships fp8 KV scales .*kv_cache_scheme.*use 'fp8_e4m3'"):
        make_cache(model, "fp8_e5m2")
    assert isinstance(make_cache(model, None), DynamicCache)


def test_perplexity_stays(embedded, calibrated):
    """Every token packed: e4m3 within 0.1 % of the 16-bit cache, also with a checkpoint's scales, e5m2 within 0.5 %."""
    model, tokenizer = embedded
    settings = EvalSettings(256, 512, 64, texts=4, cases=0, residual_length=0)
    exact, e4m3, e5m2 = evaluate(model, tokenizer, ["fp8_e4m3", "fp8_e5m2"], settings).rows
    _, shipped = evaluate(calibrated[1], tokenizer, ["fp8_e4m3"], settings).rows
    assert e4m3.perplexity == pytest.approx(exact.perplexity, rel=1e-3)
    assert e5m2.perplexity == pytest.approx(exact.perplexity, rel=5e-3)
    assert shipped.perplexity == pytest.approx(exact.perplexity, rel=1e-3)
    assert 0 < e4m3.kl < 1e-3 and 0 < e5m2.kl < 5e-3 and 0 < shipped.kl < 1e-3
