"""What is no whole cache of this model is refused, and says why; what is damaged gives an error or the same bits."""

import copy
import json
import random
import shutil

import pytest
import torch
from architectures import build, prompt
from latent_models import latent_model
from saved import assert_same, continued, filled

from tq_cache import CacheFileError, TurboQuantCache
from tq_cache.saving import folder as folder_module
from tq_cache.saving import identity
from tq_cache.saving.folder import HEADER, header_checksum, read_header


@pytest.fixture(scope="module")
def llama():
    return build("llama", "turboquant")


@pytest.fixture(scope="module")
def saved(llama, tmp_path_factory):
    """A folder, and the cache in it; to be copied, not changed."""
    path, cache = tmp_path_factory.mktemp("saved"), filled(llama, 133, "fp8_e4m3")
    cache.save_pretrained(path, input_ids=prompt(llama, 133)["input_ids"], max_shard_bytes=60_000)
    return path, cache


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "copy")


def load(path, model, **options):
    return TurboQuantCache.from_pretrained(path, model.config, **options)


def rewrite(path, change) -> None:
    """A header that somebody changed, with the checksum of what it says then."""
    header = json.loads((path / HEADER).read_text())
    change(header)
    header["checksum"] = header_checksum(header)
    (path / HEADER).write_text(json.dumps(header))


# ----------------------------------------------------------------------------------------------------------- saving


def test_what_cannot_be_saved(llama, tmp_path):
    with pytest.raises(ValueError, match="empty"):
        TurboQuantCache(llama.config).save_pretrained(tmp_path)
    cache, whole = filled(llama, 20), torch.zeros(2, 20, dtype=torch.int64)
    for ids in (whole[:, 1:], whole.float(), whole[None], whole[:1], whole[0], whole[:, :0]):
        with pytest.raises(ValueError, match="input_ids"):
            cache.save_pretrained(tmp_path, input_ids=ids)
    assert not list(tmp_path.iterdir())


def test_a_failed_forward_leaves_nothing_to_save(llama, copied, saved):
    """Layers with unequal numbers of tokens: what was saved there before stays."""
    cache = filled(llama)
    with pytest.raises(RuntimeError), torch.no_grad():
        cache.layers[2].update = lambda *_: torch.zeros(2) + torch.zeros(3)
        llama(**prompt(llama, 1), past_key_values=cache)
    del cache.layers[2].update
    with pytest.raises(ValueError, match=r"as many tokens in every layer, got \[133, 134\]"):
        cache.save_pretrained(copied)
    assert_same(continued(llama, load(copied, llama)), continued(llama, copy.deepcopy(saved[1])))


def test_an_interrupted_save_leaves_the_older_one(llama, copied, saved, monkeypatch):
    before = sorted(copied.iterdir())
    calls = []

    def save_file(*args, **kwargs):
        calls.append(args)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    original = folder_module.save_file
    monkeypatch.setattr(folder_module, "save_file", save_file)
    other = filled(llama, 70)
    with pytest.raises(KeyboardInterrupt):
        other.save_pretrained(copied, max_shard_bytes=1000)
    assert len(calls) == 2 and sorted(copied.iterdir()) == before
    monkeypatch.undo()
    monkeypatch.setattr(folder_module.os, "replace", lambda *args: 1 / 0)  # all is written but the header
    with pytest.raises(ZeroDivisionError):
        other.save_pretrained(copied)
    assert sorted(copied.iterdir()) == before
    monkeypatch.undo()
    assert load(copied, llama).get_seq_length() == 133
    other.save_pretrained(copied)
    assert load(copied, llama).get_seq_length() == 70
    assert len(list(copied.iterdir())) == 2  # no file of the older one is left


# ------------------------------------------------------------------------------------------------- of another model


