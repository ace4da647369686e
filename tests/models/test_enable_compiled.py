"""`enable` where steps are compiled: which memory a call gets, and what it must never see.

The rules are those of a GPU; transformers is told to compile on the CPU, too.
"""

import copy
import weakref

import pytest
import torch
import torch._dynamo.utils
from architectures import build, prompt
from transformers import CompileConfig

import tq_cache
from tq_cache import TurboQuantCache, generation
from tq_cache.hf.layers import PreallocatedLayer
from tq_cache.storage import room

NEW_TOKENS = 8  # of which one completes a block of the longest prompts, in the graph
FIXED = dict(max_new_tokens=NEW_TOKENS, pad_token_id=0, eos_token_id=None, do_sample=False)
OPTIONS = dict(residual_length=64, skip_layers=("sliding_window",))


def compile_config() -> CompileConfig:
    config = CompileConfig(fullgraph=True, backend="eager", mode=None)
    config._compile_all_devices = True
    return config


@pytest.fixture
def model():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return build("llama", "sdpa")


def spy(model) -> list:
    """Weak references to the caches of calls, and the addresses of their memory."""
    seen: list = []

    def after(module, args, kwargs, out):
        cache = kwargs["past_key_values"]
        if not torch.compiler.is_compiling() and int(cache.get_seq_length()) == kwargs["input_ids"].shape[1]:  # new
            layer = cache.layers[-1]
            preallocated = isinstance(layer, PreallocatedLayer)
            seen.append((weakref.ref(cache), layer.storage.states.ring_keys.data_ptr() if preallocated else None))

    model.register_forward_hook(after, with_kwargs=True)
    return seen


def run(model, length: int, batch: int = 2, **options):
    inputs = {name: x[:batch] for name, x in prompt(model, length, seed=length).items()}
    return model.generate(**inputs, **FIXED | options, compile_config=compile_config())


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_calls_share_memory_and_one_compilation_and_see_nothing_of_each_other(model, name):
    model = build(name, "sdpa")
    enabled = tq_cache.enable(model, **OPTIONS)
    calls, lengths = spy(model), (126, 100, 131, 57, 126)
    outs = [run(model, length) for length in lengths[:-1]]
    assert enabled.report().layers[-1].tokens == lengths[-2] + NEW_TOKENS - 1
    assert "last call: compiled: room for 1,024 tokens per sequence; " in repr(enabled)
    outs.append(run(model, lengths[-1]))  # in the same memory: a report holds nothing
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert not torch._dynamo.utils.counters["graph_break"]
    assert graphs == 1 + (name == "gemma3_text")  # one more before the window is full
    assert len({address for _, address in calls}) == 1 and len(calls) == len(lengths)
    assert torch.equal(outs[0], outs[-1])
    for length, out in zip(lengths, outs, strict=True):
        cache = TurboQuantCache(model.config, max_cache_len=1024, **OPTIONS)
        inputs = prompt(model, length, seed=length)
        assert torch.equal(out, model.generate(**inputs, **FIXED, past_key_values=cache))
    assert enabled.makers[0]._held[0].room == 1024


def test_who_gets_what_memory(model):
    """Without a graph: nothing here is about compiling."""
    maker = tq_cache.enable(model, **OPTIONS).makers[0]
    config = model.generation_config
    config.compile_config = compile_config()
    lend = lambda sequences, most: maker._preallocated(sequences, most, config)  # noqa: E731

    def layers(sequences: int, most: int):  # the storage of a cache that nobody keeps
        return weakref.ref(lend(sequences, most).layers[0].storage)

    model.config.max_position_embeddings = 4096
    first = lend(2, 500)
    assert first.layers[0].max_cache_len == 1024
    second = layers(2, 500)
    assert second() is not first.layers[0].storage  # which is still held
    assert layers(2, 1024) is second
    assert layers(2, 3) is second
    other_batch = layers(1, 500)
    assert other_batch is not second
    assert layers(1, 500) is other_batch
    grown = layers(1, 1025)
    assert grown is not other_batch and grown().max_length == 2048
    assert layers(1, 500) is grown
    with torch.inference_mode():
        in_inference_mode = layers(1, 500)
    assert in_inference_mode is not grown and in_inference_mode().max_length == 1024
    ordinary = layers(1, 500)
    assert ordinary is not in_inference_mode
    model.to(torch.bfloat16)
    in_16_bits = layers(1, 500)
    assert in_16_bits is not ordinary
    config.disable_compile = True
    assert lend(1, 500) is None
    config.disable_compile = False
    assert layers(1, 500) is in_16_bits  # which the call that did not compile left


@pytest.mark.parametrize(("most", "before", "room"), [
    (1, 0, 1024), (1024, 0, 1024), (1025, 0, 2048), (5000, 4096, 6144), (33000, 0, 33792), (131073, 0, 135168),
])  # fmt: skip
def test_room(model, most, before, room):
    model.config.max_position_embeddings = 131072
    assert tq_cache.enable(model).makers[0]._room(most, before) == room


