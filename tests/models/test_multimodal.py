"""Models that read images or sound, or have an encoder: with nothing packed as DynamicCache, packed as dequantised.

`multimodal.check` has the tests of `test_architectures.py` for them; here is what else one does with such models.
"""

import pytest
import torch
from multimodal import (
    MODELS,
    PACKED,
    SHORT,
    build_multimodal,
    check,
    distance,
    generate,
    multimodal_prompt,
    reads_bits,
    turboquant,
)
from transformers import DynamicCache

import tq_cache
from tq_cache import TurboQuantCache

IMAGES = [name for name, case in MODELS.items() if case.images]
LOSSLESS = dict(residual_length=512, skip_layers=("sliding_window",))


def quick(names, *fast: str) -> list:
    """The names, all but those in `fast` marked as slow."""
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


def spy(model) -> list:
    """Caches of the decoder's own tokens that the model is given from now on."""
    seen: list = []

    def before(module, args, kwargs):
        cache = kwargs.get("past_key_values")
        cache = getattr(cache, "self_attention_cache", cache)
        if cache is not None and not any(cache is other for other in seen):
            seen.append(cache)

    model.register_forward_pre_hook(before, with_kwargs=True)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_in_hand(name):
    *_, path = check(name)
    assert path == "packed bits"


@pytest.mark.parametrize("name", MODELS)
def test_enabled(name):
    model = build_multimodal(name)
    short, long = (multimodal_prompt(model, name, length) for length in (SHORT, PACKED))
    expected = generate(model, short)
    other = generate(model, short | {key: -x for key, x in short.items() if x.is_floating_point()})
    assert name == "t5" or distance(other, expected) > 0.01  # it does see and hear
    by_hand = build_multimodal(name, "turboquant")
    packed = generate(by_hand, long, turboquant(by_hand, preset="tq3", residual_length=0))
    caches = spy(model)
    with tq_cache.enable(model, **LOSSLESS):
        assert reads_bits(model)
        assert torch.equal(generate(model, short).sequences, expected.sequences)
    with tq_cache.enable(model, "tq3", residual_length=0, skip_layers=("sliding_window",)):
        assert torch.equal(generate(model, long).sequences, packed.sequences)
    assert [type(cache) for cache in caches] == [TurboQuantCache] * 2
    lengths = [{x.storage.packed_length for x in cache.layers if hasattr(x, "storage")} for cache in caches]
    assert lengths == [{0}, {128}]
    assert not any(x.config._attn_implementation == "turboquant" for x in model.modules() if hasattr(x, "config"))


@pytest.mark.parametrize("name", quick(IMAGES, "qwen2_5_vl"))
def test_left_padding(name):
    own, model = build_multimodal(name), build_multimodal(name, "turboquant")
    for length, options in ((SHORT, LOSSLESS), (PACKED, dict(preset="fp8_e4m3", residual_length=0))):
        inputs = multimodal_prompt(own, name, length, padded=True)
        reference = DynamicCache(config=own.config) if options is LOSSLESS else turboquant(own, **options)
        cache = TurboQuantCache(model.config, **{"skip_layers": ("sliding_window",)} | options)
        assert distance(generate(model, inputs, cache), generate(own, inputs, reference)) < 1e-4


@pytest.mark.parametrize("name", quick(MODELS, "gemma3"))
def test_beams(name):
    own, model = build_multimodal(name), build_multimodal(name)
    inputs = multimodal_prompt(own, name, SHORT)
    expected = generate(own, inputs, num_beams=3)
    with tq_cache.enable(model, **LOSSLESS):
        assert torch.equal(generate(model, inputs, num_beams=3).sequences, expected.sequences)


@pytest.mark.parametrize("name", quick(IMAGES, "llava"))
def test_two_turns(name):
    """The second turn brings words alone, and reads the first turn's image from the cache."""
    own, model = build_multimodal(name), build_multimodal(name)
    inputs = multimodal_prompt(own, name, SHORT)
    words = multimodal_prompt(own, name, SHORT)["input_ids"][:, -10:]

    def turns(on, cache=None) -> list:
        first = generate(on, inputs, cache)
        ids = torch.cat([first.sequences, words], dim=1)
        following = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return [first, generate(on, following, first.past_key_values)]

    expected = turns(own, DynamicCache(config=own.config))
    with tq_cache.enable(model, **LOSSLESS):
        enabled = turns(model)
        assert isinstance(enabled[1].past_key_values, TurboQuantCache)
        in_hand = turns(model, TurboQuantCache(model.config, **LOSSLESS))
    for found in (enabled, in_hand):
        assert all(torch.equal(x.sequences, y.sequences) for x, y in zip(found, expected, strict=True))
