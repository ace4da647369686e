"""torch.compile over a whole model by hand: what is traced, and where the graph breaks.

The steps of a preallocated cache, which `generate` compiles by itself, are in `test_static_cache`.
"""

import pytest
import torch
import torch._dynamo.utils
from architectures import build
from torch.nn import Module
from transformers import AttentionInterface

from tq_cache import TurboQuantCache, backends


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def test_a_growing_cache_breaks_the_graph_and_answers_alike():
    """Nothing behind an update or an attention is traced: neither lengths, others with each step, nor kernels."""
    model = build("llama", "turboquant")
    ids = torch.randint(3, model.config.vocab_size, (2, 100), generator=torch.Generator().manual_seed(0))
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, eos_token_id=None)

    def generate() -> torch.Tensor:
        cache = TurboQuantCache(model.config, "tq4", residual_length=64, skip_layers=(0,))
        return model.generate(ids, past_key_values=cache, **options)

    expected = generate()
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(generate(), expected)
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert breaks and all("outside_graph" in reason for reason in breaks), list(breaks)


@pytest.mark.parametrize(
    "options", [dict(softcap=20.0), dict(s_aux=torch.linspace(-1, 1, 4))], ids=["softcap", "sinks"]
)
def test_what_sdpa_cannot_compute_is_traced_in_plain_pytorch(options, monkeypatch, generator):
    """Sliding layers of a preallocated cache hand over plain tensors; a kernel could not be traced."""
    attention, module = AttentionInterface()["turboquant"], Module()
    query = torch.randn(2, 4, 1, 32, generator=generator)
    keys, values = (torch.randn(2, 2, 50, 32, generator=generator) for _ in range(2))
    mask = torch.arange(50).expand(2, 1, 1, -1) < 40
    expected, _ = attention(module, query, keys, values, mask, **options)

    def kernels(*_):
        raise AssertionError("expected the reference")

    monkeypatch.setattr(backends, "_choose", kernels)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    out, _ = compiled(module, query, keys, values, mask, **options)
    assert torch.allclose(out, expected, atol=1e-6)
