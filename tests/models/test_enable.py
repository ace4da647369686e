"""`enable`: every way to call generate() uses a TurboQuantCache, as if it had been handed over; `disable` undoes it."""

import copy
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
from architectures import build, prompt
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
    TextIteratorStreamer,
    pipeline,
)

import tq_cache
from tq_cache import TurboQuantCache
from tq_cache.generation import HOOK

LENGTH = 140  # of prompts: enough to calibrate on
PACKED = dict(residual_length=0, skip_layers=("sliding_window",))
FIXED = dict(max_new_tokens=8, pad_token_id=0, eos_token_id=None)


@pytest.fixture
def model():
    return build("llama", "sdpa")


def spy(model) -> list:
    """The caches that a model is given from now on, one entry a call of generate()."""
    seen: list = []

    def before(module, args, kwargs):
        cache = kwargs.get("past_key_values")
        if cache is not None and (not seen or seen[-1] is not cache):
            seen.append(cache)

    model.register_forward_pre_hook(before, with_kwargs=True)
    return seen


def by_hand(model, inputs, **options):
    """As a user does who hands a cache over."""
    model.set_attn_implementation("turboquant")
    torch.manual_seed(0)
    cache = TurboQuantCache(model.config, "tq3", **PACKED)
    out = model.generate(**inputs, past_key_values=cache, **FIXED | options)
    model.set_attn_implementation("sdpa")
    return out


WAYS = {
    "greedy": {},
    "sampling": dict(do_sample=True, top_k=20),
    "beams": dict(num_beams=3),
    "sequences": dict(do_sample=True, num_return_sequences=3),
    "prompt_lookup": dict(prompt_lookup_num_tokens=3),
    "assisted": dict(assistant=True),
    "chunked_prefill": dict(prefill_chunk_size=47),
    "padded": dict(padding=9),
}


@pytest.mark.parametrize("way", [
    pytest.param(way, marks=pytest.mark.slow if way in ("sampling", "chunked_prefill") else ()) for way in WAYS
])  # fmt: skip
def test_every_way_gives_what_a_cache_by_hand_gives(model, way):
    options, inputs = dict(WAYS[way]), prompt(model, LENGTH)
    if padding := options.pop("padding", 0):
        inputs["input_ids"][1, :padding] = inputs["attention_mask"][1, :padding] = 0
    if way in ("assisted", "prompt_lookup"):
        inputs = {name: x[:1] for name, x in inputs.items()}
    if options.pop("assistant", False):
        options["assistant_model"] = build("llama", "sdpa", seed=1)
        assistants = spy(options["assistant_model"])
        tq_cache.enable(options["assistant_model"], "tq4")
    options.setdefault("do_sample", False)
    expected = by_hand(model, inputs, **options)
    caches = spy(model)
    tq_cache.enable(model, "tq3", **PACKED)
    torch.manual_seed(0)
    assert torch.equal(model.generate(**inputs, **FIXED, **options), expected)
    assert len(caches) == 1 and isinstance(caches[0], TurboQuantCache) and caches[0].preset.name == "tq3"
    assert all(layer.storage.packed_length >= 128 for layer in caches[0].layers)
    if way == "assisted":
        assert assistants and all(isinstance(cache, TurboQuantCache) for cache in assistants)


def test_pipeline_streamer_and_chat(embedded):
    model, tokenizer = embedded
    caches = spy(model)
    with tq_cache.enable(model):
        generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
        said = generate(["Once upon a time", "The key"], max_new_tokens=8, do_sample=False, return_full_text=False)
        assert len(said) == 2 and len(caches) == 2
        inputs = tokenizer("Once upon a time", return_tensors="pt")
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        options = dict(inputs, streamer=streamer, max_new_tokens=8, do_sample=False)
        thread = threading.Thread(target=model.generate, kwargs=options)
        thread.start()
        assert "".join(streamer).startswith(said[0][0]["generated_text"])
        thread.join()
        ids = inputs["input_ids"]
        for _ in range(2):  # turns of a chat that sends all of it again
            ids = model.generate(torch.cat([ids, ids[:, :3]], dim=1), max_new_tokens=4, do_sample=False)
    assert len(caches) == 5 and all(isinstance(cache, TurboQuantCache) for cache in caches)
    assert len({id(cache) for cache in caches}) == 5


def test_a_returned_cache_goes_on(model):
    inputs = prompt(model, LENGTH)
    with tq_cache.enable(model, "tq3", **PACKED):
        options = dict(FIXED, do_sample=False, return_dict_in_generate=True)
        first = model.generate(**inputs, **options)
        second = model.generate(first.sequences, past_key_values=first.past_key_values, **options)
        assert second.past_key_values is first.past_key_values
        assert first.past_key_values.get_seq_length() == LENGTH + 15
        both = model.generate(**inputs, **options | dict(max_new_tokens=16))
    assert torch.equal(second.sequences, both.sequences)


