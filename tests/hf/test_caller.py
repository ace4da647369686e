"""The attention of the model that calls decides what a cache hands out, not the config that the cache was made from."""

import copy

import pytest
import torch
from architectures import build, config_for, prompt
from transformers import CompileConfig, LlamaConfig
from transformers.models.llava.configuration_llava import LlavaConfig

from tq_cache import TurboQuantCache
from tq_cache.backends import reference
from tq_cache.hf.graph_ops import PreallocatedHandle
from tq_cache.hf.handles import KVHandle

PROMPT, STEPS = 186, 12  # a block is packed on the way: the 196th token fills one


def config_that_says(model, attention: str | None):
    config = copy.deepcopy(model.config)
    config._attn_implementation = attention
    return config


def logits(model, cache, **options) -> torch.Tensor:
    out = model.generate(
        **prompt(model, PROMPT),
        **({"disable_compile": True} | options),
        **dict(past_key_values=cache, max_new_tokens=STEPS, output_logits=True, return_dict_in_generate=True),
    )
    return torch.stack(out.logits)


def codes(cache) -> list[torch.Tensor]:
    views = [layer.storage.view() for layer in cache.layers]
    return [part.packed[:, :, : view.packed_length // 64] for view in views for part in (view.key, view.value)]


def make(config, max_cache_len: int | None) -> TurboQuantCache:
    return TurboQuantCache(config, "tq4", residual_length=0, max_cache_len=max_cache_len)


@pytest.fixture
def counted(monkeypatch) -> dict[str, int]:
    """How often packed tokens were dequantised."""
    calls, own = {"dequantize": 0}, reference.dequantize

    def dequantize(*args, **kwargs):
        calls["dequantize"] += 1
        return own(*args, **kwargs)

    monkeypatch.setattr(reference, "dequantize", dequantize)
    return calls


@pytest.mark.parametrize("max_cache_len", [None, 256])
@pytest.mark.parametrize("guess", [pytest.param("sdpa", marks=pytest.mark.slow), None])
def test_a_copied_config_reads_bits_from_the_first_token_on(guess, max_cache_len, counted):
    """Bit for bit what model.config gives, calibration by queries included, and nothing is dequantised."""
    model = build("llama", "turboquant")
    own, other = make(model.config, max_cache_len), make(config_that_says(model, guess), max_cache_len)
    expected = logits(model, own)
    counted["dequantize"] = 0
    assert torch.equal(logits(model, other), expected)
    assert counted["dequantize"] == 0
    assert all(torch.equal(*pair) for pair in zip(codes(own), codes(other), strict=True))


@pytest.mark.parametrize("max_cache_len", [None, 256])
@pytest.mark.parametrize("guess", ["turboquant", pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.slow)])
def test_another_attention_gets_tensors_whatever_the_config_says(attention, guess, max_cache_len, counted):
    model = build("llama", attention)
    own, other = make(model.config, max_cache_len), make(config_that_says(model, guess), max_cache_len)
    expected = logits(model, own)
    needed, counted["dequantize"] = counted["dequantize"], 0
    assert torch.equal(logits(model, other), expected)
    assert counted["dequantize"] == needed  # none twice
    assert all(torch.equal(*pair) for pair in zip(codes(own), codes(other), strict=True))


@pytest.mark.parametrize("guess", [*(pytest.param(x, marks=pytest.mark.slow) for x in ("sdpa", "turboquant")), None])
@pytest.mark.parametrize("max_cache_len", [None, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.filterwarnings("ignore:latents are dequantised")
def test_latents(attention, max_cache_len, guess):
    model = build("deepseek_v3", attention)
    own, other = make(model.config, max_cache_len), make(config_that_says(model, guess), max_cache_len)
    assert torch.equal(logits(model, other), logits(model, own))
    assert {layer.path[:8] for layer in other.layers} == {"absorbed" if attention == "turboquant" else "expanded"}
    assert all(torch.equal(*pair) for pair in zip(codes(own), codes(other), strict=True))


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("max_cache_len", [None, 256])
@pytest.mark.parametrize(("before", "after"), [("turboquant", "sdpa"), ("sdpa", "turboquant")])
def test_the_attention_may_change_between_updates(before, after, max_cache_len, copied):
    """Both ways, also if the cache's config says nothing of it: same answers, and handles only for "turboquant"."""
    model = build("llama", before)
    config = copy.deepcopy(model.config) if copied else model.config
    ids = prompt(model, 160)["input_ids"]

    def run(cache, attentions: list[str]) -> list[torch.Tensor]:
        model.set_attn_implementation(before)
        outs = []
        with torch.no_grad():
            for start, end, attention in zip((0, 140, 141, 142), (140, 141, 142, 160), attentions, strict=True):
                model.set_attn_implementation(attention)
                outs.append(model(ids[:, start:end], past_key_values=cache).logits)
        return outs

    expected = run(make(model.config, max_cache_len), [before] * 4)
    cache = make(config, max_cache_len)
    for out, other in zip(run(cache, [before, after, after, after]), expected, strict=True):
        torch.testing.assert_close(out, other, atol=1e-4, rtol=1e-4)
    heads = model.config.num_key_value_heads, model.config.head_dim
    key, _ = cache.update(*torch.randn(2, 2, heads[0], 1, heads[1]), 0)
    wrong_guess = copied and before == "turboquant"  # its handles give way to tensors
    assert isinstance(key, (KVHandle, PreallocatedHandle)) == (after == "turboquant" or wrong_guess)


def test_an_outer_config():
    """A composite model: its decoder has a config of its own, and a cache may be made from the outer one."""
    text = config_for("llama")
    outer = LlavaConfig(text_config=text.to_dict())
    model = build("llama", "turboquant")
    assert isinstance(outer.get_text_config(decoder=True), LlamaConfig)
    assert torch.equal(logits(model, make(outer, None)), logits(model, make(model.config, None)))


@pytest.mark.slow
@pytest.mark.parametrize("guess", ["sdpa", None])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_compiled_steps_are_one_graph_and_read_bits(name, guess):
    model = build(name, "turboquant")
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    expected = logits(model, make(model.config, 256))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    out = logits(model, make(config_that_says(model, guess), 256), compile_config=config, disable_compile=False)
    assert torch.equal(out, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("guess", ["sdpa", None])
def test_a_growing_cache_in_torch_compile(guess, counted):
    """Breaks in the graph, and what is lent is known behind them."""
    model = build("llama", "turboquant")
    ids = prompt(model, 150)["input_ids"]

    def run(cache, forward) -> torch.Tensor:
        with torch.no_grad():
            forward(ids[:, :140], past_key_values=cache)
            return torch.stack([forward(ids[:, n : n + 1], past_key_values=cache).logits for n in range(140, 150)])

    expected = run(make(model.config, None), model)
    torch._dynamo.reset()
    counted["dequantize"] = 0
    out = run(make(config_that_says(model, guess), None), torch.compile(model, backend="eager"))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert counted["dequantize"] == 0