@pytest.mark.slow
def test_in_inference_mode_and_out_of_it(model):
    """Tensors made inside cannot leave it: neither has the other's memory."""
    expected = run(model, 100)
    tq_cache.enable(model, **OPTIONS | dict(residual_length=128))  # nothing is packed yet
    for inference in (True, True, False, True):
        with torch.inference_mode(inference):
            assert torch.equal(run(model, 100), expected)


@pytest.mark.slow
def test_what_grows(model):
    """Returned caches, beams, assisted decoding, chunks; and what a residual of no whole blocks asks for."""
    with tq_cache.enable(model, **OPTIONS):
        calls = spy(model)
        out = run(model, 100, return_dict_in_generate=True, max_new_tokens=2)
        run(model, 100, num_beams=2, max_new_tokens=2)
        run(model, 100, 1, prompt_lookup_num_tokens=2, max_new_tokens=2)
        run(model, 100, prefill_chunk_size=50, max_new_tokens=2)
        assert [address for _, address in calls] == [None] * 4 and out.past_key_values.get_seq_length() == 101
    with tq_cache.enable(model, residual_length=100):
        run(model, 100, max_new_tokens=2)
        assert calls[-1][1] is None
    with tq_cache.enable(model, **OPTIONS, max_cache_len=3000) as same:
        out = run(model, 100, return_dict_in_generate=True, max_new_tokens=2)
        held = out.past_key_values.layers
        assert held[0].max_cache_len == 3072
        tokens = int(out.past_key_values.get_seq_length())
        run(same, 120, max_new_tokens=2)
        assert tokens == int(out.past_key_values.get_seq_length()) == 101 and calls[-1][1] != calls[-2][1]


HELD = {
    "copy": copy.copy,
    "layers": lambda cache: cache.layers,
    "layer": lambda cache: cache.layers[1],
    "keys": lambda cache: cache.layers[1].keys,
}


@pytest.mark.parametrize("part", [
    pytest.param(name, marks=() if name in ("copy", "keys") else pytest.mark.slow) for name in HELD
])  # fmt: skip
def test_what_outlives_a_call_is_not_overwritten(part):
    """Without a graph: greedy steps by hand over what is lent."""
    model = build("gemma3_text", "sdpa")
    maker = tq_cache.enable(model, residual_length=64, sink_tokens=0).makers[0]
    config = model.generation_config
    config.compile_config = compile_config()

    def call(seed: int) -> TurboQuantCache:
        cache = maker._preallocated(2, 60, config)
        with torch.no_grad():
            model(**prompt(model, 40, seed=seed), past_key_values=cache)
            model(prompt(model, 1, seed=seed)["input_ids"], past_key_values=cache)
        return cache

    def address(seed: int) -> int:
        return call(seed).layers[1].storage.states.ring_keys.data_ptr()

    assert address(0) == address(1)  # nobody holds anything
    held = HELD[part](call(0))
    before = copy.deepcopy(held)
    call(1)
    layer = lambda x: x.layers[1] if hasattr(x, "layers") else x[1] if isinstance(x, list) else x  # noqa: E731
    tensor = lambda x: x if isinstance(x, torch.Tensor) else layer(x).keys  # noqa: E731
    assert torch.equal(tensor(held), tensor(before))
    assert address(0) == address(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3"])
def test_no_limit_reserves_what_the_model_has_positions_for_and_grows(model, name, monkeypatch):
    model = build(name, "turboquant")
    model.config.max_position_embeddings = 64
    for module in (generation, room):
        monkeypatch.setattr(module, "LEAST_ROOM", 64)
    inputs = prompt(model, 140, seed=140)
    by_hand = TurboQuantCache(model.config, max_cache_len=512, **OPTIONS)
    expected = model.generate(**inputs, **FIXED | dict(max_new_tokens=60), past_key_values=by_hand)
    enabled = tq_cache.enable(model, **OPTIONS)
    stop = lambda ids, scores: torch.full((len(ids),), ids.shape[1] >= 200)  # noqa: E731
    for _ in range(2):
        out = run(model, 140, max_new_tokens=10**6, stopping_criteria=[stop])
        cache = enabled.makers[0]._held[0].cache
        assert [layer.max_cache_len for layer in cache.layers if isinstance(layer, PreallocatedLayer)][0] == 384
        assert "384 tokens per sequence, of 1,015,808 asked for (the model has 64 positions)" in str(cache.report())
        del cache
    assert torch.equal(out, expected)
    enabled.undo()
    assert "384 tokens per sequence, of" in repr(enabled)  # what there was
    assert enabled.makers[0]._held == []
    assert max(layer.tokens for layer in enabled.report().layers) == 199


@pytest.mark.slow
def test_an_exception_leaves_nothing_behind(model):
    tq_cache.enable(model, **OPTIONS)
    expected = run(model, 100, max_new_tokens=4)

    def fail(ids, scores):
        raise KeyError("from a processor")

    with pytest.raises(KeyError, match="from a processor"):
        run(model, 140, max_new_tokens=4, logits_processor=[fail])
    assert torch.equal(run(model, 100, max_new_tokens=4), expected)
    tq_cache.disable(model)
    assert model.config._attn_implementation == "sdpa"
