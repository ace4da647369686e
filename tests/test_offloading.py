"""Offloaded caches as users see them: the tokens and logits of those that are not, bytes, reports, errors."""

import copy

import pytest
import torch
from architectures import ARCHITECTURES, build, prompt
from latent_models import LATENT_MODELS, latent_model
from offloads import HostCache, device_bytes, offloaded
from transformers import GenerationConfig

from tq_cache import PRESETS, TurboQuantCache
from tq_cache.storage.flat import parts

OPTIONS = dict(residual_length=3, sink_tokens=1)
LENGTH = 140
MODES = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "chunked_prefill": {"prefill_chunk_size": 47},
    "left_padding": {"left_padding": 9},
}
# One each where the layers that go are as llama's; the default suite has what differs most.
WAYS = [(family, mode) for family in ("llama", "deepseek_v3") for mode in MODES]
WAYS += [(family, "left_padding") for family in ("gemma3_text", "qwen3_next", "gpt_oss", "falcon_h1")]
QUICK = [("llama", "beam"), ("deepseek_v3", "left_padding"), ("gemma3_text", "left_padding")]
WAYS = [way if way in QUICK else pytest.param(*way, marks=pytest.mark.slow) for way in WAYS]

# Layers that read another's keys, sparse attention, latents beside states, shared latents, layers of several widths.
SPECIAL = ["gemma3n_text", "gemma4_text", "deepseek_v32", "mistral_large4", "glm5_next", "kimi_linear", "zamba2"]


@pytest.fixture(scope="module")
def models():
    built = {}

    def get(family: str, attention: str = "turboquant"):
        if (family, attention) not in built:
            built[family, attention] = build(family, attention)
        return built[family, attention]

    return get


def run(model, cache, mode: str = "greedy", new: int = 10, length: int = LENGTH):
    """Tokens and the logits of every one of them."""
    options = dict(MODES[mode])
    inputs = prompt(model, length)
    if padding := options.pop("left_padding", 0):
        inputs["input_ids"][1, :padding] = 0
        inputs["attention_mask"][1, :padding] = 0
    if "prompt_lookup_num_tokens" in options:
        inputs = {name: x[:1] for name, x in inputs.items()}
    config = GenerationConfig(
        max_new_tokens=new, min_new_tokens=new, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    out = model.generate(**inputs, past_key_values=cache, generation_config=config, **options)
    return out.sequences, torch.stack(out.logits)


def assert_same(cache, model, preset: str = "tq4", mode: str = "greedy", **options) -> TurboQuantCache:
    """The offloaded cache gives what one that is not gives, to the last bit; returns the latter."""
    plain = TurboQuantCache(model.config, preset, **OPTIONS)
    expected, logits = run(model, plain, mode, **options)
    tokens, own = run(model, cache, mode, **options)
    assert torch.equal(tokens, expected) and torch.equal(own, logits)
    return plain


@pytest.mark.parametrize("preset", [x if x == "tq4" else pytest.param(x, marks=pytest.mark.slow) for x in PRESETS])
def test_every_preset(models, preset):
    model = models("llama")
    cache = HostCache(model.config, preset, offloading="packed", **OPTIONS)
    plain = assert_same(cache, model, preset)
    assert all(storage.host is not None for storage in offloaded(cache))
    assert [layer.keys.equal(other.keys) for layer, other in zip(cache.layers, plain.layers, strict=True)] == [True] * 4


@pytest.mark.parametrize(("family", "mode"), WAYS)
def test_ways_to_generate(models, family, mode):
    """Sliding, linear and hybrid layers stay; latents go with their rotary keys."""
    model = models(family)
    cache = HostCache(model.config, offloading="packed", **OPTIONS)
    assert_same(cache, model, mode=mode)
    gone = [storage.host is not None for storage in offloaded(cache)]
    assert all(gone) and len(gone) == sum(plan.packed for plan in cache.plans) > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", [x for x in SPECIAL if x in ARCHITECTURES or x in LATENT_MODELS])
def test_architectures(family):
    model = latent_model(family) if family in LATENT_MODELS else build(family, "turboquant")
    caches = [
        TurboQuantCache(model.config, **OPTIONS),
        *(HostCache(model.config, offloading=x, **OPTIONS) for x in ("packed", "100kB")),
    ]
    for count in (140, 1, 70, 1, 1):
        piece = prompt(model, count, seed=count)["input_ids"]
        with torch.inference_mode():
            expected, *others = (model(input_ids=piece, past_key_values=cache).logits for cache in caches)
        assert all(torch.equal(expected, other) for other in others)
    assert any(storage.host is not None for storage in offloaded(caches[1]))


@pytest.mark.slow
@pytest.mark.parametrize("rotary", ("int8", "fp8_e4m3"))
@pytest.mark.parametrize("absorb", (True, False))
def test_latents(models, rotary, absorb):
    model = models("deepseek_v3")
    options = dict(rotary=rotary, absorb=absorb, **OPTIONS)
    results = [
        run(model, kind(model.config, **options, **more))
        for kind, more in ((TurboQuantCache, {}), (HostCache, {"offloading": "packed"}))
    ]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_the_models_own_attention(models):
    model = models("llama", "sdpa")
    assert_same(HostCache(model.config, offloading="packed", **OPTIONS), model)


def test_layers_that_are_not_packed_stay(models):
    model = models("llama")
    cache = HostCache(model.config, offloading="packed", skip_layers=(0, -1), layer_presets={1: "k8v4"}, **OPTIONS)
    run(model, cache)
    assert len(offloaded(cache)) == 2 and [layer.host_nbytes > 0 for layer in cache.report().layers] == [0, 1, 1, 0]


def test_growth_two_turns_crop_and_reset(models):
    """Long enough to grow and to pack often; then a second turn, a crop, a third; then all anew."""
    model = models("llama")
    budget = HostCache(model.config, offloading="120kB", **OPTIONS)
    caches = [TurboQuantCache(model.config, **OPTIONS), HostCache(model.config, offloading="packed", **OPTIONS), budget]
    pieces = [prompt(model, n, seed=n)["input_ids"] for n in (150, 1, 90, 1, 70)]
    for _ in range(2):
        logits: list[list[torch.Tensor]] = [[] for _ in caches]
        with torch.inference_mode():
            for place, piece in enumerate(pieces):
                for cache, seen in zip(caches, logits, strict=True):
                    seen.append(model(piece, past_key_values=cache).logits)
                    if place == 2:
                        cache.crop(-45)
        for others in zip(*logits, strict=True):
            assert torch.equal(others[0], others[1]) and torch.equal(others[0], others[2])
        twin = copy.deepcopy(caches[1])
        assert twin.layers[0].storage.turns is twin._turns is not caches[1]._turns
        with torch.inference_mode():
            again = [model(pieces[1], past_key_values=cache).logits for cache in (twin, *caches)]
        assert all(torch.equal(again[0], other) for other in again)
        assert 0 < sum(x.host is not None for x in offloaded(budget)) < 4
        for cache in caches:
            cache.reset()
        assert caches[1].nbytes == caches[1].host_nbytes == budget.host_nbytes == 0


def test_rows(models):
    model = models("llama")
    caches = [
        TurboQuantCache(model.config, **OPTIONS),
        *(HostCache(model.config, offloading=x, **OPTIONS) for x in ("packed", 120_000)),
    ]
    out = []
    for cache in caches:
        with torch.inference_mode():
            model(**prompt(model, 200), past_key_values=cache)
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([3, 0, 2]))
            cache.reorder_cache(torch.tensor([1, 1, 0]))
            out.append(model(torch.tensor([[1], [2], [3]]), past_key_values=cache).logits)
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[2])


