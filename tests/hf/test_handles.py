"""What models do with keys and values between update and attention: attention is over what they show then."""

from collections.abc import Callable

import pytest
import torch
from architectures import build, prompt
from latent_models import latent_model
from transformers import DynamicCache, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tq_cache import TurboQuantCache
from tq_cache.hf.attention import turboquant_attention

PROMPT, ROOM = 150, 256


class Module(torch.nn.Module):
    num_key_value_groups = 2


def make_cache(max_cache_len: int | None, attention: str | None = "turboquant", **options) -> TurboQuantCache:
    config = LlamaConfig(num_hidden_layers=2, hidden_size=128, num_attention_heads=4, head_dim=32)
    config._attn_implementation = attention
    options = dict(residual_length=64, skip_layers=(), max_cache_len=max_cache_len) | options
    return TurboQuantCache(config, "fp8_e4m3", **options)


def tokens(generator: torch.Generator, count: int, heads: int = 2) -> torch.Tensor:
    return torch.randn(1, heads, count, 32, generator=generator)


def filled(generator, *arguments, length: int = PROMPT, **options) -> TurboQuantCache:
    cache = make_cache(*arguments, **options)
    query, keys, values = tokens(generator, length, 4), tokens(generator, length), tokens(generator, length)
    for layer in (0, 1):
        turboquant_attention(Module(), query, *cache.update(keys, values, layer), None)
        if arguments[1:] == ("sdpa",):
            cache.caller.seen = None  # as if it were the first
    return cache


def visible(layer, keys: torch.Tensor) -> torch.Tensor:
    return (torch.arange(keys.shape[2]) < int(layer.get_seq_length()))[None, None, None]


def write(part: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(x: torch.Tensor) -> torch.Tensor:
        part(x)
        return x

    return edit


EDITS = {
    "twice": lambda x: x * 2,
    "mul_": write(lambda x: x.mul_(2)),
    "some tokens": write(lambda x: x[:, :, :70].zero_()),
    "setitem": write(lambda x: x.__setitem__((slice(None), slice(None), slice(0, 70)), 0.5)),
    "a view": write(lambda x: x[0].transpose(0, 1).add_(1)),
    "copy_": write(lambda x: x.copy_(torch.ones(x.shape))),
    "out=": write(lambda x: torch.full(x.shape, 0.25, out=x)),
    "detached": write(lambda x: x.detach().neg_()),
    "nothing but read": write(lambda x: x.sum()),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("max_cache_len", [None, ROOM])
def test_attention_is_over_what_keys_and_values_show(max_cache_len, attention, inference, generator):
    """Without a mask too, unless both are other tensors, of which nobody knows what is behind the last token; and the
    cache itself stays as it was."""
    with torch.inference_mode(inference), torch.no_grad():
        cache = filled(generator, max_cache_len, attention)
        for step, (name, edit) in enumerate(EDITS.items(), start=1):
            for whose in ("key", "value", "both"):
                layer = cache.layers[0]
                query, new = tokens(generator, 1, 4), (tokens(generator, 1), tokens(generator, 1))
                pair = list(cache.update(*new, 0))
                exact = [layer.keys, layer.values]
                for i in {"key": (0,), "value": (1,), "both": (0, 1)}[whose]:
                    pair[i], exact[i] = edit(pair[i]), edit(exact[i].clone())
                mask = visible(layer, pair[0]) if (name, whose) == ("twice", "both") else None
                out, _ = turboquant_attention(Module(), query, *pair, mask)
                expected, _ = sdpa_attention_forward(Module(), query, *exact, None)
                torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-3, msg=f"{name} {whose} {step}")
                if attention == "sdpa":
                    cache.caller.seen = None
                torch.testing.assert_close(layer.keys[:, :, -1:], new[0])


@pytest.mark.parametrize("max_cache_len", [None, ROOM])
def test_pairs_that_are_none(max_cache_len, generator):
    """Swapped, of two layers, or with a tensor in place of one."""
    cache = filled(generator, max_cache_len)
    query = tokens(generator, 1, 4)
    first = cache.update(tokens(generator, 1), tokens(generator, 1), 0)
    second = cache.update(tokens(generator, 1), tokens(generator, 1), 1)
    shows = {
        id(x): y for x, y in zip((*first, *second), [z for a in cache.layers for z in (a.keys, a.values)], strict=True)
    }
    values = torch.zeros_like(second[1])
    shows[id(values)] = values[:, :, : PROMPT + 1]
    for pair in ((first[1], first[0]), (first[0], second[1]), (first[0], values)):
        out, _ = turboquant_attention(Module(), query, *pair, None)
        expected, _ = sdpa_attention_forward(Module(), query, *(shows[id(x)] for x in pair), None)
        torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_edits_in_a_compiled_step(backend, generator):
    query, *new = tokens(generator, 1, 4), tokens(generator, 1), tokens(generator, 1)
    for name, edit in list(EDITS.items())[:4]:
        outs = []
        for compiled in (False, True):
            cache = filled(torch.Generator().manual_seed(0), ROOM)

            def step(query, keys, values, cache=cache, edit=edit):
                key, value = cache.update(keys, values, 0)
                return turboquant_attention(Module(), query, key, edit(value), None)[0]

            torch._dynamo.reset()
            run = torch.compile(step, backend=backend, fullgraph=True) if compiled else step
            with torch.no_grad():
                outs.append(run(query, *new))
        torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5, msg=name)


