"""What real models have and random ones lack, put into small ones: a bias on keys, outlier channels, a first token that
takes the attention and gives nothing.  Each broke presets on Qwen2.5 or SmolLM2 (`benchmarks/quality.py`)."""

from functools import cache as once

import pytest
import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from tq_cache import TurboQuantCache
from tq_cache.formats.presets import PRESETS
from tq_cache.hf.attention import turboquant_attention

PREFILL, LENGTH = 200, 280


@once
def build(traits: bool) -> Qwen2ForCausalLM:
    """With traits, a channel of a slow RoPE pair has a bias of 300, which softmax hardly feels, and four pairs of key
    channels are 16 times larger, as their queries are smaller: nearly the same function."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=512, initializer_range=0.08,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, attn_implementation="turboquant",
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers if traits else []:
            attention = layer.self_attn
            attention.k_proj.weight.view(2, 2, 32, -1)[:, :, 3:7].mul_(16)  # [KV head, half of a pair, pair, hidden]
            attention.q_proj.weight.view(4, 2, 32, -1)[:, :, 3:7].div_(16)
            attention.k_proj.bias.view(2, 2, 32)[:, 1, 28] = 300.0
    return model


@torch.no_grad()
def logits(model: Qwen2ForCausalLM, cache: DynamicCache) -> torch.Tensor:
    ids = torch.randint(0, 128, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    model(ids[:, :PREFILL], past_key_values=cache)
    steps = range(PREFILL, LENGTH, 8)
    return torch.cat([model(ids[:, t : t + 8], past_key_values=cache).logits for t in steps], dim=1)


@once
def exact(traits: bool) -> torch.Tensor:
    return logits(build(traits), DynamicCache(config=build(traits).config))


def error(traits: bool, preset: str, **options) -> float:
    """Of the logits, over the standard deviation of the exact ones; everything packed."""
    model = build(traits)
    packed = TurboQuantCache(model.config, preset, residual_length=0, skip_layers=(), sink_tokens=4, **options)
    found = logits(model, packed)
    assert all(layer.storage.packed_length >= 192 for layer in packed.layers)
    return float((found - exact(traits)).square().mean().sqrt() / exact(traits).std())


@pytest.mark.parametrize("preset", PRESETS)
def test_a_bias_on_keys_and_outlier_channels(preset):
    """Cost little more than keys without them; uncentred, unsmoothed ones would lose the text."""
    assert error(True, preset) < 2 * error(False, preset)


@pytest.mark.parametrize("preset", ["4bit_nc", "tq3"])
def test_the_peers_own_format_breaks(preset):
    """What the test above is about."""
    assert error(True, preset, center=False, smooth=0.0) > 4 * error(True, preset)


@pytest.mark.parametrize("max_cache_len", [None, 512])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_first_token_that_takes_the_attention_and_gives_nothing(preset, max_cache_len, generator):
    """The output is what little weight the others have, times their values: no error of the first may enter it."""
    model = build(False)
    cache = TurboQuantCache(model.config, preset, residual_length=0, skip_layers=(), max_cache_len=max_cache_len)
    keys, values = (torch.randn(1, 2, 300, 64, generator=generator) for _ in range(2))
    values += 2.0
    query = torch.randn(1, 4, 1, 64, generator=generator)
    strong = query / query.square().sum(dim=-1, keepdim=True)
    keys[:, :, 0] = 76 * strong.unflatten(1, (2, 2)).sum(dim=(2, 3))
    values[:, :, 0] = 0.001
    weight = torch.softmax(query.unflatten(1, (2, 2)) @ keys[:, :, None].mT / 8, dim=-1)
    assert weight[..., 0].min() > 0.8
    cache.update(keys[:, :, :299], values[:, :, :299], 0)
    pair = cache.update(keys[:, :, 299:], values[:, :, 299:], 0)
    out, _ = turboquant_attention(model.model.layers[0].self_attn, query, *pair, None)
    expected = (weight @ values[:, :, None]).flatten(1, 2)
    assert (out.transpose(1, 2) - expected).norm() < 0.1 * expected.norm()
