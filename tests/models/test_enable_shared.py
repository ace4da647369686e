"""`enable` and `disable` of models that share something: a config, all parts (a shallow copy), one part."""

import copy

import pytest
import torch
from architectures import build, prompt
from transformers import LlamaForCausalLM

import tq_cache
from tq_cache import TurboQuantCache
from tq_cache.generation import HOOK

FIXED = dict(max_new_tokens=2, pad_token_id=0, eos_token_id=None, do_sample=False)


@pytest.fixture
def model():
    return build("llama", "sdpa")


def attention(model) -> str:
    return model.config._attn_implementation


def cache_of(model):
    return model.generate(**prompt(model, 5), **FIXED, return_dict_in_generate=True).past_key_values


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_the_last_of_a_config_puts_its_attention_back(model, order):
    models = [model, LlamaForCausalLM(model.config), LlamaForCausalLM(model.config)]
    for one in models:
        tq_cache.enable(one)
    for index in order:
        assert attention(model) == "turboquant"
        tq_cache.disable(models[index])
        assert HOOK not in models[index].__dict__
    assert attention(model) == "sdpa"


def test_whoever_is_gone_holds_nothing(model):
    tq_cache.enable(model)
    tq_cache.enable(LlamaForCausalLM(model.config))  # which nobody keeps
    tq_cache.disable(model)
    assert attention(model) == "sdpa"


@pytest.mark.parametrize("first", [0, 1])
def test_copies_of_models_that_share_a_config_share_theirs(model, first):
    models = [model, LlamaForCausalLM(model.config)]
    for one in models:
        tq_cache.enable(one)
    twins = copy.deepcopy(models)
    assert twins[0].config is twins[1].config is not model.config
    for left, twin in ((2, twins[first]), (1, twins[1 - first])):
        assert attention(twin) == "turboquant", left
        tq_cache.disable(twin)
    assert attention(twins[0]) == "sdpa" and attention(model) == "turboquant"


def test_undo_twice_and_in_any_order(model):
    first = tq_cache.enable(model, "tq4")
    second = tq_cache.enable(model, "tq2")
    first.undo()  # and with it what came later
    assert HOOK not in model.__dict__ and attention(model) == "sdpa"
    again = tq_cache.enable(model, "tq3")
    for undone in (first, second):
        undone.undo()
    assert cache_of(model).preset.name == "tq3" and attention(model) == "turboquant"
    for _ in range(2):
        again.undo()
    assert HOOK not in model.__dict__ and attention(model) == "sdpa"


def test_a_shallow_copy_goes_with_its_original(model):
    tq_cache.enable(model)
    twin = copy.copy(model)
    tq_cache.disable(twin)
    assert attention(model) == "turboquant"
    assert isinstance(cache_of(model), TurboQuantCache) and isinstance(cache_of(twin), TurboQuantCache)
    with tq_cache.enable(twin, "tq2"):
        assert cache_of(twin).preset.name == "tq2" and cache_of(model).preset.name == "tq4"
    tq_cache.disable(model)
    tq_cache.disable(twin)
    assert attention(model) == "sdpa"
    assert not isinstance(cache_of(model), TurboQuantCache) and not isinstance(cache_of(twin), TurboQuantCache)


def test_a_part_that_was_enabled_by_itself_stays_so(model):
    outer = build("llama", "sdpa", seed=1)
    outer.inner = model
    before = attention(outer)
    tq_cache.enable(outer, "tq4")
    tq_cache.enable(model, "tq2")
    tq_cache.disable(outer)
    assert HOOK not in outer.__dict__ and attention(outer) == before
    assert attention(model) == "turboquant" and cache_of(model).preset.name == "tq2"
    tq_cache.disable(model)
    assert HOOK not in model.__dict__ and attention(model) == "sdpa"
    with torch.no_grad():
        assert not isinstance(cache_of(outer), TurboQuantCache)
