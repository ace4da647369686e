"""A decode step of a whole model, by cache, eager and compiled: milliseconds, tokens a second, bytes.

    python benchmarks/generate.py --out benchmarks/results/generate_h200.json

Models have the shape of Llama-3.1-8B, Llama-3.2-1B or Qwen3-0.6B and random weights in bfloat16.  Caches are filled
with random keys and values (a step does not care which), steps are timed one by one with the device waited for, and
the median counts.  Every cache is given the SDPA that suits it: where lengths grow, not cuDNN's, which plans for 40 ms
or more at each new length.  `--prefill` fills caches by a real prompt instead, for the time to the first token and the
peak of memory; `--generate` times `generate()` itself, a token more of it.  The floor is the time to read weights and
cache once at the copy speed of the same run.
"""

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import copy_gb_s, write
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, LlamaConfig, PretrainedConfig, QuantizedCache, Qwen3Config, StaticCache
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from tq_cache import TurboQuantCache

LLAMA = dict(vocab_size=128256, max_position_embeddings=140000, num_key_value_heads=8, num_attention_heads=32)
MODELS = {
    "llama-8b": (
        LlamaForCausalLM,
        LlamaConfig(**LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32),
    ),
    "llama-1b": (
        LlamaForCausalLM,
        LlamaConfig(
            **LLAMA, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3-0.6b": (
        Qwen3ForCausalLM,
        Qwen3Config(
            vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, head_dim=128,
            num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=140000, tie_word_embeddings=True,
        ),
    ),
}  # fmt: skip
SHAPES = ((1, 1024), (1, 32768), (8, 32768), (1, 131072), (32, 4096))
GROWING = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
SDPA = {"eager": GROWING, "compiled": [SDPBackend.CUDNN_ATTENTION, *GROWING]}  # by mode
EXTRA = 64  # tokens of room behind the context, and steps at most


def make_model(name: str) -> torch.nn.Module:
    kind, config = MODELS[name]
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = kind(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def make_cache(name: str, mode: str, config: PretrainedConfig, tokens: int) -> tuple[object, str]:
    """A cache, and the attention function that goes with it."""
    room = tokens + EXTRA
    if name == "DynamicCache":
        return DynamicCache(config=config), "sdpa"
    if name == "StaticCache":
        return StaticCache(config=config, max_cache_len=room), "sdpa"
    if name == "QuantizedCache":  # transformers' own, 4 bits; needs optimum-quanto
        return QuantizedCache("quanto", config), "sdpa"
    return TurboQuantCache(config, name, max_cache_len=room if mode == "compiled" else None), "turboquant"


def fill(cache, config: PretrainedConfig, batch: int, tokens: int) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        shape = (batch, config.num_key_value_heads, tokens, head_dim)
        keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        cache.update(keys, values, layer)


def milliseconds(run: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
    """Of one call, the device waited for before and after."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(*args, **kwargs)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def step_ms(model, cache, mode: str, batch: int, tokens: int, steps: int) -> float:
    """Median milliseconds of one step: one token per sequence, without sampling."""
    run = model.get_compiled_call(None) if mode == "compiled" else model
    ids = torch.randint(0, 1000, (batch, 1), device="cuda")

    def one(step: int) -> None:
        position = torch.full((batch, 1), tokens + step, device="cuda")
        with torch.inference_mode(mode != "compiled"), torch.no_grad():
            run(input_ids=ids, position_ids=position, past_key_values=cache, use_cache=True)

    with sdpa_kernel(SDPA[mode]):
        return statistics.median([milliseconds(one, step) for step in range(steps + 5)][5:])


def generate_ms(model, name: str, mode: str, batch: int, tokens: int, count: int = 32) -> float:
    """Milliseconds of one more token of `generate()`: so many more, from a prompt of `tokens`."""
    ids = torch.randint(3, 1000, (batch, tokens), device=model.device)
    options = dict(attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0)
    times = []
    for new in (2, 2, 2 + count):  # the first time for what is compiled or planned
        cache, _ = make_cache(name, mode, model.config, tokens)
        length = dict(max_new_tokens=new, min_new_tokens=new, disable_compile=mode != "compiled")
        times.append(milliseconds(model.generate, ids, past_key_values=cache, **options, **length))
    return (times[2] - times[1]) / count


def prefill(model, cache, batch: int, tokens: int) -> tuple[float, int]:
    """Milliseconds of a prompt, and the peak of memory above what was held before."""
    ids = torch.randint(0, 1000, (batch, tokens), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    with torch.inference_mode():
        ms = milliseconds(model, input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return ms, torch.cuda.max_memory_allocated() - held


def measure(model, options, batch: int, tokens: int, name: str, mode: str, copy: float) -> dict:
    config = model.config
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    torch.cuda.empty_cache()
    ttft = peak = None
    cache, attention = make_cache(name, mode, config, tokens)
    model.set_attn_implementation(attention)
    if options.prefill:  # once for what is compiled or planned
        prefill(model, make_cache(name, mode, config, tokens)[0], batch, tokens)
    before = torch.cuda.memory_allocated()
    if options.prefill:
        ttft, peak = prefill(model, cache, batch, tokens)
    else:
        fill(cache, config, batch, tokens)
    size = torch.cuda.memory_allocated() - before
    ms = step_ms(model, cache, mode, batch, tokens, options.steps)
    if isinstance(cache, TurboQuantCache):  # packs once it has seen queries
        size = cache.nbytes
    del cache
    weights = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    row = dict(model=options.model, cache=name, mode=mode, batch=batch, tokens=tokens, ms_per_step=round(ms, 3))
    row |= dict(tokens_per_s=round(1e3 * batch / ms, 1), ttft_ms=ttft and round(ttft, 1), cache_bytes=size)
    if options.generate:
        row["generate_ms_per_token"] = round(generate_ms(model, name, mode, batch, tokens), 3)
        print(f"generate() {row['generate_ms_per_token']} ms a token: ", end="")
    if breaks := sum(torch._dynamo.utils.counters["graph_break"].values()):  # then it is no compiled step
        row["graph_breaks"] = breaks
        print(f"{breaks} graph breaks: ", end="")
    row |= dict(peak_bytes=peak, floor_ms=round((weights + size) / copy / 1e6, 3))
    place = f"{options.model:10} {batch:3} x {tokens:7,}  {name:12} {mode:8}"
    print(f"{place} {ms:8.2f} ms  floor {row['floor_ms']:6.2f} ms  {row['tokens_per_s']:8.1f} tokens/s", end="")
    print(f"  {size / 1e9:6.2f} GB", end="" if ttft else "\n", flush=True)
    if ttft:
        print(f"  first token {ttft:8.1f} ms, peak {peak / 1e9:.2f} GB", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--shapes", nargs="*", default=[f"{batch}x{tokens}" for batch, tokens in SHAPES])
    parser.add_argument("--eager", nargs="*", default=["DynamicCache", "tq4"])
    parser.add_argument("--compiled", nargs="*", default=["StaticCache", "tq4"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prefill", action="store_true", help="fill caches by a real prompt")
    parser.add_argument("--generate", action="store_true", help="time generate() itself, too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, copy, rows = make_model(options.model), copy_gb_s(), []
    cases = [(shape, name, "eager") for shape, name in itertools.product(options.shapes, options.eager)]
    cases += [(shape, name, "compiled") for shape, name in itertools.product(options.shapes, options.compiled)]
    for shape, name, mode in cases:  # all eager rows first
        batch, tokens = map(int, shape.split("x"))
        try:
            rows.append(measure(model, options, batch, tokens, name, mode, copy))
        except (torch.OutOfMemoryError, ImportError) as problem:
            print(f"{options.model:10} {shape:12} {name:12} {mode:8} {str(problem)[:80]}", flush=True)
        write(options.out, rows)


if __name__ == "__main__":
    main()
