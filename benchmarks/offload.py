"""A decode step of a model whose cache is in host memory, by way of offloading: milliseconds, GB/s, peak of the device.

    python benchmarks/offload.py --out benchmarks/results/offload_h200.json

The model has the shape of Llama-3.1-8B and random weights in bfloat16.  Caches are filled with random keys and values
(a step does not care which), steps are timed one by one with the device waited for, and the median counts.

pinned_gb_s  copies of one pinned buffer to the device, of the size of one layer's packed tokens, back to back
gb_s         bytes that a step brings to the device, over its time
peak_bytes   most that the device held in these steps, weights not counted
allowed      for that: exact tokens, what else stays, two slots, and 10 %
of_dynamic   time of a step over that of DynamicCache(offloading=True)
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from generate import MODELS, SDPA, make_model
from measure import write
from torch.nn.attention import sdpa_kernel
from transformers import DynamicCache, PretrainedConfig

from tq_cache import TurboQuantCache

# Name, and offloading; those of transformers' own way bring whole layers back and forth and get few steps.
WAYS: dict[str, bool | str] = {
    "stays": False,
    "packed": "packed",
    "half": "2.2GB",
    "layers": True,
    "DynamicCache": True,
}
FEW = 3


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    """Of one call, the device waited for before and after."""
    wait(device)
    start = time.perf_counter()
    run()
    wait(device)
    return 1e3 * (time.perf_counter() - start)


def pinned_gb_s(size: int, device: torch.device, calls: int = 20, repeats: int = 5) -> float:
    """Speed of copies of `size` bytes from pinned host memory to the device, GB/s: the best of some rows of them."""
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(size, dtype=torch.uint8, device=device)

    def copies() -> None:
        for _ in range(calls):
            target.copy_(source, non_blocking=True)

    return size * calls / min(milliseconds(copies, device) for _ in range(repeats + 1)) / 1e6


def make_cache(way: str, preset: str, config: PretrainedConfig, kind: type[TurboQuantCache]) -> Any:
    """A cache of this way; `kind` makes those of ours."""
    if way == "DynamicCache":
        return DynamicCache(config=config, offloading=True)
    return kind(config, preset, offloading=WAYS[way])


def fill(model: torch.nn.Module, cache: Any, batch: int, tokens: int) -> None:
    """As by a prompt whose attention shows no queries, so that nothing waits for them."""
    config = model.config
    model.set_attn_implementation("sdpa")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        shape = (batch, config.num_key_value_heads, tokens, head_dim)
        keys, values = (torch.randn(shape, device=model.device, dtype=model.dtype) for _ in range(2))
        cache.update(keys, values, layer)
        del keys, values


def steps_ms(model: torch.nn.Module, cache: Any, batch: int, tokens: int, steps: int) -> list[float]:
    """Milliseconds of every step: one token per sequence, without sampling."""
    if isinstance(cache, TurboQuantCache):
        model.set_attn_implementation("turboquant")
    ids = torch.randint(0, 100, (batch, 1), device=model.device)

    def one(place: int) -> None:
        position = torch.full((batch, 1), tokens + place, device=model.device)
        with torch.inference_mode(), sdpa_kernel(SDPA["eager"]):
            model(input_ids=ids, position_ids=position, past_key_values=cache, use_cache=True)

    return [milliseconds(lambda place=place: one(place), model.device) for place in range(steps)]


def peak_reset(device: torch.device) -> int:
    """Bytes held now, from which peaks are counted; 0 without a device that counts them."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def measure(
    model: torch.nn.Module, way: str, preset: str, batch: int, tokens: int, steps: int, kind: type[TurboQuantCache]
) -> dict[str, Any]:
    """One row, without what compares it with others."""
    device = model.device
    model.set_attn_implementation("sdpa")
    steps_ms(model, DynamicCache(config=model.config), batch, 0, 2)  # what is allocated once
    once = peak_reset(device)
    cache = make_cache(way, preset, model.config, kind)
    filling = milliseconds(lambda: fill(model, cache, batch, tokens), device)
    slow = WAYS[way] is True
    first = steps_ms(model, cache, batch, tokens, 1 if slow else 2)  # slots are made
    peak_reset(device)
    times = steps_ms(model, cache, batch, tokens + len(first), FEW if slow else steps)
    row = dict(cache=way, preset=None if way == "DynamicCache" else preset, batch=batch, tokens=tokens)
    row |= dict(ms_per_step=round(statistics.median(times), 3), slowest_ms=round(max(times), 3))
    row |= dict(fill_ms=round(filling, 1), peak_bytes=peak(device) - once)
    if isinstance(cache, TurboQuantCache):
        row |= dict(device_bytes=cache.nbytes, host_bytes=cache.host_nbytes, slot_bytes=cache.report().slot_nbytes)
        row |= dict(allowed=int(1.1 * cache.nbytes))
    return row


def compare(row: dict[str, Any], rows: list[dict[str, Any]], pinned: float) -> None:
    """Add to a row what it is beside others, and print it."""
    line = f"{row['cache']:14} {row['batch']} x {row['tokens']:,}  {row['ms_per_step']:9.2f} ms"
    line += f"  peak {row['peak_bytes'] / 1e9:6.3f} GB"
    if row.get("slot_bytes"):
        brought = row["host_bytes"]
        speed = brought / row["ms_per_step"] / 1e6
        row |= dict(gb_s=round(speed, 3), pinned_gb_s=round(pinned, 3), share=round(speed / pinned, 5))
        row |= dict(peak_within=row["peak_bytes"] <= row["allowed"])
        line += f" of {row['allowed'] / 1e9:.3f}  {row['gb_s']:.1f} of {pinned:.1f} GB/s ({row['share']:.0%})"
    for other in rows:
        if row["cache"] == "DynamicCache" and other["cache"] != "DynamicCache":
            other["of_dynamic"] = round(other["ms_per_step"] / row["ms_per_step"], 4)
            line += f"\n    {other['cache']}: {other['of_dynamic']:.3f} of it"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--preset", default="4bit_nc")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=70, help="more than 64, so that blocks are packed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, rows = make_model(options.model), []
    layer = options.batch * options.tokens * model.config.num_key_value_heads * 134
    pinned = pinned_gb_s(layer, model.device)
    print(f"pinned memory to the device: {pinned:.1f} GB/s", flush=True)
    for way in options.ways:
        shape = options.batch, options.tokens, options.steps
        row = measure(model, way, options.preset, *shape, TurboQuantCache)
        compare(row, rows, pinned)
        rows.append(row)
        write(options.out, rows)


if __name__ == "__main__":
    main()
