"""Arguments that count tokens or layers: integers of any type, kept as plain ones; what is none of these is refused."""

import json

import numpy as np
import pytest
from architectures import build
from transformers import LlamaConfig

import tq_cache
from tq_cache import TurboQuantCache

CONFIG = LlamaConfig(hidden_size=128, num_attention_heads=4, num_hidden_layers=6, vocab_size=64)
LEAST = {"residual_length": 0, "sink_tokens": 0, "boundary_layers": 0, "max_cache_len": 1}


@pytest.mark.parametrize("name", LEAST)
@pytest.mark.parametrize("value", [1.5, "x", True, np.float32(64)])
def test_what_is_no_integer(name, value):
    with pytest.raises(TypeError, match=f"expected {name} as an integer of {LEAST[name]} or more, got .*{value}"):
        TurboQuantCache(CONFIG, **{name: value})


@pytest.mark.parametrize("name", LEAST)
def test_what_is_too_few(name):
    for value in (LEAST[name] - 1, np.int64(-3)):
        with pytest.raises(ValueError, match=f"expected {name} of {LEAST[name]} or more, got {value}$"):
            TurboQuantCache(CONFIG, **{name: value})


def test_integers_of_numpy_are_kept_as_plain_ones():
    counts = {name: np.int64(64) for name in LEAST}
    cache, plain = TurboQuantCache(CONFIG, **counts), TurboQuantCache(CONFIG, **dict.fromkeys(LEAST, 64))
    assert json.dumps(cache.options) == json.dumps(plain.options)
    assert type(cache.layers[0].max_cache_len) is int


@pytest.mark.parametrize(("options", "error"), [
    ({"max_cache_len": 0}, ValueError), ({"max_cache_len": -3}, ValueError), ({"max_cache_len": 1.5}, TypeError),
    ({"max_cache_len": "x"}, TypeError), ({"residual_length": 1.5}, TypeError), ({"sink_tokens": 1.5}, TypeError),
])  # fmt: skip
def test_enable_says_so_at_once_and_changes_nothing(options, error):
    model = build("llama", "sdpa")
    names = set(model.__dict__)
    with pytest.raises(error, match=f"expected {next(iter(options))}"):
        tq_cache.enable(model, **options)
    assert set(model.__dict__) == names and model.config._attn_implementation == "sdpa"
