"""Every MLA class of transformers, in every way to generate: absorbed attention gives what expanded attention gives.

A few of each by default, all of them marked slow.
"""

import pytest
import torch
import torch._dynamo.utils
from architectures import build, prompt
from latent_models import INDEXED, LATENT_MODELS, latent_model
from transformers import CompileConfig, GenerationConfig

from tq_cache import TurboQuantCache

LENGTH, NEW_TOKENS = 140, 8
MODES = {
    "greedy": {},
    "left_padding": {"left_padding": 9},
    "sampling": {"do_sample": True, "top_k": 20},
    "beam": {"num_beams": 3},
    "beam_return_sequences": {"num_beams": 4, "num_return_sequences": 2},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "assisted": {"assistant": True},
    "chunked_prefill": {"prefill_chunk_size": 47},
    "large_chunks": {"prefill_chunk_size": 70},  # over a packed past, and so many that they are expanded
    "one_token_prompt": {"length": 1, "max_new_tokens": LENGTH},
    "second_turn": {"second_turn": True},
}
# Recurrent states cannot be rolled back, so transformers itself refuses these.
RECURRENT = {"bailing_hybrid", "kimi_linear", "glm5_next"}
ROLLS_BACK = {"prompt_lookup", "assisted"}
DEFAULT = {
    ("deepseek_v3", mode) for mode in ("greedy", "left_padding", "beam", "prompt_lookup", "large_chunks", "second_turn")
} | {("deepseek_v32", "greedy"), ("glm5_next", "greedy"), ("mistral_large4", "left_padding"), ("minicpm3", "greedy")}


def cases(names, modes) -> list:
    """Those of `DEFAULT`, and all others marked slow."""
    return [
        pytest.param(name, mode, marks=() if (name, mode) in DEFAULT else pytest.mark.slow)
        for name in names
        for mode in modes
        if not (name in RECURRENT and mode in ROLLS_BACK)
    ]


def make_cache(model, **options) -> TurboQuantCache:
    # Nearly everything packed, and nothing measured before: who expands shows calibration no queries and no padding.
    options = (
        dict(residual_length=0, sink_tokens=1, smooth=0.0, center=False, skip_layers=("sliding_window",)) | options
    )
    return TurboQuantCache(model.config, "tq4", **options)


def generate(model, cache, mode: str) -> torch.Tensor:
    options = dict(MODES[mode])
    inputs = prompt(model, options.pop("length", LENGTH))
    if padding := options.pop("left_padding", 0):
        inputs["input_ids"][1, :padding] = 0
        inputs["attention_mask"][1, :padding] = 0
    if options.pop("assistant", False):
        options["assistant_model"] = build("llama", seed=1)
    if mode in ROLLS_BACK:
        inputs = {name: x[:1] for name, x in inputs.items()}
    torch.manual_seed(0)
    length, again = options.pop("max_new_tokens", NEW_TOKENS), options.pop("second_turn", False)
    config = GenerationConfig(max_new_tokens=length, pad_token_id=0, do_sample=options.pop("do_sample", False))
    config.disable_compile = True
    out = model.generate(**inputs, past_key_values=cache, generation_config=config, **options)
    if again:
        out = torch.cat([out, prompt(model, 9, seed=5)["input_ids"]], dim=1)
        out = model.generate(out, past_key_values=cache, generation_config=config)
    return out


def latent_layers(cache) -> list:
    """Layers of latents that hold any: of those that share another's, only the indexer's keys are held."""
    return [x for x in cache.layers if hasattr(x, "storage") and x.absorbs and x.storage.length]


@pytest.mark.parametrize(("name", "mode"), cases(LATENT_MODELS, MODES))
def test_absorbed_generates_what_expanded_does(name, mode):
    model = latent_model(name)
    expected = generate(model, make_cache(model, absorb=False), mode)
    cache = make_cache(model)
    same = torch.equal(generate(model, cache, mode), expected)
    assert same
    layers = latent_layers(cache)
    assert layers and all(layer.path == "absorbed" for layer in layers)
    assert all(layer.storage.packed_length >= 64 for layer in layers)


