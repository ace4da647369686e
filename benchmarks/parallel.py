"""Two GPUs against one: a step with accelerate's maps, and by tensor parallelism; milliseconds, bytes of each rank.

    python benchmarks/parallel.py --out benchmarks/results/parallel_h200.json

A model of Llama-3.1-8B's shape with fewer layers and random weights in bfloat16, written to a folder once, since
transformers shards what it loads.  Caches are filled with random keys and values; steps are timed as in `generate.py`.
What is asked of the figures is checked at the end, and printed: the command fails where it does not hold.
"""

import argparse
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model
from generate import LLAMA, SDPA, make_cache, milliseconds, step_ms
from measure import write
from torch.nn.attention import sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from tq_cache import TurboQuantCache

SHAPES = ("8x32768", "1x32768", "1x1024", "32x4096")
CACHES = (("DynamicCache", "eager"), ("tq4", "eager"), ("StaticCache", "compiled"), ("tq4", "compiled"))
WARM_STEPS, STEPS = 5, 30  # of each of accelerate's maps


def save_model(folder: Path, layers: int) -> None:
    config = LlamaConfig(**LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        LlamaForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)


def fill(cache: Any, config: LlamaConfig, batch: int, tokens: int, heads: int, devices: list[Any]) -> None:
    for layer, device in enumerate(devices):
        shape = (batch, heads, tokens, config.hidden_size // config.num_attention_heads)
        keys, values = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        cache.update(keys, values, layer)


def measure(model: Any, name: str, mode: str, shape: tuple[int, int], heads: int, devices: list[Any]) -> dict:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.cuda.empty_cache()
    batch, tokens = shape
    cache, attention = make_cache(name, mode, model.config, tokens)
    model.set_attn_implementation(attention)
    before = sum(torch.cuda.memory_allocated(n) for n in range(torch.cuda.device_count()))
    fill(cache, model.config, batch, tokens, heads, devices)
    size = sum(torch.cuda.memory_allocated(n) for n in range(torch.cuda.device_count())) - before
    ms = step_ms(model, cache, mode, batch, tokens, 20)
    size = cache.nbytes if isinstance(cache, TurboQuantCache) else size  # which packs once it has seen queries
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    row = dict(cache=name, mode=mode, batch=batch, tokens=tokens, ms_per_step=round(ms, 3), cache_bytes=size)
    return row | dict(graph_breaks=breaks)


def worker(folder: Path, shapes: list[tuple[int, int]], out: Path) -> None:
    """One rank of as many as torchrun started, which may be one."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    options = {"distributed_config": DistributedConfig(tp_plan="auto")} if world > 1 else {"device_map": "cuda:0"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()
    heads, devices = model.config.num_key_value_heads // world, [model.device] * model.config.num_hidden_layers
    rows = []
    for shape in shapes:
        for name, mode in CACHES:
            torch.manual_seed(0)  # the same tokens on every rank
            rows.append(dict(gpus=world, way="tensor parallel") | measure(model, name, mode, shape, heads, devices))
            if rank == 0:
                print(rows[-1], flush=True)
    if rank == 0:
        out.write_text(json.dumps(rows))
    if world > 1:
        del model
        torch._dynamo.reset()  # NCCL waits for graphs that hold collectives
        gc.collect()
        torch.distributed.destroy_process_group()


def tensor_parallel(folder: Path, shapes: list[str]) -> list[dict]:
    rows = []
    for world in (1, 2):
        out = folder / f"rows{world}.json"
        command = ["-m", "torch.distributed.run", f"--nproc-per-node={world}", "--standalone", __file__]
        options = ["--worker", str(folder), "--out", str(out), "--shapes", *shapes]
        subprocess.run([sys.executable, *command, *options], check=True)
        rows += json.loads(out.read_text())
    return rows


def device_map(kind: str, layers: int) -> dict[str, int]:
    ends = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), 0)
    second = {"one": lambda n: 0, "halves": lambda n: n >= layers // 2, "interleaved": lambda n: n % 2}[kind]
    return ends | {f"model.layers.{n}": int(second(n)) for n in range(layers)}


def accelerate_maps(folder: Path, shapes: list[tuple[int, int]]) -> list[dict]:
    """One step of each map in turn: the CPU, which rules eager steps, is not as fast from second to second."""
    models, places = {}, {}
    for kind in ("one", "halves", "interleaved"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        where = device_map(kind, model.config.num_hidden_layers)
        models[kind] = model.to("cuda:0") if kind == "one" else dispatch_model(model, where, force_hooks=True)
        places[kind] = [f"cuda:{where[f'model.layers.{n}']}" for n in range(model.config.num_hidden_layers)]
    rows = []
    for (batch, tokens), name in itertools.product(shapes, ("DynamicCache", "tq4")):
        caches, times = {}, {kind: [] for kind in models}
        for kind, model in models.items():
            caches[kind], attention = make_cache(name, "eager", model.config, tokens)
            model.set_attn_implementation(attention)
            fill(caches[kind], model.config, batch, tokens, model.config.num_key_value_heads, places[kind])
        for step, (kind, model) in itertools.product(range(WARM_STEPS + STEPS), models.items()):
            times[kind].append(milliseconds(one_step, model, caches[kind], batch, tokens + step))
        for kind, taken in times.items():
            row = dict(gpus=1 if kind == "one" else 2, way=f"accelerate, {kind}", cache=name, mode="eager")
            rows.append(row | dict(batch=batch, tokens=tokens, ms_per_step=statistics.median(taken[WARM_STEPS:])))
            print(rows[-1], flush=True)
        del caches
        torch.cuda.empty_cache()
    return rows


def one_step(model: Any, cache: Any, batch: int, place: int) -> None:
    ids, position = torch.zeros(batch, 1, dtype=torch.int64, device="cuda:0"), torch.full((batch, 1), place)
    with torch.inference_mode(), sdpa_kernel(SDPA["eager"]):
        model(input_ids=ids, position_ids=position.to("cuda:0"), past_key_values=cache, use_cache=True)
    torch.cuda.synchronize(1)


def checks(rows: list[dict]) -> dict[str, bool]:
    """What the figures must show."""
    by = {(r["way"], r["gpus"], r["cache"], r["mode"], r["batch"], r["tokens"]): r for r in rows}
    found = {}
    for (way, gpus, cache, mode, batch, tokens), row in by.items():
        place = f"{cache} {mode} {batch} x {tokens}"
        one = by.get((way if way == "tensor parallel" else "accelerate, one", 1, cache, mode, batch, tokens))
        if gpus == 1 or one is None:
            continue
        ratio = row["ms_per_step"] / one["ms_per_step"]
        if way != "tensor parallel" and cache == "tq4":
            found[f"{way}, {place}: at most 1.15x one GPU's step, got {ratio:.2f}"] = ratio <= 1.15
        elif cache == "tq4":
            share = row["cache_bytes"] / one["cache_bytes"]
            found[f"{place}: at most 0.51x the bytes a rank, got {share:.3f}"] = share <= 0.51
            if mode == "compiled":
                static = by[way, gpus, "StaticCache", mode, batch, tokens]["ms_per_step"]
                found[f"{place}: no slower than StaticCache ({static} ms)"] = row["ms_per_step"] <= static
                found[f"{place}: no graph break"] = not row["graph_breaks"]
            if mode == "compiled" and (batch, tokens) == (8, 32768):
                found[f"{place}: at most 0.6x one GPU's step, got {ratio:.2f}"] = ratio <= 0.6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help="sequences x tokens")
    parser.add_argument("--only", choices=("tensor parallel", "accelerate"))
    parser.add_argument("--worker", type=Path, help="folder of the model: one rank, started by torchrun")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shapes = [(int(batch), int(tokens)) for batch, tokens in (shape.split("x") for shape in options.shapes)]
    if options.worker:
        worker(options.worker, shapes, options.out)
        return
    if torch.cuda.device_count() < 2:
        raise SystemExit(f"expected two CUDA devices, got {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), options.layers)
        rows = []
        if options.only != "accelerate":
            rows += tensor_parallel(Path(folder), options.shapes)
            write(options.out, rows)
        if options.only != "tensor parallel":
            rows += accelerate_maps(Path(folder), shapes)
    found = checks(rows)
    write(options.out, rows)
    print("\n".join(f"{'yes' if holds else 'NO '} {what}" for what, holds in found.items()))
    raise SystemExit(0 if all(found.values()) else 1)


if __name__ == "__main__":
    main()
