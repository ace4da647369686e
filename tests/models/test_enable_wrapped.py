"""`enable` and `disable` of what wraps a model: PEFT, torch.compile, DDP, a pipeline."""

import warnings
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from architectures import build, prompt
from transformers import DynamicCache, pipeline

import tq_cache
from tq_cache import TurboQuantCache
from tq_cache.generation import HOOK

FIXED = dict(max_new_tokens=2, pad_token_id=0, eos_token_id=None, do_sample=False)


class Peft(torch.nn.Module):
    """As PEFT's, of whose methods `enable` needs these."""

    def __init__(self, model, kind: str) -> None:
        super().__init__()
        self.base_model, self.active_peft_config = model, SimpleNamespace(peft_type=kind)

    def get_base_model(self):
        return self.base_model


class Replicated(torch.nn.Module):
    def __init__(self, model) -> None:
        super().__init__()
        self.module = model


WRAPPERS = {
    "peft": lambda model: Peft(model, "LORA"),
    "compiled": torch.compile,
    "compiled peft": lambda model: torch.compile(Peft(model, "LORA")),
    "replicated": Replicated,
    "replicated and compiled": lambda model: Replicated(torch.compile(model)),
    "pipeline": lambda model: SimpleNamespace(model=model),
}


@pytest.fixture
def model():
    return build("llama", "sdpa")


def cache_of(model):
    return model.generate(**prompt(model, 5), **FIXED, return_dict_in_generate=True).past_key_values


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_model_inside_is_enabled(model, name):
    wrapped = WRAPPERS[name](model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enabled = tq_cache.enable(wrapped, "tq3")
    assert enabled.model is model and cache_of(model).preset.name == "tq3"
    tq_cache.disable(wrapped)
    assert HOOK not in model.__dict__ and model.config._attn_implementation == "sdpa"
    with tq_cache.enable(wrapped) as given:
        assert given is wrapped and isinstance(cache_of(model), TurboQuantCache)
    assert HOOK not in model.__dict__


def test_a_compiled_model_and_a_pipeline_generate(embedded):
    model, tokenizer = embedded
    compiled = torch.compile(model, backend="eager")
    with tq_cache.enable(compiled) as given:
        assert isinstance(cache_of(given), TurboQuantCache)
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    with tq_cache.enable(generate, "tq3") as given:
        enabled = getattr(model, HOOK).__self__.enabled
        given("Once upon a time", max_new_tokens=2, do_sample=False)
    assert enabled.report().preset == "tq3" and enabled.report().layers[0].tokens > 2
    assert HOOK not in model.__dict__


@pytest.mark.parametrize("wrapper", [lambda peft: peft, Replicated])
def test_an_adapter_with_a_cache_of_its_own_is_warned_of(model, wrapper):
    with pytest.warns(UserWarning, match="PREFIX_TUNING makes a DynamicCache of its own") as said:
        tq_cache.enable(wrapper(Peft(model, "PREFIX_TUNING")))
    assert len(said) == 1 and said[0].filename == __file__


@pytest.mark.parametrize(
    "other", [torch.nn.Linear(2, 2), SimpleNamespace(model=torch.nn.Linear(2, 2)), MagicMock(), None]
)
def test_what_wraps_no_model_is_refused(other):
    with pytest.raises(TypeError, match="expected a transformers model that generates"):
        tq_cache.enable(other)
    tq_cache.disable(other)  # nothing to do


@pytest.mark.parametrize("kind", ["lora", "prompt", "prefix"])
def test_peft(model, kind):
    peft = pytest.importorskip("peft")
    config = {
        "lora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]),
        "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    }[kind]()
    wrapped = peft.get_peft_model(model, config).eval()
    if kind != "prefix":
        with tq_cache.enable(wrapped):
            assert isinstance(cache_of(wrapped), TurboQuantCache)
        return
    with pytest.warns(UserWarning, match="PREFIX_TUNING makes a DynamicCache of its own"):
        enabled = tq_cache.enable(wrapped)
    assert isinstance(cache_of(wrapped), DynamicCache) and not isinstance(cache_of(wrapped), TurboQuantCache)
    assert "it was given no tokens" in repr(enabled)
