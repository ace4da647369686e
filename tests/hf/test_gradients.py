"""Gradients through a cache: right, as with transformers' own, or an error in the backward pass; never partial."""

import pytest
import torch
from architectures import build
from latent_models import latent_model
from transformers import DynamicCache

from tq_cache import TurboQuantCache
from tq_cache.formats.states import KVView
from tq_cache.hf.attention import turboquant_attention

LOST = "within one update of the cache, got one into tokens of an earlier update"


def run(model, cache, sizes: list[int], without: int) -> torch.Tensor:
    """Logits of the last chunk; the first `without` chunks come without gradients."""
    ids = torch.randint(3, 128, (2, sum(sizes)), generator=torch.Generator().manual_seed(0))
    for i, chunk in enumerate(ids.split(sizes, 1)):
        with torch.set_grad_enabled(i >= without):
            logits = model(chunk, past_key_values=cache).logits
    return logits


def gradients(model, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits.square().mean().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float) -> None:
    assert got.keys() == expected.keys()
    wrong = {name: float((got[name] - x).norm() / x.norm()) for name, x in expected.items() if x.norm() > 1e-7}
    assert max(wrong.values()) < bound, wrong


def model_of(name: str, attention: str):
    return latent_model("deepseek_v3") if name == "latents" else build(name, attention)


@pytest.mark.parametrize("max_cache_len", [None, 64])
@pytest.mark.parametrize("name", ["llama", "latents"])
@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("last", [1, 9])
def test_over_an_exact_past_without_gradients(name, attention, max_cache_len, last):
    model = model_of(name, attention)
    model.set_attn_implementation(attention)
    sizes = [20, 4, last]
    expected = gradients(model, run(model, DynamicCache(config=model.config), sizes, 2))
    cache = TurboQuantCache(model.config, residual_length=64, max_cache_len=max_cache_len)
    assert_close(gradients(model, run(model, cache, sizes, 2)), expected, 1e-4)
    model.set_attn_implementation("turboquant")


@pytest.mark.parametrize("max_cache_len", [None, 192])
@pytest.mark.parametrize("name", ["llama", "latents"])
@pytest.mark.parametrize("last", [1, 9])
def test_over_a_packed_past_without_gradients(name, max_cache_len, last):
    """Packed tokens are constants; those of the update itself are exact: as over dequantised tensors."""
    model, found = model_of(name, "turboquant"), []
    for attention in ("sdpa", "turboquant"):
        model.set_attn_implementation(attention)
        cache = TurboQuantCache(model.config, "tq4", residual_length=64, smooth=0.0, max_cache_len=max_cache_len)
        found.append(gradients(model, run(model, cache, [150, last], 1)))
        assert cache.layers[1].storage.view().packed_length
    assert_close(*found, 1e-3)


@pytest.mark.parametrize("max_cache_len", [None, 64, 192])
@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "latents"])
@pytest.mark.parametrize("last", [1, 9])
def test_earlier_gradients_raise_in_the_backward_pass_alone(name, attention, max_cache_len, last):
    model = model_of(name, attention)
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model.config, residual_length=64, max_cache_len=max_cache_len)
    sizes = [150 if max_cache_len == 192 else 20, last]
    logits = run(model, cache, sizes, 0)
    with torch.no_grad():
        fresh = TurboQuantCache(model.config, residual_length=64, max_cache_len=max_cache_len)
        torch.testing.assert_close(logits, run(model, fresh, sizes, 2), atol=1e-3, rtol=1e-3)
    with pytest.raises(RuntimeError, match=LOST):
        logits.sum().backward()
    model.zero_grad()
    cache.reset()
    run(model, cache, [20], 0).sum().backward()
    model.zero_grad()
    model.set_attn_implementation("turboquant")


def test_crop_forgets_tokens_that_had_gradients():
    model = build("llama", "turboquant")
    cache = TurboQuantCache(model.config)
    run(model, cache, [20, 5], 1)
    cache.crop(-5)
    assert gradients(model, run(model, cache, [4], 0))
    cache.crop(-3)
    with pytest.raises(RuntimeError, match=LOST):
        gradients(model, run(model, cache, [4], 0))