def logits_of(model, cache, sizes, mask) -> torch.Tensor:
    ids = torch.randint(3, 128, (2, sum(sizes)), generator=torch.Generator().manual_seed(0))
    outs, end = [], 0
    with torch.no_grad():
        for chunk in ids.split(sizes, 1):
            end += chunk.shape[1]
            positions = (mask[:, :end].cumsum(1) - 1).clamp_min(0)[:, end - chunk.shape[1] :]
            out = model(chunk, attention_mask=mask[:, :end], position_ids=positions, past_key_values=cache)
            outs.append(out.logits)
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize(("name", "memory"), [
    pytest.param(name, memory, marks=() if name in ("deepseek_v3", "mistral_large4") else pytest.mark.slow)
    for name in LATENT_MODELS
    for memory in ("growing", "preallocated")
    if memory == "growing" or name not in INDEXED
])  # fmt: skip
def test_logits_are_those_of_expanded_attention(name, memory):
    """Padded, prefilled in chunks below and above what is absorbed, and stepped, where nothing changes the tokens."""
    model, sizes = latent_model(name), [100, 100, 30, *[1] * 40]
    mask = torch.ones(2, sum(sizes), dtype=torch.long)
    mask[1, :25] = 0
    options = dict(residual_length=64, **({} if memory == "growing" else {"max_cache_len": 300}))
    expected = logits_of(model, make_cache(model, absorb=False, **options), sizes, mask)
    cache = make_cache(model, **options)
    logits = logits_of(model, cache, sizes, mask)
    real = mask.bool()[..., None]
    error = (((logits - expected) * real).norm() / (expected * real).norm()).item()
    assert error < 1e-4
    assert all(layer.path == "absorbed" for layer in latent_layers(cache))


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name == "deepseek_v3" else pytest.mark.slow)
    for name in LATENT_MODELS
    if name not in INDEXED | {"longcat_flash"}  # whose experts are looked up by a loop over what the device counts
])  # fmt: skip
def test_a_step_is_one_graph(name):
    """That holds one `attend_latents` a layer, and never makes tensors of what is packed."""
    model = latent_model(name)
    inputs = prompt(model, 90)
    inputs["attention_mask"][0, :25] = 0
    options = dict(residual_length=64, sink_tokens=4, max_cache_len=170)
    config = GenerationConfig(max_new_tokens=50, pad_token_id=0, do_sample=False)
    expected = model.generate(
        **inputs,
        past_key_values=make_cache(model, absorb=False, **options),
        generation_config=config,
        disable_compile=True,
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    operations: list[str] = []

    def backend(graph, _):
        operations.extend(str(node.target) for node in graph.graph.nodes if "tq_cache" in str(node.target))
        return graph.forward

    config.compile_config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config.compile_config._compile_all_devices = True
    cache = make_cache(model, **options)
    assert cache.is_compileable
    same = torch.equal(model.generate(**inputs, past_key_values=cache, generation_config=config), expected)
    assert same
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    layers = latent_layers(cache)
    assert sum("attend_latents" in x for x in operations) == sum("update" in x for x in operations) == len(layers)
    assert not any("materialize" in x for x in operations)
    assert all(layer.path == "absorbed" and layer.storage.view().packed_length == 64 for layer in layers)


@pytest.mark.slow
def test_a_growing_cache_that_is_compiled_expands():
    """Records hold lengths, others at each step: what torch.compile traces gets handles, and the path says so."""
    model = latent_model("deepseek_v3")
    expected = logits_of(model, make_cache(model, absorb=False), [90, 1, 1, 1], torch.ones(2, 93, dtype=torch.long))
    forward = model.forward
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        model.forward = torch.compile(forward, backend="eager")
        cache = make_cache(model)
        logits = logits_of(model, cache, [90, 1, 1, 1], torch.ones(2, 93, dtype=torch.long))
    finally:
        model.forward = forward
    assert ((logits - expected).norm() / expected.norm()).item() < 1e-4
    assert all(layer.path.startswith("expanded: torch.compile traces only steps") for layer in latent_layers(cache))
    breaks = torch._dynamo.utils.counters["graph_break"]
    assert breaks and all("outside_graph" in reason for reason in breaks), list(breaks)
