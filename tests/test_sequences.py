"""Which sequences stay, and in what order: indices as transformers' cache takes them, or an error before any change."""

import pytest
import torch
from offloads import HostCache
from transformers import DynamicCache, LlamaConfig

from tq_cache import TurboQuantCache

CONFIG = LlamaConfig(num_hidden_layers=3, hidden_size=128, num_attention_heads=2, head_dim=64, sliding_window=64)
CONFIG.layer_types = ["full_attention", "sliding_attention", "full_attention"]  # one of transformers' own between them


def make_preallocated() -> TurboQuantCache:
    config = LlamaConfig(num_hidden_layers=3, hidden_size=128, num_attention_heads=2, head_dim=64)
    return TurboQuantCache(config, residual_length=64, skip_layers=(), max_cache_len=256)


CACHES = {
    "growing": lambda: TurboQuantCache(CONFIG, residual_length=64),
    "offloaded": lambda: HostCache(CONFIG, residual_length=64, offloading="packed"),
    "preallocated": make_preallocated,
    "transformers": lambda: DynamicCache(config=CONFIG),
}
# Sequences that stay of three, and how that is said.
INDICES = {
    "a tuple": ((0, 2, 2), [0, 2, 2]),
    "a list": ([2, 0, 1], [2, 0, 1]),
    "from the end": ([-1, -3, 1], [2, 0, 1]),
    "a range": (range(3), [0, 1, 2]),
    "bools": ([True, True, True], [0, 1, 2]),
    "int32": (torch.tensor([1, 1, 0], dtype=torch.int32), [1, 1, 0]),
}
FEWER = {
    "a tuple": ((0, 2), [0, 2]),
    "bools": ([True, False, True], [0, 2]),
    "a mask": (torch.tensor([False, True, False]), [1]),
}
WRONG = {
    "beyond": ((0, 1, 3), IndexError, "expected indices of the 3 sequences held, -3 to 2, got"),
    "below": (torch.tensor([0, 1, -4]), IndexError, "expected indices of the 3 sequences held"),
    "too few bools": ([True, False], IndexError, "expected one bool for each of 3 sequences, got 2"),
    "fractions": ([0.5, 1.0, 2.0], TypeError, "expected indices of sequences"),
    "no sequence": (1, TypeError, "expected indices of sequences"),
    "a matrix": ([[0, 1, 2]], TypeError, "expected indices of sequences"),
    "uint8": (torch.tensor([0, 1, 1], dtype=torch.uint8), TypeError, "expected indices of sequences"),
}


def filled(name: str):
    cache, generator = CACHES[name](), torch.Generator().manual_seed(0)
    for layer in range(3):
        cache.update(*torch.randn(2, 3, 2, 150, 64, generator=generator), layer)
    return cache


def held(cache) -> list[torch.Tensor]:
    return [x.clone() for layer in cache.layers for x in (layer.keys, layer.values)]


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", CACHES)
def test_indices_come_in_any_form(name):
    own = ("a range",) if name == "transformers" else ()  # which it does not take
    forms = INDICES if name == "preallocated" else INDICES | {f"fewer: {key}": x for key, x in FEWER.items()}
    for form, (indices, rows) in forms.items():
        cache = filled(name)
        before = held(cache)
        if form in own:
            continue
        cache.batch_select_indices(indices)
        assert_same(held(cache), [x[rows] for x in before])
        cache.update(*torch.randn(2, len(rows), 2, 1, 64), 0)


@pytest.mark.parametrize("name", list(CACHES)[:3])
def test_wrong_indices_change_nothing(name):
    cache = filled(name)
    before = held(cache)
    for indices, error, message in WRONG.values():
        for change in (cache.batch_select_indices, cache.reorder_cache, cache.layers[0].batch_select_indices):
            with pytest.raises(error, match=message):
                change(indices)
            assert_same(held(cache), before)
    cache.reorder_cache([2, 2, 0])
    assert_same(held(cache), [x[[2, 2, 0]] for x in before])


def test_a_layer_that_cannot_select_stops_all():
    cache = TurboQuantCache(CONFIG, residual_length=64, max_cache_len=256)
    for layer in (0, 2):
        cache.update(*torch.randn(2, 3, 2, 150, 64), layer)
    before = cache.layers[0].keys
    with pytest.raises(NotImplementedError, match="cannot select sequences"):
        cache.batch_select_indices([2, 1, 0])
    assert torch.equal(cache.layers[0].keys, before)