@pytest.mark.parametrize("max_cache_len", [None, 64])
def test_of_one_side_alone_and_through_a_wrapper(max_cache_len):
    """Values alone want a gradient, and are scaled behind the cache's back; in place, too."""
    model = build("llama", "turboquant")
    new = [torch.randn(1, 2, 21, 32) for _ in range(2)]
    for scale in (lambda x: x * 2, lambda x: x.mul_(2)):
        cache = TurboQuantCache(model.config, residual_length=64, max_cache_len=max_cache_len)
        query, (key, value) = torch.randn(1, 4, 1, 32), new
        step = value[:, :, 20:].clone().requires_grad_()
        with torch.no_grad():
            cache.update(key[:, :, :20], value[:, :, :20], 0)
        pair = cache.update(key[:, :, 20:], step, 0)
        out, _ = turboquant_attention(model.model.layers[0].self_attn, query, pair[0], scale(pair[1]), None)
        weights = torch.softmax(query.unflatten(1, (2, 2)) @ key[:, :, None].mT * 32**-0.5, dim=-1)
        out.sum().backward()
        expected = 2 * weights[..., -1:].sum(2).expand_as(step)
        torch.testing.assert_close(step.grad, expected, atol=1e-5, rtol=1e-4)


def test_nothing_is_kept_without_gradients():
    model = build("llama", "turboquant")
    cache = TurboQuantCache(model.config, residual_length=64)
    with torch.no_grad():
        run(model, cache, [20, 3], 2)
    assert all(layer.gradients_lost_from is None for layer in cache.layers)
    step = run(model, cache, [1], 0)
    assert step.requires_grad and not any(x.requires_grad for layer in cache.layers for x in layer.storage.tensors())


def test_a_compiled_step_runs_and_passes_its_own():
    module, found = torch.nn.Module(), []
    query, key, value = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 22, 32), torch.randn(1, 2, 22, 32)
    for cache in (DynamicCache(), TurboQuantCache(build("llama").config, residual_length=64, max_cache_len=64)):
        cache.update(key[:, :, :20], value[:, :, :20], 0)

        @torch.compile(backend="aot_eager", fullgraph=True, disable=type(cache) is DynamicCache)
        def step(query, keys, values, mask, cache=cache):
            return turboquant_attention(module, query, *cache.update(keys, values, 0), mask)[0]

        new = [x[:, :, 20:21].clone().requires_grad_() for x in (key, value)]
        width = 21 if type(cache) is DynamicCache else 64
        mask = (torch.arange(width) < 21)[None, None, None]
        step(query, *new, mask).square().sum().backward()
        found.append([x.grad for x in new])
    torch.testing.assert_close(*found)
    later = step(query, *(x[:, :, 21:].clone().requires_grad_() for x in (key, value)), mask)
    with pytest.raises(RuntimeError, match=LOST):
        later.sum().backward()


@pytest.mark.parametrize("of", ["query", "keys", "values", "mask", "sink_logits"])
def test_kernels_raise_for_each_gradient_they_would_leave_out(of, monkeypatch):
    triton = pytest.importorskip("tq_cache.backends.triton")
    monkeypatch.setattr(triton, "decode", lambda query, *_, **__: (torch.zeros_like(query), query[..., 0]))
    x = {name: torch.randn(1, 2, 1, 32) for name in ("query", "keys", "values")}
    x |= {"mask": torch.zeros(1, 1, 1, 1), "sink_logits": torch.zeros(1, 2, 1)}
    x[of].requires_grad_()
    view = KVView(x["keys"], x["values"])
    out, _ = triton.attend(x["query"], view, x["mask"], 1.0, sink_logits=x["sink_logits"])
    with pytest.raises(RuntimeError, match="has no backward pass on this device"):
        out.sum().backward()