def test_diffllama_in_preallocated_memory():
    """Its keys come as they were handed out, its values are halves, repeated."""
    model = build("diffllama", "turboquant")
    ids = prompt(model, 24)["input_ids"][:1]
    logits = []
    for cache in (
        DynamicCache(config=model.config),
        TurboQuantCache(model.config, residual_length=64, max_cache_len=64),
    ):
        with torch.no_grad():
            logits.append([model(x, past_key_values=cache).logits[:, -1] for x in (ids, ids[:, :1], ids[:, 1:2])])
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


LATENT_EDITS = {
    "values": lambda attention, latents, rotary: edited(attention.expand_kv(latents, rotary), 1),
    "keys": lambda attention, latents, rotary: edited(attention.expand_kv(latents, rotary), 0),
    "latents": lambda attention, latents, rotary: attention.expand_kv(edited([latents], 0)[0], rotary),
    "rotary keys": lambda attention, latents, rotary: attention.expand_kv(latents, edited([rotary], 0)[0]),
}


def edited(pair, i: int):
    pair[i].mul_(2)
    pair[i][..., :3] = 0
    return pair


@pytest.mark.filterwarnings("ignore:latents are dequantised")
@pytest.mark.parametrize("max_cache_len", [None, ROOM])
@pytest.mark.parametrize("name", LATENT_EDITS)
def test_records_that_were_written_to(name, max_cache_len, generator):
    model = latent_model("deepseek_v3")
    cache = TurboQuantCache(model.config, "tq4", residual_length=64, max_cache_len=max_cache_len)
    attention, query = model.model.layers[0].self_attn, torch.randn(2, 4, 1, 64, generator=generator)
    new = [torch.randn(2, 1, 141, dim, generator=generator) for dim in (64, 32)]
    with torch.no_grad():
        cache.update(*(x[:, :, :140] for x in new), 0)[0].update.view.observe(None, None)
        pair = cache.update(*(x[:, :, 140:] for x in new), 0)
        exact = LATENT_EDITS[name](attention, cache.layers[0].keys, cache.layers[0].values)
        mask = visible(cache.layers[0], pair[0]) if name == "latents" else None  # they were made into other tensors
        out, _ = turboquant_attention(attention, query, *LATENT_EDITS[name](attention, *pair), mask)
        expected, _ = sdpa_attention_forward(attention, query, *exact, None, is_causal=False)
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-3)


def test_positional_arguments_come_as_those_of_sdpa(generator):
    cache = filled(generator, None)
    query, pair = tokens(generator, 1, 4), cache.update(tokens(generator, 1), tokens(generator, 1), 0)
    expected, _ = turboquant_attention(Module(), query, *pair, None, scaling=0.5)
    out, _ = turboquant_attention(Module().eval(), query, *pair, None, 0.1, 0.5, True)
    assert torch.equal(out, expected)


# ------------------------------------------------------------------------------------------------- a layer's tensors


@pytest.mark.parametrize("max_cache_len", [None, ROOM])
@pytest.mark.parametrize("length", [20, PROMPT])
def test_what_a_layer_shows_is_a_copy(length, max_cache_len, generator):
    cache = filled(generator, max_cache_len, length=length)
    keys, values = cache.layers[0].keys, cache.layers[0].values
    before = keys.clone(), values.clone()
    cache.reset() if max_cache_len else cache.crop(-3)
    for layer in (0, 1):
        cache.update(tokens(generator, 5), tokens(generator, 5), layer)
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])
    shown = cache.layers[0].keys
    cache.layers[0].keys.zero_()
    assert torch.equal(cache.layers[0].keys, shown)


@pytest.mark.parametrize("max_cache_len", [None, ROOM])
def test_keys_and_values_are_not_to_be_set(max_cache_len, generator):
    cache = filled(generator, max_cache_len)
    for name in ("keys", "values"):
        with pytest.raises(AttributeError, match=r"expected no assignment to the keys or values .* before update\(\)"):
            setattr(cache.layers[0], name, tokens(generator, 3))
