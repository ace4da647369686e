"""A cache that was saved and loaded goes on bit for bit as the one that was not."""

import copy

import pytest
import torch
from architectures import ARCHITECTURES, build, prompt
from latent_models import INDEXED, LATENT_MODELS, latent_model
from offloads import HostCache, offloaded
from saved import OPTIONS, assert_same, continued, filled, reloaded
from transformers import LlamaForCausalLM

from tq_cache import PRESETS, TurboQuantCache
from tq_cache.saving.folder import files_named, total_bytes

ROOM = 256
# Full and sliding layers, beside linear states, latents, latents with an indexer.
MODELS = ("gemma3_text", "bamba", "deepseek_v3", "deepseek_v32")
REFUSED = {
    "deepseek_v4": "keeps tokens in a way",
    "minimax_m3_vl_text": "keeps tokens in a way",
    "recurrent_gemma": "in the model",
}
OTHER_ATTENTION = ("falcon", "git", "gpt_neo", "gptj", "minimax_m3_vl_text")  # see `test_architectures`
NOT_IN_STEPS = ("cpmant", "prophetnet")  # models that take no more tokens than one, or no prompt beyond 32


def rooms(name: str) -> list[int | None]:
    return [None] if name in INDEXED else [None, ROOM]


@pytest.fixture(scope="module")
def llama():
    return build("llama", "turboquant")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset(llama, tmp_path, preset):
    cache = filled(llama, preset=preset)
    again = reloaded(cache, llama, tmp_path)
    assert again.get_seq_length() == 133 and again.preset == cache.preset
    assert_same(continued(llama, again), continued(llama, cache))


@pytest.mark.parametrize("name", ["llama", *MODELS])
def test_growing_and_preallocated_load_each_other(name, tmp_path):
    model = latent_model(name) if name in LATENT_MODELS else build(name, "turboquant")
    for room in rooms(name):
        cache = filled(model, max_cache_len=room)
        cache.save_pretrained(tmp_path)
        expected = {room: continued(model, cache)}
        for other in rooms(name):
            again = TurboQuantCache.from_pretrained(tmp_path, model.config, max_cache_len=other)
            found = continued(model, again)
            if other == room:
                assert_same(found, expected[room])
            # Between them sums have other orders, and nothing more.
            for x, y in zip(found, expected[room], strict=True):
                assert (x - y).norm() <= 1e-5 * y.norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in NOT_IN_STEPS])
def test_every_architecture(name, tmp_path):
    model = (
        latent_model(name) if name in LATENT_MODELS else build(name, None if name in OTHER_ATTENTION else "turboquant")
    )
    cache = filled(model)
    if name in REFUSED:
        with pytest.raises(NotImplementedError, match=REFUSED[name]):
            cache.save_pretrained(tmp_path)
        return
    assert_same(continued(model, reloaded(cache, model, tmp_path)), continued(model, cache))


