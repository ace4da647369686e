"""Whole models with a preallocated cache: as with a growing one, and compiled in one graph."""

import pytest
import torch
import torch._dynamo.utils
from architectures import build
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, CompileConfig

from tq_cache import TurboQuantCache

# ------------------------------------------------------------------------------------------------------- whole models

# Full attention; with sliding layers; with linear attention; with sliding layers that sdpa cannot compute.
MODELS = ("llama", "gemma3_text", "qwen3_next", "gpt_oss")
SLIDING = ("gemma3_text", "gpt_oss")


def inputs_for(model) -> dict:
    ids = torch.randint(3, model.config.vocab_size, (2, 90), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :25] = 0
    return dict(
        input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=80, pad_token_id=0, eos_token_id=None
    )


def forced_logits(model, cache, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits of the last 80 of `tokens`, fed one by one after all others at once."""
    outs, start = [], 0
    for end in range(tokens.shape[1] - 80, tokens.shape[1] + 1):
        with torch.no_grad():  # transformers cannot reset static layers made under inference_mode
            positions = mask[:, :end].cumsum(1)[:, start:] - 1
            out = model(tokens[:, start:end], attention_mask=mask[:, :end], position_ids=positions.clamp_min(0),
                        past_key_values=cache)  # fmt: skip
        outs.append(out.logits[:, -1])
        start = end
    return torch.stack(outs)


@pytest.mark.parametrize("attention", ["turboquant", "other"])
@pytest.mark.parametrize("name", MODELS)
def test_gives_what_the_growing_cache_gives(name, attention):
    other = "eager" if name == "gpt_oss" else "sdpa"
    model = build(name, other if attention == "other" else attention)
    tokens = torch.randint(3, model.config.vocab_size, (2, 250), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :25] = 0
    options = dict(residual_length=64, sink_tokens=4, skip_layers=("sliding_window",))
    growing = forced_logits(model, TurboQuantCache(model.config, "tq4", **options), tokens, mask)
    cache = TurboQuantCache(model.config, "tq4", max_cache_len=250, **options)
    for _ in range(2):  # and again in the same memory
        fixed = forced_logits(model, cache, tokens, mask)
        assert (fixed - growing)[: 4 + 64 + 128 - 170].abs().max() < 1e-4
        # The step that packs the second block, the 196th token's, reads it packed here, and still exact there.
        assert (fixed - growing).square().mean().sqrt() < 0.02 * growing.std()
        cache.reset()


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_of_one_token(name, attention):
    """It is no step: there is no memory yet.  In memory that was reset, it is one."""
    if name == "gpt_oss" and attention == "sdpa":
        pytest.skip("sdpa has no attention sinks")
    model = build(name, attention)
    options = dict(do_sample=False, max_new_tokens=20, pad_token_id=0, eos_token_id=None)
    ids = torch.tensor([[5], [9]])
    expected = model.generate(ids, **options)
    cache = TurboQuantCache(model.config, max_cache_len=64)
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
    cache.reset()
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)


def compile_config() -> CompileConfig:
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    return config


@pytest.mark.parametrize("name", MODELS)
def test_compiles_in_one_graph(name):
    model = build(name, "turboquant")
    inputs, options = inputs_for(model), dict(residual_length=64, sink_tokens=4, skip_layers=("sliding_window",))
    options["max_cache_len"] = 170
    expected = model.generate(**inputs, past_key_values=TurboQuantCache(model.config, "tq4", **options))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    cache = TurboQuantCache(model.config, "tq4", **options)
    assert cache.is_compileable
    out = model.generate(**inputs, past_key_values=cache, compile_config=compile_config())
    assert torch.equal(out, expected)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 + (name in SLIDING)  # one more before the window is full
    assert not counters["graph_break"]
    packed = next(layer for layer in cache.layers if hasattr(layer, "storage"))
    view = packed.storage.view()
    assert view.packed_length >= 64 and view.sink_length == 4  # blocks were packed inside the graph


def test_a_step_compiles_with_no_eager_one_before():
    """What is imported or looked up once must not be in the graph."""
    model = build("llama", "turboquant")
    cache = TurboQuantCache(model.config, "tq4", max_cache_len=170, residual_length=64, skip_layers=())
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    for layer in range(model.config.num_hidden_layers):
        cache.update(*torch.randn(2, 1, heads, 100, dim), layer)
    for mapping in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        mapping._modules.clear()
    torch._dynamo.reset()
    step = torch.compile(model.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        out = step(input_ids=torch.tensor([[3]]), position_ids=torch.tensor([[100]]), past_key_values=cache).logits
    assert out.isfinite().all() and int(cache.get_seq_length()) == 101


def test_too_many_tokens_raise():
    model = build("llama", "turboquant")
    cache = TurboQuantCache(model.config, "tq4", max_cache_len=100, residual_length=64, skip_layers=())
    with pytest.raises(ValueError, match="expected at most max_cache_len = 100 tokens, got 100 held and 1 new"):
        model.generate(**inputs_for(model), past_key_values=cache)
    assert int(cache.get_seq_length()) == 100


def test_beam_search():
    model = build("llama", "turboquant")
    inputs, options = inputs_for(model) | dict(max_new_tokens=30), dict(residual_length=64, skip_layers=())
    beams = dict(num_beams=3, disable_compile=True)
    growing = model.generate(**inputs, **beams, past_key_values=TurboQuantCache(model.config, "tq4", **options))
    cache = TurboQuantCache(model.config, "tq4", max_cache_len=170, **options)
    assert torch.equal(model.generate(**inputs, **beams, past_key_values=cache), growing)


@pytest.mark.parametrize("max_cache_len", [None, 170])
def test_export_is_refused(max_cache_len):
    model = build("llama", "turboquant")
    cache = TurboQuantCache(model.config, "tq4", max_cache_len=max_cache_len, skip_layers=())

    class Step(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.cache = model, cache

        def forward(self, ids, position_ids):
            return self.model(input_ids=ids, position_ids=position_ids, past_key_values=self.cache).logits

    with torch.no_grad():
        model(torch.randint(3, model.config.vocab_size, (1, 130)), past_key_values=cache)
        with pytest.raises(NotImplementedError, match=r"torch\.export cannot take .* use torch\.compile"):
            torch.export.export(Step(), (torch.tensor([[3]]), torch.tensor([[130]])))
    assert int(cache.get_seq_length()) == 130
