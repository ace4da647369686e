"""`enable` on a CUDA device, where compiled steps on preallocated memory are the default."""

import pytest
import torch
import torch._dynamo.utils
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

import tq_cache
from tq_cache.hf.layers import PreallocatedLayer
from tq_cache.tools.runs import EMBEDDED_MODEL, load_model
from tq_cache.tools.tasks import build_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def case_of(tokenizer, tokens: int):
    return build_case("passkey", tokens, lambda text: len(tokenizer(text).input_ids), seed=tokens, depth=0.3)


def answer(model, tokenizer, case, **options) -> bool:
    inputs = tokenizer(case.prompt, return_tensors="pt").to("cuda:0")
    out = model.generate(**inputs, do_sample=False, **dict(max_new_tokens=80) | options)
    return case.matches(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :]))


def watch(model, look) -> list:
    """What `look` sees in the cache after each forward that is not compiled: prompts, where steps are."""
    seen: list = []

    def after(module, args, kwargs, out):
        if not torch.compiler.is_compiling():
            seen.append(look(kwargs["past_key_values"]))

    model.register_forward_hook(after, with_kwargs=True)
    return seen


@pytest.mark.parametrize("inference", [False, True])
def test_calls_of_other_lengths_compile_nothing_anew(inference):
    model, tokenizer = load_model(EMBEDDED_MODEL, dtype=torch.bfloat16)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    seen = watch(model, lambda cache: cache.layers[0].flat.num_tokens.data_ptr())
    with tq_cache.enable(model) as enabled, torch.inference_mode(inference):
        for tokens in (1000, 700, 900, 400, 1000):
            case = case_of(tokenizer, tokens)
            assert answer(enabled, tokenizer, case, compile_config=CompileConfig(fullgraph=True))
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert len(seen) == 5 and len(set(seen)) == 1


def test_the_default_is_compiled_and_the_rest_grows():
    model, tokenizer = load_model(EMBEDDED_MODEL, dtype=torch.bfloat16)
    case, kinds = case_of(tokenizer, 600), watch(model, lambda cache: isinstance(cache.layers[0], PreallocatedLayer))
    tq_cache.enable(model)
    for options, preallocated in [
        ({}, True),
        (dict(do_sample=True, num_return_sequences=2, top_k=1), True),
        (dict(num_beams=2), False),
        (dict(prompt_lookup_num_tokens=3), False),
        (dict(disable_compile=True), False),
        (dict(prefill_chunk_size=256), False),
    ]:
        kinds.clear()
        inputs = tokenizer(case.prompt, return_tensors="pt").to("cuda:0")
        out = model.generate(**inputs, **dict(max_new_tokens=8, do_sample=False) | options)
        assert case.matches(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])), options
        assert kinds and set(kinds) == {preallocated}, options


@pytest.mark.filterwarnings("ignore:no layer of this model will be packed")
@pytest.mark.parametrize("heads", [16, 8, 4])
def test_narrow_heads(heads):
    """Of 4, 8 and 16 channels: none that the kernels know."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=heads, num_key_value_heads=2)  # fmt: skip
    model = LlamaForCausalLM(config).eval().cuda()
    inputs = dict(inputs=torch.randint(3, 64, (2, 150), device="cuda"), max_new_tokens=8, pad_token_id=0)
    inputs |= dict(eos_token_id=None, do_sample=False, output_logits=True, return_dict_in_generate=True)
    expected = model.generate(**inputs)
    with tq_cache.enable(model):
        out = model.generate(**inputs)
    torch.testing.assert_close(out.logits[0], expected.logits[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out.logits[1], expected.logits[1], rtol=1e-3, atol=1e-3)