# ---------------------------------------------------------------------------------------------- what else is asked for


@pytest.mark.parametrize("make", [
    lambda config: DynamicCache(config=config), TurboQuantCache, lambda config: StaticCache(config, max_cache_len=150),
])  # fmt: skip
def test_a_cache_of_the_user_wins(model, make):
    expected = model.generate(**prompt(model, LENGTH), **FIXED, do_sample=False)
    tq_cache.enable(model)
    cache, caches = make(model.config), spy(model)
    out = model.generate(**prompt(model, LENGTH), **FIXED, do_sample=False, past_key_values=cache)
    assert caches == [cache] and (isinstance(cache, TurboQuantCache) or torch.equal(out, expected))


@pytest.mark.parametrize(("asked", "kind"), [("static", StaticCache), ("dynamic", DynamicCache)])
def test_a_cache_implementation_asked_for_wins(model, asked, kind):
    expected = model.generate(**prompt(model, LENGTH), **FIXED, do_sample=False)
    tq_cache.enable(model)
    caches = spy(model)
    out = model.generate(**prompt(model, LENGTH), **FIXED, do_sample=False, cache_implementation=asked)
    assert torch.equal(out, expected) and [type(cache) for cache in caches] == [kind]
    with pytest.raises(ValueError, match="Passing both `cache_implementation`"):
        both = dict(cache_implementation=asked, past_key_values=DynamicCache(config=model.config))
        model.generate(**prompt(model, LENGTH), **FIXED, **both)


def test_no_cache_is_made_where_none_is_wanted(model):
    expected = model.generate(**prompt(model, LENGTH), **FIXED, do_sample=False, use_cache=False)
    tq_cache.enable(model)
    caches = spy(model)
    out = model.generate(**prompt(model, LENGTH), **FIXED, do_sample=False, use_cache=False)
    assert torch.equal(out, expected) and caches == []


# ------------------------------------------------------------------------------------------------- on, off, and copies


def state(model) -> tuple:
    configs = [model.config, *(module.config for module in model.modules() if hasattr(module, "config"))]
    return HOOK in model.__dict__, [config._attn_implementation for config in configs], set(model.__dict__)


def test_disable_puts_back_what_was_there(model):
    before = state(model)
    tq_cache.enable(model, "tq4")
    tq_cache.enable(model, "tq2")
    assert state(model)[0] and model.config._attn_implementation == "turboquant"
    tq_cache.disable(model)
    assert state(model) == before
    tq_cache.disable(model)  # nothing to do
    assert state(model) == before
    with tq_cache.enable(model, "tq4") as enabled, tq_cache.enable(model, "tq2"):
        assert enabled is model
    assert state(model) == before
    with pytest.raises(KeyError), tq_cache.enable(model):
        raise KeyError
    assert state(model) == before


def test_an_attribute_of_somebody_else_is_called_and_put_back(model):
    calls: list = []

    def foreign(*args, **kwargs):
        calls.append(args)
        return type(model)._prepare_cache_for_generation(model, *args, **kwargs)

    model._prepare_cache_for_generation = foreign
    with tq_cache.enable(model):
        out = model.generate(**prompt(model, 5), **FIXED, return_dict_in_generate=True)
        assert isinstance(out.past_key_values, TurboQuantCache) and len(calls) == 1
    assert model._prepare_cache_for_generation is foreign


def test_what_is_wrong_raises_and_changes_nothing(model):
    before = state(model)
    with pytest.raises(ValueError, match="expected a preset"):
        tq_cache.enable(model, "tq5")
    with pytest.raises(TypeError, match="skip_layer"):
        tq_cache.enable(model, skip_layer=())
    assert state(model) == before
    with pytest.raises(TypeError, match="expected a transformers model that generates .* got LlamaModel"):
        tq_cache.enable(model.model)
    with pytest.raises(TypeError, match="of a wrapper"):
        tq_cache.enable(torch.nn.Sequential(model))


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_enabled_by_itself(model, twin_of):
    inputs, options = prompt(model, LENGTH), dict(FIXED, do_sample=False)
    tq_cache.enable(model, "tq3", **PACKED)
    expected = model.generate(**inputs, **options)
    twin = twin_of(model)
    tq_cache.disable(model)
    assert twin.config._attn_implementation == "turboquant" and model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        model.lm_head.weight.zero_()  # the copy does not know
    out = twin.generate(**inputs, **options, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected) and isinstance(out.past_key_values, TurboQuantCache)
    tq_cache.disable(twin)
    assert HOOK not in twin.__dict__ and twin.config._attn_implementation == "sdpa"


