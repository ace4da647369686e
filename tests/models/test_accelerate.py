"""Models that accelerate's hooks run, on devices of their own or with weights brought for their turn: the same tokens.

What two GPUs do with it is in tests/gpu.
"""

import pytest
import torch
import torch._dynamo.utils
from accelerate import cpu_offload, dispatch_model
from architectures import build
from transformers import CompileConfig

from tq_cache import PRESETS, TurboQuantCache


def dispatched(kind: str, folder, attention: str = "turboquant", name: str = "llama"):
    """A model with a hook on every module that has weights, which stay, or wait in host memory, or on a disk."""
    model = build(name, attention)
    layers = [f"model.layers.{n}" for n in range(len(model.model.layers))]
    if kind == "cpu":
        cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        device_map = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", *layers], "cpu")
        device_map |= dict.fromkeys(layers[1::2], "disk") if kind == "disk" else {}
        dispatch_model(model, device_map, main_device="cpu", offload_dir=folder, force_hooks=True)
    hooked = [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]
    assert all(any(name.startswith(f"{layer}.") for name in hooked) for layer in layers)
    assert next(model.model.layers[1].parameters()).is_meta == (kind != "hooks")
    return model


def generated(model, preset: str, max_cache_len: int | None = None, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and logits of a padded batch; a block is packed on the way."""
    ids = torch.randint(3, model.config.vocab_size, (2, 186), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    cache = TurboQuantCache(model.config, preset, residual_length=0, max_cache_len=max_cache_len)
    options = dict(past_key_values=cache, max_new_tokens=12, disable_compile=True) | options
    out = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options)
    return out.sequences, torch.stack(out.logits)


def assert_equal(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> None:
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


KINDS = ["hooks", "cpu", "disk"]


@pytest.mark.parametrize("max_cache_len", [None, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks(kind, max_cache_len, tmp_path):
    expected = generated(build("llama", "turboquant"), "tq4", max_cache_len)
    assert_equal(generated(dispatched(kind, tmp_path), "tq4", max_cache_len), expected)


@pytest.mark.slow
@pytest.mark.parametrize("max_cache_len", [None, 256])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset(preset, kind, max_cache_len, tmp_path):
    expected = generated(build("llama", "turboquant"), preset, max_cache_len)
    assert_equal(generated(dispatched(kind, tmp_path), preset, max_cache_len), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3_text", "qwen3_next"])
def test_other_models(name, attention, kind, tmp_path):
    tokens, logits = generated(build(name, attention), "tq4")
    other_tokens, other_logits = generated(dispatched(kind, tmp_path, attention, name), "tq4")
    assert torch.equal(other_tokens, tokens)
    torch.testing.assert_close(other_logits, logits, atol=1e-4, rtol=1e-4)  # experts are summed in another order


WAYS = {
    "sampling": dict(do_sample=True, top_k=5),
    "beams": dict(num_beams=3),
    "lookup": dict(prompt_lookup_num_tokens=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_ways_to_generate(kind, way, tmp_path):
    if (kind, way) == ("cpu", "lookup"):
        pytest.skip("transformers looks candidates up on the device of the first weight, which is none")
    model, own = dispatched(kind, tmp_path), build("llama", "turboquant")
    outs = []
    for each in (own, model):
        torch.manual_seed(0)
        ids = torch.randint(3, 64, (1, 186), generator=torch.Generator().manual_seed(0))
        cache = TurboQuantCache(each.config, residual_length=0)
        outs.append(each.generate(ids, past_key_values=cache, max_new_tokens=8, **WAYS[way]))
    assert torch.equal(*outs)


def test_the_cache_is_not_moved_by_hooks():
    """Hooks move what has a method `to` from device to device; a cache must not have one."""
    assert not hasattr(TurboQuantCache, "to")


@pytest.mark.slow
def test_compiled_steps_break_at_every_hook_and_answer_alike(tmp_path):
    """README "Several GPUs" says so: without hooks a step is one graph."""
    breaks, expected = {}, generated(build("llama", "turboquant"), "tq4", 256)
    for kind in ("none", "hooks"):
        model = build("llama", "turboquant") if kind == "none" else dispatched(kind, tmp_path)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        config = CompileConfig(fullgraph=False, backend="eager", mode=None)
        config._compile_all_devices = True
        assert_equal(generated(model, "tq4", 256, compile_config=config, disable_compile=False), expected)
        breaks[kind] = sum(torch._dynamo.utils.counters["graph_break"].values())
    assert breaks["none"] == 0 < breaks["hooks"]
