"""Versions that were tested, and those beyond."""

import warnings

import pytest
from architectures import build

import tq_cache
from tq_cache import compat


@pytest.fixture
def version(monkeypatch):
    compat.warn_if_untested.cache_clear()
    yield lambda name: monkeypatch.setattr(compat.transformers, "__version__", name)  # a lazy module may be replaced
    compat.warn_if_untested.cache_clear()


@pytest.mark.parametrize("newer", ["5.24.0", "5.24.0.dev0", "6.0.1"])
def test_a_newer_transformers_is_said_once(newer, version):
    version(newer)
    model = build("llama", "sdpa")
    with pytest.warns(
        UserWarning, match=f'tested with transformers up to 5.23, .* {newer}.*"transformers<5.24"'
    ) as said:
        for _ in range(2):
            with tq_cache.enable(model):
                pass
    assert len(said) == 1 and said[0].filename == __file__


@pytest.mark.parametrize("tested", ["5.17.0", "5.23.0", "5.23.4"])
def test_what_was_tested_is_not_warned_of(tested, version):
    version(tested)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tq_cache.enable(build("llama", "sdpa"))