@pytest.mark.parametrize("room", [None, ROOM])
@pytest.mark.parametrize("length", [9, 100])
def test_what_waits_for_its_calibration(llama, tmp_path, length, room):
    """Nothing is packed yet: queries seen and padding are saved, and what they say later is the same."""
    inputs = prompt(llama, length)
    inputs["attention_mask"][1, : length // 2] = 0
    cache = TurboQuantCache(llama.config, **OPTIONS, max_cache_len=room)
    with torch.no_grad():
        llama(**inputs, past_key_values=cache, use_cache=True)
    expected = continued(llama, copy.deepcopy(cache))
    assert_same(continued(llama, reloaded(cache, llama, tmp_path, max_cache_len=room)), expected)
    config = copy.deepcopy(llama.config)
    config._attn_implementation = None  # as of a config that no model was made of: that queries come is saved
    again = TurboQuantCache.from_pretrained(tmp_path, config, max_cache_len=room)
    assert_same(continued(llama, again), expected)


def test_loaded_in_inference_mode(llama, tmp_path):
    """And written outside of it, where the first tokens do not fill a block."""
    filled(llama).save_pretrained(tmp_path)
    for options in (dict(length=104), dict(max_cache_len=ROOM)):
        with torch.inference_mode():
            cache = TurboQuantCache.from_pretrained(tmp_path, llama, **options)
        continued(llama, cache)


@pytest.mark.parametrize("options", [
    dict(preset="fp8_e4m3", k_scale=torch.tensor([0.5, 2.0]), v_scale=[1.0, 2.0, 0.5, 1.0]),
    dict(preset="tq4", skip_layers=["boundary", 1], boundary_layers=1, skip_format="fp8_e5m2"),
    dict(preset="tq3", layer_presets={0: "fp8_e4m3", -1: "4bit_nc"}, residual_length=64, sink_tokens=0),
    dict(preset="tq4", key="nc3", value="uniform4", center="both", smooth=0.0),
])  # fmt: skip
def test_options_come_back(llama, tmp_path, options):
    cache = filled(llama, **options)
    again = reloaded(cache, llama, tmp_path)
    assert [plan.preset for plan in again.plans] == [plan.preset for plan in cache.plans]
    assert str(again.report()).splitlines()[:9] == str(cache.report()).splitlines()[:9]
    assert_same(continued(llama, again), continued(llama, cache))
    again.reset()
    cache.reset()
    assert_same(continued(llama, again, (90, 70)), continued(llama, cache, (90, 70)))


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_offloaded_caches(tmp_path, name):
    """What is in host memory is saved as what is not, and goes there again where it is loaded so."""
    model = latent_model(name) if name in LATENT_MODELS else build(name, "turboquant")
    cache = filled(model)
    cache.save_pretrained(tmp_path / "resident")
    again = HostCache.from_pretrained(tmp_path / "resident", model.config, offloading="packed")
    again.save_pretrained(tmp_path / "offloaded")
    expected = continued(model, copy.deepcopy(cache))
    assert_same(continued(model, again), expected)
    assert all(storage.host_nbytes for storage in offloaded(again))
    assert_same(continued(model, TurboQuantCache.from_pretrained(tmp_path / "offloaded", model.config)), expected)


def test_layers_that_no_format_takes(tmp_path):
    """head_dim 16: exact, in either memory; known from the config, or from the first keys."""
    model = build("llama", "turboquant")
    narrow = LlamaForCausalLM(narrow_config(model.config)).eval()
    with pytest.warns(UserWarning, match="no layer of this model will be packed"):
        cache = filled(narrow)
        cache.save_pretrained(tmp_path)
        for room in (None, ROOM):
            again = TurboQuantCache.from_pretrained(tmp_path, narrow.config, max_cache_len=room)
            for x, y in zip(continued(narrow, again), continued(narrow, copy.deepcopy(cache)), strict=True):
                assert (x - y).norm() <= 1e-5 * y.norm()


def narrow_config(config):
    made = copy.deepcopy(config)
    made.head_dim, made._attn_implementation = 16, "turboquant"
    return made


def test_only_a_common_beginning(llama, tmp_path):
    cache, ids = filled(llama, 200), prompt(llama, 200)["input_ids"]
    cache.save_pretrained(tmp_path, input_ids=ids)
    for same in (1, 70, 150, 199):
        given = torch.cat([ids[:, :same], (ids[:, same : same + 1] + 1) % 100, ids[:, :30]], dim=1)
        again = TurboQuantCache.from_pretrained(tmp_path, llama.config, input_ids=given)
        assert again.get_seq_length() == same
        expected = copy.deepcopy(cache)
        expected.crop(same - 200)
        assert_same(continued(llama, again), continued(llama, expected))
    whole = TurboQuantCache.from_pretrained(tmp_path, llama.config, input_ids=ids)
    assert whole.get_seq_length() == 199  # the last one is for the model to read
    assert TurboQuantCache.from_pretrained(tmp_path, llama.config, input_ids=ids + 1).get_seq_length() == 0
    assert TurboQuantCache.from_pretrained(tmp_path, llama.config, length=64).get_seq_length() == 64


def test_loaded_caches_take_all_operations(llama, tmp_path):
    """Before any token comes, and so before they know where their layers are."""
    cache = filled(llama, 150)
    for change in (
        lambda x: x.reorder_cache(torch.tensor([1, 0])),
        lambda x: x.batch_repeat_interleave(2),
        lambda x: x.batch_select_indices(torch.tensor([1])),
        lambda x: x.crop(-70),
    ):
        again = reloaded(cache, llama, tmp_path)
        expected = copy.deepcopy(cache)
        change(again)
        change(expected)
        for layer, other in zip(again.layers, expected.layers, strict=True):
            assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)
    assert again.nbytes <= cache.nbytes


def test_files_hold_little_more_than_packed_bytes(tmp_path):
    model = build("llama", "turboquant")
    cache = TurboQuantCache(model.config, "tq2")
    generator = torch.Generator().manual_seed(0)
    for layer in range(len(cache.layers)):
        states = [torch.randn(1, 2, 12000, 32, generator=generator, dtype=torch.bfloat16) for _ in range(2)]
        cache.update(*states, layer)
        cache.layers[layer].storage.observe(cache.layers[layer].storage.view(), None, None)
    cache.save_pretrained(tmp_path, max_shard_bytes=10**6)
    held = sum(layer.storage.nbytes for layer in cache.layers)
    from tq_cache.saving.folder import read_header

    names = files_named(read_header(tmp_path))
    assert len(names) > 2 and total_bytes(tmp_path, [*names, "cache.json"]) <= 1.01 * held


def test_keys_and_values_of_different_dtypes(llama, tmp_path):
    """As under autocast, where rotary embeddings make keys float32 again."""
    generator = torch.Generator().manual_seed(0)
    cache = TurboQuantCache(llama.config, **OPTIONS)
    for layer in range(len(cache.layers)):
        keys, values = (torch.randn(2, 2, 200, 64, generator=generator) for _ in range(2))
        cache.update(keys, values.bfloat16(), layer)
    again = reloaded(cache, llama, tmp_path)
    for layer, expected in zip(again.layers, cache.layers, strict=True):
        assert torch.equal(layer.keys, expected.keys) and torch.equal(layer.values, expected.values)
        assert layer.values.dtype == torch.bfloat16
