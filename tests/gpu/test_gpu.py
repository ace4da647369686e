"""The whole cache on CUDA devices: `make gpu` on a machine that has one."""

import pytest
import torch
from transformers import AutoModelForCausalLM, CompileConfig, DynamicCache, LlamaConfig

from tq_cache import PRESETS, TurboQuantCache
from tq_cache.planning.prefill import prefill_bytes
from tq_cache.tools.runs import EMBEDDED_MODEL, load_model
from tq_cache.tools.tasks import build_case

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


def run_in_pieces(dtype: torch.dtype, backend: str, preset: str, attention: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a padded batch, fed in pieces: prefill, a chunk, single tokens, several; and which count."""
    model, tokenizer = load_model(EMBEDDED_MODEL, dtype=dtype)
    model.set_attn_implementation(attention)
    texts = [build_case("passkey", n, lambda text: len(tokenizer(text).input_ids), seed=n).prompt for n in (700, 500)]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to("cuda:0")
    cache = TurboQuantCache(model.config, preset, backend=backend, **PACKED)
    outs, end = [], 0
    for length in (400, 150, 1, 1, 1, 7, inputs.input_ids.shape[1] - 561, 1):
        piece, end = slice(end, end + length), end + length
        positions = inputs.attention_mask.cumsum(1)[:, piece].sub(1).clamp_min(0)
        with torch.inference_mode():
            out = model(
                inputs.input_ids[:, piece],
                attention_mask=inputs.attention_mask[:, :end],
                position_ids=positions,
                past_key_values=cache,
            )
        outs.append(out.logits.double().log_softmax(-1))
    return torch.cat(outs, dim=1), inputs.attention_mask[:, :end].bool()


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("preset", ["fp8_e4m3", "fp8_e5m2", "k8v4", "4bit_nc", "3bit_nc", "tq4", "tq3", "tq2"])
def test_kernels_give_what_the_reference_gives(preset, dtype, attention):
    expected, counts = run_in_pieces(torch.float32, "reference", preset, attention)
    own, _ = run_in_pieces(dtype, "reference", preset, attention)
    out, _ = run_in_pieces(dtype, "triton", preset, attention)
    error, budget = ((x - expected)[counts].square().mean().sqrt().item() for x in (out, own))
    # In float32 the reference is the expectation itself; what is left are codes of elements between two of them.
    assert error <= max(2 * budget, 5e-3), (error, budget)


@pytest.mark.parametrize("attention", ["turboquant", "sdpa"])
@pytest.mark.parametrize("preset", PRESETS)
def test_recall(embedded, case, preset, attention):
    model, tokenizer = embedded
    model.set_attn_implementation(attention)
    assert case.matches(answer(model, tokenizer, case, TurboQuantCache(model.config, preset, **PACKED)))


@pytest.mark.parametrize("preset", ["fp8_e5m2", "k8v4", "4bit_nc", "tq3"])
def test_recall_of_a_preallocated_cache(embedded, case, preset):
    model, tokenizer = embedded
    model.set_attn_implementation("turboquant")
    cache = TurboQuantCache(model.config, preset, residual_length=64, skip_layers=(), max_cache_len=1200)
    inputs = tokenizer(case.prompt, return_tensors="pt").to("cuda:0")
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=80, do_sample=False, disable_compile=True)
    assert case.matches(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :]))


def test_compiled_steps_are_one_graph(embedded, case):
    """As `generate` compiles by itself (inductor, CUDA graphs), a break in the graph being an error."""
    model, tokenizer = embedded
    model.set_attn_implementation("turboquant")
    cache = TurboQuantCache(model.config, "tq4", residual_length=64, skip_layers=(), max_cache_len=1200)
    inputs = tokenizer(case.prompt, return_tensors="pt").to("cuda:0")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = CompileConfig(fullgraph=True)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=80, do_sample=False, compile_config=config)
    assert case.matches(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :]))
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize(("attention", "backend"), [("turboquant", "reference"), ("sdpa", "auto"), ("eager", "auto")])
def test_what_waits_for_the_device_is_left_out_of_cuda_graphs(embedded, case, attention, backend):
    """Of a compiled step: the reference, and tokens dequantised for an attention that cannot read bits."""
    model, tokenizer = embedded
    model.set_attn_implementation(attention)
    options = dict(residual_length=64, skip_layers=(), max_cache_len=1200, backend=backend)
    inputs = tokenizer(case.prompt, return_tensors="pt").to("cuda:0")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    out = model.generate(
        **inputs, past_key_values=TurboQuantCache(model.config, "tq4", **options), max_new_tokens=80, do_sample=False
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert case.matches(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :]))


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
    report = cache.report()
    assert report.peaks == {f"cuda:{torch.cuda.current_device()}": torch.cuda.max_memory_allocated()}
    assert report.peak_nbytes > report.nbytes and "the process held at most" in str(report)


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


def test_a_prefill_takes_what_shapes_say():
    config = LlamaConfig(
        vocab_size=1000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=4, dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="turboquant").eval()
    ids = torch.randint(3, 1000, (2, 4096), device="cuda")
    for _ in range(2):  # once for what is allocated once
        cache = TurboQuantCache(config, "tq4")
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.inference_mode():
            model(ids, past_key_values=cache, logits_to_keep=1)
        took = torch.cuda.max_memory_allocated() - held - cache.nbytes
    assert took == pytest.approx(prefill_bytes(config, 4096, 2), rel=0.05)
