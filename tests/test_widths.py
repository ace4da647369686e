"""Layers whose head_dim no format takes."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tq_cache import TurboQuantCache


def llama_config(**changes) -> LlamaConfig:
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4)
    config = LlamaConfig(**sizes | dict(num_key_value_heads=2, head_dim=32) | changes)
    config._attn_implementation = "turboquant"
    return config


@pytest.mark.parametrize("max_cache_len", [None, 300])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("dim", [24, 16, 592])
def test_heads_that_no_format_takes_stay_as_they_are(dim, known, max_cache_len):
    """Whether the config says how wide they are, or their first update."""
    options = dict(residual_length=64, max_cache_len=max_cache_len, backend="reference")
    with pytest.warns(UserWarning, match=f"head_dim {dim}: only multiples of 16 from 32 to 576 are packed") as said:
        cache = TurboQuantCache(llama_config(head_dim=dim if known else 32), **options)
        keys = torch.randn(2, 2, 200, dim)
        for layer in range(len(cache.layers)):
            cache.update(keys, 2 * keys, layer)
            cache.update(keys[:, :, :1], 2 * keys[:, :, :1], layer)
    assert len(said) == 1
    for layer, report in zip(cache.layers, cache.report().layers, strict=True):
        assert torch.equal(layer.keys, torch.cat([keys, keys[:, :, :1]], dim=2))
        assert torch.equal(layer.values, 2 * layer.keys)
        assert report.stored == f"float32 (head_dim {dim}: only multiples of 16 from 32 to 576 are packed)"


def test_a_layer_that_no_preset_takes_cannot_be_given_one():
    with pytest.raises(ValueError, match="packed in layer_presets, got layer 1 .*head_dim 24"):
        TurboQuantCache(llama_config(head_dim=24), layer_presets={1: "tq4"})
    cache = TurboQuantCache(llama_config(), layer_presets={1: "tq4"})
    with pytest.raises(ValueError, match="got layer 1 in layer_presets: head_dim 24"):
        cache.update(torch.randn(1, 2, 3, 24), torch.randn(1, 2, 3, 24), 1)
    assert cache.nbytes == 0


@pytest.mark.parametrize("max_cache_len", [None, 300])
@pytest.mark.parametrize("heads", [8, 2])
@pytest.mark.filterwarnings("ignore:no layer of this model will be packed")
def test_a_model_with_such_heads_generates_as_without(heads, max_cache_len):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=heads, num_key_value_heads=2)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    inputs = dict(inputs=torch.randint(3, 64, (2, 150)), max_new_tokens=8, eos_token_id=None, pad_token_id=0)
    expected = model.generate(**inputs, do_sample=False)
    model.set_attn_implementation("turboquant")
    cache = TurboQuantCache(config, residual_length=64, max_cache_len=max_cache_len)
    assert torch.equal(model.generate(**inputs, do_sample=False, past_key_values=cache), expected)
