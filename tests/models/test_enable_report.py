"""What `enable` returns says what became of the last call: its cache, and whether steps were compiled or why not."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from architectures import build, prompt
from transformers import DynamicCache, T5Config, T5ForConditionalGeneration

import tq_cache
from tq_cache import TurboQuantCache
from tq_cache.generation import HOOK

LENGTH = 140  # of prompts: enough to calibrate on
PACKED = dict(residual_length=0, skip_layers=("sliding_window",))
FIXED = dict(max_new_tokens=2, pad_token_id=0, eos_token_id=None, do_sample=False)


@pytest.fixture
def model():
    return build("llama", "sdpa")


def call(model, **options):
    return model.generate(**prompt(model, LENGTH), **FIXED | options)


def tokens(enabled) -> set[int]:
    return {layer.tokens for layer in enabled.report().layers}


def test_before_any_call(model):
    enabled = tq_cache.enable(model, "tq3")
    assert repr(enabled) == "Enabled(LlamaForCausalLM, tq3: 4 of 4 layers packed; last call: none yet)"
    with pytest.raises(RuntimeError, match="got none yet; call generate"):
        enabled.report()


@pytest.mark.parametrize(("options", "reason"), [
    (dict(num_beams=2), "beam search"),
    (dict(return_dict_in_generate=True), "return_dict_in_generate without max_cache_len"),
    (dict(prefill_chunk_size=50), "prefill_chunk_size"),
    (dict(disable_compile=True), "disable_compile=True"),
    ({}, "transformers compiles no steps of this model on cpu"),
])  # fmt: skip
def test_a_call_on_a_cache_that_grows(model, options, reason):
    enabled = tq_cache.enable(model, "tq3", **PACKED)
    kept: list = []
    model.register_forward_hook(
        lambda module, args, kwargs, out: kept.append(weakref.ref(kwargs["past_key_values"].layers[0].storage)),
        with_kwargs=True,
    )
    call(model, **options)
    gc.collect()
    assert kept and all(storage() is None for storage in kept)  # its memory is free
    report = enabled.report()
    assert tokens(enabled) == {LENGTH + 1} and {layer.packed_tokens for layer in report.layers} == {128}
    said = f"tq3: 4 of 4 layers packed; last call: growing: {reason}; {report.nbytes:,} bytes; "
    assert said in repr(enabled)


def test_a_cache_that_somebody_has_is_reported_as_it_is(model):
    enabled = tq_cache.enable(model, **PACKED)
    out = call(model, return_dict_in_generate=True)
    assert tokens(enabled) == {LENGTH + 1}
    with torch.no_grad():
        model(out.sequences[:, -1:], past_key_values=out.past_key_values)
    assert tokens(enabled) == {LENGTH + 2} and str(enabled.report()) == str(out.past_key_values.report())
    enabled.undo()
    del out
    assert tokens(enabled) == {LENGTH + 2} and HOOK not in model.__dict__


@pytest.mark.parametrize("own", [lambda config: dict(past_key_values=DynamicCache(config=config)),
                                 lambda config: dict(use_cache=False)])  # fmt: skip
def test_a_call_without_our_cache(model, own):
    enabled = tq_cache.enable(model)
    call(model)
    call(model, **own(model.config))
    assert "last call: one " in repr(enabled)
    with pytest.raises(RuntimeError, match="expected a cache that `enable` made"):
        enabled.report()


def test_of_layers_that_nobody_packs_and_of_a_cache_that_nobody_fills(model):
    enabled = tq_cache.enable(model, skip_layers=(0,))
    assert "3 of 4 layers packed" in repr(enabled)

    def put_another(module, args, kwargs):  # as PEFT's prefix tuning does
        return args, kwargs | dict(past_key_values=DynamicCache(config=model.config))

    model.register_forward_pre_hook(put_another, with_kwargs=True)
    call(model, max_new_tokens=1)
    assert repr(enabled).endswith("; it was given no tokens)") and tokens(enabled) == {0}


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_had_no_call(model, twin_of):
    enabled = tq_cache.enable(torch.nn.DataParallel(model), **PACKED)
    call(model)
    twin = twin_of(model)
    own = getattr(twin, HOOK).__self__.enabled
    assert "none yet" in repr(own) and own.given is twin and tokens(enabled) == {LENGTH + 1}
    call(twin)
    assert tokens(own) == {LENGTH + 1}


def test_of_an_encoder_decoder():
    config = T5Config(vocab_size=64, d_model=32, d_kv=32, d_ff=64, num_layers=3, num_heads=4, decoder_start_token_id=1)
    model = T5ForConditionalGeneration(config).eval()
    enabled = tq_cache.enable(model)
    model.generate(torch.randint(3, 64, (2, 12)), **FIXED)
    assert "last call: growing: encoder-decoder; " in repr(enabled)
    assert tokens(enabled) == {2}


def test_another_attention_is_warned_of_once(model):
    expected = TurboQuantCache(model.config)
    tq_cache.enable(model)
    model.set_attn_implementation("sdpa")
    with pytest.warns(UserWarning, match="expected the attention that enable set, 'turboquant', got 'sdpa'") as said:
        call(model)
    assert len(said) == 1 and said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(model)
        tq_cache.disable(model)
        with tq_cache.enable(model):
            call(model)
        call(model, past_key_values=expected)


def test_output_attentions_are_those_of_sdpa(model):
    """There are none; transformers' logger says so once."""
    options = dict(output_attentions=True, return_dict_in_generate=True)
    expected = call(model, **options)
    with tq_cache.enable(model, residual_length=256):
        out = call(model, **options)
    assert torch.equal(out.sequences, expected.sequences) and out.attentions == expected.attentions
