"""Two processes that share a model's heads (gloo): as one process."""

import warnings

import pytest
import ranks
import torch
from architectures import ARCHITECTURES, config_for, prompt

from tq_cache import TurboQuantCache
from tq_cache.compat import CROP_TAKES_LENGTH as BEFORE_5_18

TP = dict(tp_plan="auto")
EP = dict(tp_size=2, enable_expert_parallel=True) if BEFORE_5_18 else dict(tp_size=2, ep_size=2)
# Wrong, or an error, with a DynamicCache, too.
NOT_IN_TRANSFORMERS = {"doge", "hrm_text", "inkling_text"}
if BEFORE_5_18:  # attention sinks are cut, and mixed with what is not
    NOT_IN_TRANSFORMERS |= {"granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash"}
# "turboquant" refuses its sparsity by blocks.
SPARSE_BY_BLOCKS = {"minimax_m3_vl_text"}
# They do not run in preallocated memory in one process, either.
GROWING_ONLY = {"llama4", "llama4_text"} if BEFORE_5_18 else set()


def has_plan(model_type: str) -> bool:
    return bool(getattr(config_for(model_type), "base_model_tp_plan", None))


def generated(path, attention: str, options: dict, distributed: dict) -> dict:
    """Tokens, logits and what report() says of a padded batch, with blocks packed on the way."""
    model = ranks.load(path, attention, **distributed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no layer of this model will be packed")
        cache = TurboQuantCache(model.config, **options)
    out = model.generate(
        **prompt(model, 190),
        **dict(past_key_values=cache, max_new_tokens=8, do_sample=False, disable_compile=True, eos_token_id=None),
        **dict(output_logits=True, return_dict_in_generate=True),
    )
    report = cache.report()
    shares = {layer.share for layer in report.layers if layer.tokens}
    packed = sum(layer.nbytes for layer, plan in zip(report.layers, cache.plans, strict=True) if plan.packed)
    scales = [layer.storage.view().key for layer in cache.layers if hasattr(layer, "storage")]
    scales = [None if states is None else states.calibration.scale for states in scales]
    return dict(tokens=out.sequences, logits=torch.stack(out.logits), shares=shares, nbytes=packed, scales=scales,
                text=str(report))  # fmt: skip


def kl(logits: torch.Tensor, other: torch.Tensor) -> float:
    """Of the distributions, in nats, on average."""
    first, second = logits.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((first.exp() * (first - second)).sum(-1).mean())


def assert_as_one(folder, model_type: str, attention: str = "turboquant", distributed=TP, **options) -> list[dict]:
    path = ranks.saved(model_type, folder)
    options = {"preset": "tq4", "residual_length": 0} | options
    one = generated(path, attention, options, {})
    several = ranks.run(generated, folder, path, attention, options, distributed)
    for other in several:
        assert torch.equal(other["tokens"], one["tokens"])
        assert torch.equal(other["logits"], several[0]["logits"])
        assert kl(one["logits"], other["logits"]) <= 1e-6
    return [one, *several]


@pytest.mark.parametrize(("model_type", "share"), [
    ("llama", "1 of 2 KV heads"),
    ("minicpm3", "whole on every rank"),  # latents, of which each rank reads its heads' share
    ("phi3", "whole on every rank"),  # keys, values and queries from one projection
])  # fmt: skip
def test_as_one_process(tmp_path, model_type, share):
    one, *several = assert_as_one(tmp_path, model_type)
    assert one["shares"] == {""} and "this rank" not in one["text"]
    for other in several:
        assert other["shares"] == {share} and "this rank" in other["text"]
        assert other["nbytes"] == one["nbytes"] // (2 if " of " in share else 1)


@pytest.mark.slow
@pytest.mark.parametrize("max_cache_len", [None, 256])
@pytest.mark.parametrize("model_type", [*filter(has_plan, ARCHITECTURES)])
def test_architectures(tmp_path, model_type, max_cache_len):
    if model_type in NOT_IN_TRANSFORMERS:
        pytest.skip("transformers' own tensor parallelism differs, or raises, with a DynamicCache as well")
    if max_cache_len is not None and model_type in GROWING_ONLY:
        pytest.skip("not in preallocated memory, in one process either")
    attention = "sdpa" if model_type in SPARSE_BY_BLOCKS else "turboquant"
    try:
        assert_as_one(tmp_path, model_type, attention, max_cache_len=max_cache_len)
    except NotImplementedError as error:
        assert max_cache_len is not None and "can read preallocated memory" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3"])
def test_expert_parallel(tmp_path, model_type):
    """Experts are shared out, attention as the plan of tensor parallelism says, or not at all."""
    if not getattr(config_for(model_type), "base_model_ep_plan", None):
        pytest.skip("this version of transformers has no plan for its experts")
    assert_as_one(tmp_path, model_type, distributed=EP)


@pytest.mark.parametrize("max_cache_len", [None, 256])
def test_a_scale_per_head_is_cut(tmp_path, max_cache_len):
    """Each rank takes those of its heads; a single one is for all."""
    options = dict(preset="fp8_e4m3", max_cache_len=max_cache_len)
    one, *several = assert_as_one(tmp_path, "llama", **options, k_scale=torch.tensor([0.02, 0.3]), v_scale=0.1)
    torch.testing.assert_close(one["scales"][0].flatten(), torch.tensor([0.02, 0.3] * 2))
    for rank, other in enumerate(several):
        for whole, part in zip(one["scales"], other["scales"], strict=True):
            assert torch.equal(part, whole[:, rank : rank + 1])


def refused(path, options: dict) -> str:
    """What is said of scales that cannot be a share, before anything is held."""
    model = ranks.load(path, "turboquant", **TP)
    cache = TurboQuantCache(model.config, "fp8_e4m3", residual_length=0, **options)
    heads = torch.randn(2, 2, 4, 100, 32)  # as of a model with 4 heads on this rank
    with pytest.raises(ValueError, match="expected scales of keys for the 4 KV heads of this process") as caught:
        cache.update(*heads, 0)
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    return str(caught.value)


@pytest.mark.parametrize("max_cache_len", [None, 256])
def test_a_number_of_scales_that_is_no_share(tmp_path, max_cache_len):
    path = ranks.saved("llama", tmp_path)
    options = dict(k_scale=torch.ones(2), max_cache_len=max_cache_len)
    assert len(set(ranks.run(refused, tmp_path, path, options))) == 1
    with pytest.raises(ValueError, match="expected 1 or 2 scales of keys"):  # more than the model has, at once
        TurboQuantCache(ranks.load(path, "turboquant").config, "fp8_e4m3", k_scale=torch.ones(4))


def test_pipeline_stages(tmp_path):
    """A later stage has no layer 0 to ask for the length: left padding and preallocated memory need it."""
    for options in ({}, {"max_cache_len": 256, "residual_length": 64}):
        assert_stages(tmp_path, "llama", "turboquant", options)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("max_cache_len", [None, 256])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"])
def test_pipeline_stages_of_other_models(tmp_path, model_type, max_cache_len, attention):
    if BEFORE_5_18 and model_type == "qwen3_next" and max_cache_len is None:
        pytest.skip("transformers 5.17 asks the last layer of all whether linear attention has a state")
    assert_stages(tmp_path, model_type, attention, dict(max_cache_len=max_cache_len, residual_length=64))


def staged(path, attention: str, options: dict, distributed: dict) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    model = ranks.load(path, attention, **distributed)
    cache = TurboQuantCache(model.config, "tq4", **options)
    inputs = prompt(model, 186)
    inputs["attention_mask"][0, :30] = 0
    out = model.generate(
        **inputs,
        **dict(past_key_values=cache, max_new_tokens=12, do_sample=False, disable_compile=True),
        **dict(output_logits=True, return_dict_in_generate=True),
    )
    return out.sequences, torch.stack(out.logits), [layer.tokens for layer in cache.report().layers]


def assert_stages(folder, model_type: str, attention: str, options: dict) -> None:
    path = ranks.saved(model_type, folder)
    tokens, logits, held = staged(path, attention, options, {})
    stages = ranks.run(staged, folder, path, attention, options, dict(pp_size=2))
    for other_tokens, other_logits, _ in stages:
        assert torch.equal(other_tokens, tokens) and torch.equal(other_logits, logits)
    assert [sum(counts) for counts in zip(*(stage[2] for stage in stages), strict=True)] == held
    assert stages[0][2][-1] == 0 and stages[1][2][0] == 0