def test_another_model(saved):
    path, _ = saved
    config = build("llama").config
    for name, value in (("hidden_size", 256), ("num_hidden_layers", 3), ("rms_norm_eps", 1e-3)):
        other = copy.deepcopy(config)
        setattr(other, name, value)
        with pytest.raises(CacheFileError, match=name):
            TurboQuantCache.from_pretrained(path, other)
    other = copy.deepcopy(config)
    other.rope_parameters = other.rope_parameters | {"rope_theta": 5e5}
    with pytest.raises(CacheFileError, match="rope_parameters"):
        TurboQuantCache.from_pretrained(path, other)
    with pytest.raises(CacheFileError, match="model_type"):
        TurboQuantCache.from_pretrained(path, latent_model("deepseek_v3").config)


def test_fields_that_transformers_says_twice(saved):
    """5.17 has these of RoPE beside `rope_parameters`, too."""
    path, _ = saved
    config = copy.deepcopy(build("llama").config)
    config.rope_parameters = config.rope_parameters | {"partial_rotary_factor": 0.5}
    config.partial_rotary_factor = 0.5
    assert "partial_rotary_factor" not in identity.model_fields(config)
    del config.rope_parameters["partial_rotary_factor"]
    assert identity.model_fields(config)["partial_rotary_factor"] == 0.5
    with pytest.raises(CacheFileError, match="partial_rotary_factor None, here 0.5"):
        TurboQuantCache.from_pretrained(path, config)


def test_codes_that_mean_something_else(llama, saved, monkeypatch):
    """As after a change of a codebook, a rotation or a packed layout that nobody counted."""
    monkeypatch.setattr(identity, "code_fingerprint", lambda fmt, dim: "0" * 32)
    with pytest.raises(CacheFileError, match="stand for the numbers"):
        load(saved[0], llama)


def test_no_room(llama, saved):
    with pytest.raises(ValueError, match="max_cache_len = 100"):
        load(saved[0], llama, max_cache_len=100)
    with pytest.raises(ValueError, match="leave max_cache_len out"):  # packed tokens that would be exact
        load(saved[0], llama, max_cache_len=256, length=100)
    with pytest.raises(ValueError, match="length from 0 to 133"):
        load(saved[0], llama, length=134)
    with pytest.raises(ValueError, match="batch 2"):
        load(saved[0], llama, input_ids=torch.zeros(1, 9, dtype=torch.int64))


def test_states_that_cannot_be_cut(tmp_path):
    for name, part in (("bamba", "keeps a state"), ("gemma3_text", "before the window")):
        model = build(name, "turboquant")
        filled(model).save_pretrained(tmp_path)
        with pytest.raises(NotImplementedError, match=part):
            load(tmp_path, model, length=130)


# ------------------------------------------------------------------------------------------------- hostile, damaged


def test_no_cache_there(llama, copied, tmp_path):
    with pytest.raises(CacheFileError, match=f"has no {HEADER}"):
        load(tmp_path / "none", llama)
    file = next(x for x in copied.iterdir() if x.suffix == ".safetensors")
    content = file.read_bytes()
    for changed in (content[:-1], content[:100], b"", content + b"x"):
        file.write_bytes(changed)
        with pytest.raises(CacheFileError, match="whole file"):
            load(copied, llama)
    file.unlink()
    with pytest.raises(CacheFileError, match="no such file"):
        load(copied, llama)
    for text in ("", "{", "[" * 100_000, "[]", '{"a": NaN}'):
        (copied / HEADER).write_text(text)
        with pytest.raises(CacheFileError):
            load(copied, llama)


HUGE = 2**39