def test_a_saved_model_knows_nothing_of_it(model, tmp_path):
    tq_cache.enable(model)
    model.save_pretrained(tmp_path)
    assert "turboquant" not in "".join(path.read_text() for path in tmp_path.glob("*.json"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert HOOK not in loaded.__dict__ and loaded.config._attn_implementation == "sdpa"


def test_custom_generate(model):
    inputs, options = prompt(model, LENGTH), dict(FIXED, do_sample=False)
    expected, before = by_hand(model, inputs, **options), state(model)
    out = model.generate(
        **inputs, **options, custom_generate=".", trust_remote_code=True, preset="tq3", cache_options=PACKED
    )
    assert torch.equal(out, expected) and state(model) == before


# ----------------------------------------------------------------------------------------------------- other models


def test_encoder_decoder():
    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=32, d_kv=32, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=1)
    model = T5ForConditionalGeneration(config).eval()
    inputs = dict(input_ids=torch.randint(3, 64, (2, 12)), do_sample=False, **FIXED)
    inputs["decoder_input_ids"] = torch.randint(3, 64, (2, 140))
    for beams in (1, 3):
        expected = model.generate(**inputs, num_beams=beams, return_dict_in_generate=True, output_scores=True)
        with tq_cache.enable(model, residual_length=256):
            out = model.generate(**inputs, num_beams=beams, return_dict_in_generate=True, output_scores=True)
            assert torch.equal(out.sequences, expected.sequences)
            assert isinstance(out.past_key_values, EncoderDecoderCache)
            assert isinstance(out.past_key_values.self_attention_cache, TurboQuantCache)
        with tq_cache.enable(model, "fp8_e4m3", residual_length=0):
            out = model.generate(**inputs, num_beams=beams, return_dict_in_generate=True)
            cache = out.past_key_values.self_attention_cache
            assert all(layer.storage.packed_length == 128 for layer in cache.layers)


def test_composite_model():
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    config = LlavaConfig(
        text_config=LlamaConfig(**sizes, vocab_size=64),
        vision_config=CLIPVisionConfig(**sizes, image_size=8, patch_size=4, projection_dim=64),
        image_token_index=63, image_seq_length=4, vision_feature_layer=-1,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(config).eval()
    ids = torch.randint(3, 60, (2, 200))
    ids[:, 5:9] = 63
    inputs = dict(input_ids=ids, pixel_values=torch.randn(2, 3, 8, 8), do_sample=False, **FIXED)
    expected, before = model.generate(**inputs), state(model)
    with tq_cache.enable(model, residual_length=256):
        assert torch.equal(model.generate(**inputs), expected)
    with tq_cache.enable(model, "fp8_e4m3", residual_length=0):
        cache = model.generate(**inputs, return_dict_in_generate=True).past_key_values
        assert all(layer.storage.packed_length == 192 for layer in cache.layers)
    assert state(model) == before


@pytest.mark.parametrize("name", [
    "falcon", *[pytest.param(name, marks=pytest.mark.slow) for name in ("bloom", "minimax_m3_vl_text")],
])  # fmt: skip
def test_a_model_with_an_attention_of_its_own_is_warned_of(name):
    model = build(name)
    inputs, before = prompt(model, LENGTH), state(model)
    with pytest.warns(UserWarning, match=f"{type(model).__name__} has an attention of its own.* dequantised") as said:
        tq_cache.enable(model, residual_length=256)
    assert len(said) == 1
    out = model.generate(**inputs, **FIXED, do_sample=False, return_dict_in_generate=True)
    tq_cache.disable(model)
    assert isinstance(out.past_key_values, TurboQuantCache) and state(model) == before
    assert torch.equal(out.sequences, model.generate(**inputs, **FIXED, do_sample=False))


def test_a_model_with_caches_of_its_own_is_refused(model, monkeypatch):
    monkeypatch.setattr(type(model), "_supports_default_dynamic_cache", classmethod(lambda cls: False))
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM makes caches of its own"):
        tq_cache.enable(model)


def test_hooks_of_several_devices_take_a_growing_cache(model):
    enabled = tq_cache.enable(model)
    config = SimpleNamespace(return_dict_in_generate=False, is_assistant=False, prefill_chunk_size=None)
    mode = "greedy_search"
    assert enabled.makers[0]._why_growing(config, mode) == ""
    model._hf_hook = object()
    assert enabled.makers[0]._why_growing(config, mode) == "hooks of accelerate"
    del model._hf_hook
    model.hf_device_map = {"a": 0, "b": 1}
    assert enabled.makers[0]._why_growing(config, mode) == "several devices"
