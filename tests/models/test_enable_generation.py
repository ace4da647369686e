"""What transformers' own generation tests ask of a model, with `enable`: the same tokens, scores and shapes as without.

No token is packed (`residual_length`), so that the results are those of a 16-bit cache, exactly.  transformers' tests
are in neither its wheel nor its sdist; these are their cases.
"""

import pytest
import torch
from architectures import build, prompt
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.utils import ModelOutput

import tq_cache
from tq_cache import TurboQuantCache

FIXED = dict(pad_token_id=0, eos_token_id=None, max_new_tokens=6, do_sample=False)
LENGTH = 24  # more than a sliding window of 16
OUTPUTS = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True,
               output_attentions=True)  # fmt: skip


NO_WEIGHTS = dict(output_attentions=False)  # assisted decoding fails inside transformers where there are none (sdpa)


class Ban(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.index_fill(1, torch.tensor([5, 6, 7]), -torch.inf)


CASES = {
    "greedy": {},
    "one token": dict(max_new_tokens=1),
    "sample": dict(do_sample=True, top_k=10, temperature=0.7),
    "sequences": dict(do_sample=True, num_return_sequences=3),
    "beams": dict(num_beams=3),
    "beam sequences": dict(num_beams=3, num_return_sequences=2, length_penalty=2.0),
    "beam sample": dict(num_beams=2, do_sample=True),
    "prompt lookup": dict(prompt_lookup_num_tokens=2, **NO_WEIGHTS),
    "chunks": dict(prefill_chunk_size=7),
    "chunks and beams": dict(prefill_chunk_size=7, num_beams=2),
    "processors": dict(logits_processor=LogitsProcessorList([Ban()]), repetition_penalty=1.2, no_repeat_ngram_size=2),
    "guidance": dict(guidance_scale=1.5),
    "stop": dict(stopping_criteria=StoppingCriteriaList([lambda ids, scores: (ids >= 0).sum(1) > LENGTH + 2])),
    "no cache": dict(use_cache=False),
    "static": dict(cache_implementation="static"),
    "end token": dict(eos_token_id=list(range(0, 128, 3)), max_new_tokens=20),
    "min tokens": dict(eos_token_id=list(range(0, 128, 3)), min_new_tokens=4),
}  # fmt: skip


@pytest.fixture(params=["llama", "gemma3_text"])
def model(request):
    return build(request.param, "sdpa")


def inputs_of(model, batch: int = 2, padding: int = 5) -> dict:
    inputs = {name: x[:batch] for name, x in prompt(model, LENGTH).items()}
    if padding and batch > 1:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["input_ids"][1, :padding] = inputs["attention_mask"][1, :padding] = 0
    return inputs


def generate(model, inputs, **options):
    torch.manual_seed(0)
    return model.generate(**inputs, **FIXED | OUTPUTS | options)


def tensors(value) -> list[torch.Tensor]:
    """Those of an output, but of its cache."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, ModelOutput):
        return [x for name, part in value.items() if name != "past_key_values" for x in tensors(part)]
    return [x for part in value for x in tensors(part)] if isinstance(value, tuple) else []


def assert_same(out, expected) -> None:
    ours, theirs = tensors(out), tensors(expected)
    assert type(out) is type(expected) and [x.shape for x in ours] == [x.shape for x in theirs]
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_as_without(model, case):
    options = CASES[case]
    inputs = inputs_of(model, batch=1 if "prompt_lookup_num_tokens" in options else 2)
    expected = generate(model, inputs, **options)
    with tq_cache.enable(model, residual_length=256):
        out = generate(model, inputs, **options)
    assert_same(out, expected)
    if case not in ("no cache", "static"):
        assert isinstance(out.past_key_values, TurboQuantCache)


def test_assisted(model):
    assistant, inputs = build("llama", "sdpa", seed=1), inputs_of(model, batch=1)
    for options in (NO_WEIGHTS, NO_WEIGHTS | dict(do_sample=True)):
        expected = generate(model, inputs, assistant_model=assistant, **options)
        with tq_cache.enable(model, residual_length=256), tq_cache.enable(assistant, residual_length=256):
            assert_same(generate(model, inputs, assistant_model=assistant, **options), expected)


def test_from_embeddings(model):
    embeddings = model.get_input_embeddings()(inputs_of(model)["input_ids"]).detach()
    for inputs in (dict(inputs_embeds=embeddings), dict(inputs_embeds=embeddings) | inputs_of(model, padding=0)):
        expected = generate(model, inputs)
        with tq_cache.enable(model, residual_length=256):
            assert_same(generate(model, inputs), expected)


def test_without_a_prompt(model):
    expected = generate(model, {}, bos_token_id=1)
    with tq_cache.enable(model, residual_length=256):
        assert_same(generate(model, {}, bos_token_id=1), expected)


def test_continued(model):
    """In two calls the text of one."""
    inputs = inputs_of(model, padding=0)
    whole = generate(model, inputs, max_new_tokens=8)
    with tq_cache.enable(model, residual_length=256):
        half = generate(model, inputs, max_new_tokens=4)
        rest = generate(model, dict(input_ids=half.sequences), past_key_values=half.past_key_values, max_new_tokens=4)
        assert torch.equal(rest.sequences, whole.sequences) and rest.past_key_values is half.past_key_values
