"""The whole cache on CUDA devices: `make gpu` on a machine that has one."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tq_cache import PRESETS, TurboQuantCache
from tq_cache.demo import EMBEDDED_MODEL, load_model
from tq_cache.tasks import build_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PACKED = dict(residual_length=16, skip_layers=())


@pytest.fixture(scope="module")
def embedded():
    return load_model(EMBEDDED_MODEL, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def case(embedded):
    _, tokenizer = embedded
    return build_case("passkey", 1000, lambda text: len(tokenizer(text).input_ids), seed=1, depth=0.3)


def answer(model, tokenizer, case, cache) -> str:
    inputs = tokenizer(case.prompt, return_tensors="pt").to("cuda:0")
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("preset", PRESETS)
def test_recall(embedded, case, preset, attention):
    model, tokenizer = embedded
    model.set_attn_implementation(attention)
    assert case.matches(answer(model, tokenizer, case, TurboQuantCache(model.config, preset, **PACKED)))


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
def test_offloading(embedded, case, attention):
    model, tokenizer = embedded
    model.set_attn_implementation(attention)
    cache = TurboQuantCache(model.config, offloading=True, **PACKED)
    assert case.matches(answer(model, tokenizer, case, cache))
    devices = {layer.storage.key.packed.device.type for layer in cache.layers}
    assert "cpu" in devices


def test_bytes_are_those_the_device_holds(embedded, case):
    model, tokenizer = embedded
    model.set_attn_implementation("turboquant")
    answer(model, tokenizer, case, DynamicCache(config=model.config))  # whatever is allocated once
    before = torch.cuda.memory_allocated()
    cache = TurboQuantCache(model.config, **PACKED)
    answer(model, tokenizer, case, cache)
    held = torch.cuda.memory_allocated() - before
    assert held == pytest.approx(cache.nbytes, rel=0.05)  # the allocator rounds every tensor up to 512 bytes


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_layers_on_several_devices(embedded, case):
    _, tokenizer = embedded
    devices = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 0}
    devices |= {f"model.layers.{index}": index // 4 for index in range(8)}
    model = AutoModelForCausalLM.from_pretrained(
        EMBEDDED_MODEL, dtype=torch.bfloat16, device_map=devices, attn_implementation="turboquant"
    )
    cache = TurboQuantCache(model.config, "tq4", **PACKED)
    assert case.matches(answer(model, tokenizer, case, cache))
    assert [layer.storage.key.packed.device.index for layer in cache.layers] == [0] * 4 + [1] * 4