@pytest.mark.parametrize(("change", "said"), [
    (lambda h: h.update(layout=2), "layout 1, got 2"),
    (lambda h: h.update(format="other"), "format"),
    (lambda h: h.update(reads_bits="yes"), "reads_bits"),
    (lambda h: h["weights"].update(parameters="0f"), "weights"),
    (lambda h: h["weights"].update(parameters={"samples": 1, "adapters": []}), "weights"),
    (lambda h: h["options"].update(layer_presets=5), "options"),
    (lambda h: h.update(length=132), "tokens"),
    (lambda h: h.update(length=HUGE), "tokens"),
    (lambda h: h["layers"].pop(), "layers"),
    (lambda h: h["layers"][0].pop("first"), "numbers"),
    (lambda h: h["layers"][0]["tokens"].update(packed=HUGE, tail=0), "tokens"),
    (lambda h: h["layers"][0]["tokens"].update(batch=HUGE), "shape|tensors|tail"),
    (lambda h: h["layers"][0].pop("tokens"), "tensors of"),
    (lambda h: h["layers"][0].update(window={"seen": 133}), "window"),
    (lambda h: h["layers"][1].update(preset=None), "layer 1 stored as"),
    (lambda h: h["options"].update(preset="tq9"), "preset"),
    (lambda h: h["options"].update(surprise=1), "options"),
    (lambda h: h["tensors"]["layers.0.tail.keys"].update(shape=[2, 2, HUGE, 32]), "tail"),
    (lambda h: h["tensors"]["layers.0.tail.keys"].update(dtype="uint8"), "tail.keys"),
    (lambda h: h["tensors"]["layers.0.tail.keys"]["parts"][0].update(file="../../etc/passwd"), "file"),
    (lambda h: h["tensors"]["layers.0.tail.keys"]["parts"][0].update(heads=[0, 1]), "heads"),
    (lambda h: h["tensors"].pop("layers.0.key.packed"), "tensors"),
    (lambda h: h["tensors"].update({"layers.0.x": h["tensors"]["layers.0.tail.keys"]}), "tensors of"),
])  # fmt: skip
def test_headers_that_somebody_wrote(llama, copied, change, said):
    rewrite(copied, change)
    with pytest.raises((CacheFileError, ValueError), match=said):
        load(copied, llama)


def test_numbers_that_are_none(llama, saved, tmp_path):
    """A file with right checksums, whose calibration would make every token NaN."""
    cache = copy.deepcopy(saved[1])
    cache.layers[1].storage.key.calibration.scale[0] = torch.nan
    cache.save_pretrained(tmp_path)
    with pytest.raises(CacheFileError, match="finite"):
        load(tmp_path, llama)


def damage(path, numbers: random.Random) -> None:
    """One of: a bit, a byte, a run of zeros, a file cut short or longer, a file gone, two files exchanged."""
    files = sorted(path.iterdir())
    file, kind = numbers.choice(files), numbers.randrange(7)
    content = bytearray(file.read_bytes())
    place = numbers.randrange(len(content))
    if kind == 0:
        content[place] ^= 1 << numbers.randrange(8)
    elif kind == 1:
        content[place] = numbers.randrange(256)
    elif kind == 2:
        content[place : place + 64] = bytes(len(content[place : place + 64]))
    elif kind == 3:
        del content[place:]
    elif kind == 4:
        content += bytes(numbers.randrange(1, 64))
    elif kind == 5:
        file.unlink()
        return
    else:
        other = numbers.choice(files)
        content, second = other.read_bytes(), bytes(content)
        other.write_bytes(second)
    file.write_bytes(content)


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_damage_is_refused_or_harmless(tmp_path, count):
    model = build("llama", "turboquant")
    cache = filled(model, 80, "tq2")
    cache.save_pretrained(tmp_path / "good", max_shard_bytes=15_000)
    expected = [(layer.keys, layer.values) for layer in cache.layers]
    refused = 0
    for number in range(count):
        path = shutil.copytree(tmp_path / "good", tmp_path / "bad")
        damage(path, random.Random(number))
        try:
            found = load(path, model)
        except CacheFileError:
            refused += 1
        else:
            for layer, (keys, values) in zip(found.layers, expected, strict=True):
                assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values), number
        shutil.rmtree(path)
    assert refused > 0.8 * count


def test_a_failed_load_changes_nothing(llama, saved, copied):
    """The cache there is stays; what fails is a new one."""
    (copied / HEADER).write_text("{}")
    cache = saved[1]
    before = [layer.keys for layer in cache.layers]
    with pytest.raises(CacheFileError):
        type(cache).from_pretrained(copied, llama.config)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
    assert read_header(saved[0])["length"] == 133
