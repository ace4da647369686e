"""Which masks are made for "turboquant", and that none means the same everywhere."""

import pytest
import torch
from architectures import build
from transformers import DynamicCache, StaticCache

from tq_cache import TurboQuantCache
from tq_cache.hf.masks import turboquant_mask


def mask_for(queries: int, keys: int, **changes) -> torch.Tensor | None:
    config = build("llama", "turboquant").config
    arguments = dict(batch_size=2, q_length=queries, kv_length=keys, q_offset=keys - queries, config=config)
    return turboquant_mask(**arguments | changes)


@pytest.mark.parametrize(("queries", "keys"), [(1, 9), (9, 9), (4, 9)])
def test_plain_causal_attention_needs_no_mask(queries, keys):
    everything = torch.ones(2, keys, dtype=torch.bool)
    assert mask_for(queries, keys) is None
    assert mask_for(queries, keys, attention_mask=everything) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_mask": torch.arange(9)[None].expand(2, -1) > 1},  # padding
        {"attention_mask": torch.ones(2, 7, dtype=torch.bool)},  # says nothing of the last two
        {"allow_is_causal_skip": False},  # the model's own pattern
        {"local_size": 5},  # a window
        {"q_offset": 3},  # room behind the queries, as in a preallocated cache
        {"q_offset": torch.tensor(5)},  # not known without waiting for the device
    ],
)
def test_all_else_gets_a_mask(changes):
    mask = mask_for(4, 9, **changes)
    assert mask is not None and mask.shape == (2, 1, 4, 9) and mask.dtype == torch.bool


def chunked_logits(model, cache, chunks=(11, 7, 1, 5)) -> torch.Tensor:
    ids = torch.randint(3, model.config.vocab_size, (2, sum(chunks)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split(list(chunks), 1)], dim=1)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("make", ["dynamic", "static", "ours", "ours, static"])
def test_chunks_over_a_past_are_causal(name, make):
    """With any cache, packed or not, the registered attention gives what the model's own gives in one chunk."""
    plain = build(name, "eager" if name == "gpt_oss" else "sdpa")
    expected = chunked_logits(plain, DynamicCache(config=plain.config), chunks=(24,))
    model = build(name, "turboquant")
    cache = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=40),
        "ours": lambda: TurboQuantCache(model.config, skip_layers=("sliding_window",)),
        "ours, static": lambda: TurboQuantCache(model.config, skip_layers=("sliding_window",), max_cache_len=40),
    }[make]()
    torch.testing.assert_close(chunked_logits(model, cache), expected, rtol=1e-4, atol=1e-4)
