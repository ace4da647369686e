"""A decode step of a whole model that caches latents (MLA), by cache, eager and compiled: milliseconds and bytes.

    python benchmarks/latent_step.py --room --out benchmarks/results/latent_step_h200.json

The model has DeepSeek-V2-Lite's shape (27 layers, hidden 2048, 16 heads, rank 512, rotary 64) in DeepSeek-V3's code,
random weights in bfloat16, and a dense MLP of 10,944 in every layer, about the weights that V2-Lite's experts read for
one token.  Caches are filled with random latents; steps are timed as in `generate.py`.  The floor is the time to read
weights and cache once at the copy speed of the same run.

`--room` measures the shapes of a batch one after the other in one cache with room for the longest: a preallocated one
is then compiled once, which is most of the time that this takes.  Without it every shape has its own.
"""

import argparse
import gc
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from generate import EXTRA, make_cache, step_ms
from measure import copy_gb_s, write
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM

from tq_cache.report import held_bytes

SHAPES = ((1, 1024), (1, 32768), (8, 32768))
WARM_UP = 5  # steps that `step_ms` does not count


def make_model(layers: int) -> torch.nn.Module:
    config = DeepseekV3Config(
        vocab_size=32000, hidden_size=2048, intermediate_size=10944, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=16, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, first_k_dense_replace=layers, max_position_embeddings=140000, num_mtp_layers=0,
    )  # fmt: skip
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = DeepseekV3ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def fill(cache: Any, config: DeepseekV3Config, batch: int, tokens: int) -> None:
    """The same random tokens in every layer: a step does not care which."""
    widths = config.kv_lora_rank, config.qk_rope_head_dim
    states = [torch.randn(batch, 1, tokens, width, device="cuda", dtype=torch.bfloat16) for width in widths]
    for layer in range(config.num_hidden_layers):
        cache.update(*states, layer)


def measure(
    model: Any, name: str, mode: str, batch: int, lengths: list[int], steps: int, copy: float
) -> Iterator[dict[str, Any]]:
    """A row for each length of one cache, the shortest first."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    torch.cuda.empty_cache()
    config, held, room = model.config, 0, max(lengths) + EXTRA
    cache, attention = make_cache(name, mode, config, max(lengths))
    model.set_attn_implementation(attention)
    weights = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    for tokens in sorted(lengths):
        begun = time.monotonic()
        fill(cache, config, batch, tokens - held)
        ms = step_ms(model, cache, mode, batch, tokens, steps)
        held = tokens + WARM_UP + steps
        size = sum(held_bytes(layer) for layer in cache.layers)
        row = dict(cache=name, mode=mode, batch=batch, tokens=tokens, room=room if mode == "compiled" else None)
        row |= dict(ms_per_step=round(ms, 3), tokens_per_s=round(1e3 * batch / ms, 1), cache_bytes=size)
        row |= dict(floor_ms=round((weights + size) / copy / 1e6, 3), seconds=round(time.monotonic() - begun, 1))
        if breaks := sum(torch._dynamo.utils.counters["graph_break"].values()):  # then it is no compiled step
            row["graph_breaks"] = breaks
        print(line(row), flush=True)
        yield row


def line(row: dict[str, Any]) -> str:
    breaks = f"{row['graph_breaks']} graph breaks: " if "graph_breaks" in row else ""
    found = (
        f"{breaks}{row['batch']:3} x {row['tokens']:7,}  {row['cache']:12} {row['mode']:8} {row['ms_per_step']:8.2f} ms"
    )
    size = row["cache_bytes"] / 1e9
    return f"{found}  floor {row['floor_ms']:6.2f} ms  {size:6.2f} GB  ({row['seconds']:.0f} s with its compilation)"


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """What was to be shown (issue 14), and whether it was."""
    ms = {(row["cache"], row["mode"], row["batch"], row["tokens"]): row["ms_per_step"] for row in rows}
    found = []
    for name in dict.fromkeys(row["cache"] for row in rows if row["cache"] not in ("DynamicCache", "StaticCache")):
        short, long = (ms.get((name, "compiled", 1, tokens)) for tokens in (1024, 32768))
        if short and long:
            verdict = "ok" if long <= 1.3 * short else "MISSED"
            found.append(f"{name} compiled, 32,768 tokens: {long / short:.2f}x of 1,024, at most 1.3x: {verdict}")
        plain, ours = ms.get(("DynamicCache", "eager", 8, 32768)), ms.get((name, "compiled", 8, 32768))
        if plain and ours:
            verdict = "ok" if plain >= 10 * ours else "MISSED"
            found.append(
                f"{name} compiled, 8 x 32,768, DynamicCache over it: {plain / ours:.1f}x, at least 10x: {verdict}"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[f"{batch}x{tokens}" for batch, tokens in SHAPES])
    parser.add_argument("--eager", nargs="*", default=["DynamicCache", "fp8_e4m3", "tq4"])
    parser.add_argument("--compiled", nargs="*", default=["tq4", "fp8_e4m3", "StaticCache"])
    parser.add_argument("--room", action="store_true", help="one cache for all shapes of a batch")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no cache after so long")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begun, rows = time.monotonic(), []
    torch.manual_seed(0)
    model, copy = make_model(options.layers), copy_gb_s()
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    batches = [[shape] for shape in shapes]
    if options.room:
        batches = [[shape for shape in shapes if shape[0] == batch] for batch in dict.fromkeys(x for x, _ in shapes)]
    cases = [(name, "eager", each) for name, each in itertools.product(options.eager, batches)]
    cases += [(name, "compiled", each) for name, each in itertools.product(options.compiled, batches)]
    for name, mode, each in cases:
        if time.monotonic() - begun > options.seconds:
            print(f"no time left for {name}, {mode}, {each}", flush=True)
            continue
        try:
            for row in measure(model, name, mode, each[0][0], [tokens for _, tokens in each], options.steps, copy):
                rows.append(row)
                write(options.out, rows)
        except Exception as problem:  # one that fails leaves the others
            text = " ".join(str(problem).split())
            print(f"{name}, {mode}, {each}: {type(problem).__name__}: {text[:300]}", flush=True)
    print("\n".join(verdicts(rows)))


if __name__ == "__main__":
    main()