# ---------------------------------------------------------------------------------------------- bytes and reports


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_what_the_device_holds(models, family):
    """At every step: what is exact, and two slots of one layer; the rest is on the host, all of it."""
    model = models(family)
    plain, cache = TurboQuantCache(model.config, **OPTIONS), HostCache(model.config, offloading="packed", **OPTIONS)
    with torch.inference_mode():
        for count in (140, 1, 1, 100, 1, 50, *[1] * 20):
            piece = prompt(model, count)["input_ids"]
            for each in (plain, cache):
                model(piece, past_key_values=each)
            assert cache.nbytes == device_bytes(cache)
            gone = offloaded(cache)
            states = [(layer.storage.key, layer.storage.value) for layer in plain.layers]
            packed = sum(x.nbytes for pair in states for x in parts(pair))
            exact = plain.nbytes - packed
            slots = 2 * max(storage.host_nbytes for storage in gone)
            assert cache.nbytes <= exact + slots  # a slot grows when its turn comes
            assert packed <= cache.host_nbytes <= packed + len(gone) * 6 * 256
    assert cache.nbytes == exact + slots
    report = cache.report()
    assert (report.nbytes, report.host_nbytes) == (cache.nbytes, cache.host_nbytes)
    assert report.slot_nbytes == cache._turns.nbytes > 0
    assert report.ratio == pytest.approx(plain.report().ratio, rel=0.05)
    assert "on the host" in str(report) and "slots" in str(report) and "on the host" not in str(plain.report())


def test_a_budget_is_kept_at_every_step(models):
    model = models("llama")
    cache = HostCache(model.config, offloading=90_000, **OPTIONS)
    gone_before = [0]
    with torch.inference_mode():
        for count in (140, *[60] * 6):
            model(prompt(model, count)["input_ids"], past_key_values=cache)
            gone = [storage for storage in offloaded(cache) if storage.host is not None]
            stay = sum(storage.packed_bytes for storage in offloaded(cache) if storage.host is None)
            assert stay + cache._turns.nbytes <= 90_000 or len(gone) == 4
            assert len(gone) >= gone_before[-1]
            gone_before.append(len(gone))
    assert any(0 < count < 4 for count in gone_before)


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
@pytest.mark.parametrize("offloading", (True, "packed", "8GB", 10**9))
def test_without_a_gpu(models, offloading):
    with pytest.raises(RuntimeError, match=f"offloading={offloading!r} keeps .* torch finds no CUDA device here"):
        TurboQuantCache(models("llama").config, offloading=offloading)


def test_keys_on_another_device(models):
    class GPUCache(HostCache):
        def _make_turns(self, offloading):
            turns = super()._make_turns(offloading)
            self._computes_on = ("cuda",)
            return turns

    cache = GPUCache(models("llama").config, offloading="packed")
    keys = torch.randn(1, 2, 3, 32)
    with pytest.raises(ValueError, match="expected keys on a CUDA device, .* got them on cpu"):
        cache.update(keys, keys, 0)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(("arguments", "error"), [
    ({"offloading": "some"}, ValueError),
    ({"offloading": 0}, ValueError),
    ({"offloading": 1.5}, TypeError),
    ({"offloading": None}, TypeError),
    ({"offloading": "packed", "max_cache_len": 512}, NotImplementedError),
    ({"offloading": "8GB", "max_cache_len": 512}, NotImplementedError),
])  # fmt: skip
def test_bad_arguments(models, arguments, error):
    with pytest.raises(error):
        HostCache(models("llama").config, **arguments)
