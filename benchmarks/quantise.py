"""Quantise on update, on a CUDA GPU, beside what a 16-bit cache does: a bf16 copy of the same tokens.

    PYTHONPATH=.:kernels python3 benchmarks/quantise.py --out benchmarks/results/quantise_h200.json

Keys and values of 8 KV heads, head_dim 128, bf16, in one launch, for every preset.  Times are medians of CUDA graph
replays; `packed_gb_s` counts bytes read and written, `copy_gb_s` those of a large device copy in the same run.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from tq_kernels.append import append
from tq_kernels.quantize import quantize

from tq_cache import reference
from tq_cache.parts import PackedStates
from tq_cache.presets import PRESETS
from tq_cache.triton_backend import states_of

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def make(preset: str, batch: int, tokens: int) -> tuple[list[PackedStates], list[torch.Tensor]]:
    """Empty key and value states with room for `tokens`, and random vectors for them."""
    chosen, capacity = PRESETS[preset], -(-tokens // 64) * 64
    packed, vectors = [], []
    for role, fmt, smooth in (("key", chosen.key, chosen.smooth), ("value", chosen.value, 0.0)):
        x = torch.randn(batch, KV_HEADS, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        first = torch.randn(batch, KV_HEADS, 64, HEAD_DIM, device="cuda")
        counts = torch.ones(batch, 1, 64, 1, dtype=torch.bool, device="cuda")
        calibration = reference.calibrate(first, fmt, chosen.center, smooth, counts)
        packed.append(PackedStates.empty(role, fmt, x, capacity, calibration))
        vectors.append(x)
    return packed, vectors


def microseconds(function: Callable[[], object], calls: int, repeats: int = 15) -> float:
    """Median of graph replays of `calls` calls each, a call."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def measure(preset: str, batch: int, tokens: int) -> dict:
    """One row, without `copy_gb_s`."""
    packed, vectors = make(preset, batch, tokens)
    copies = [torch.empty_like(x) for x in vectors]
    sides = [states_of(states) for states in packed]
    calls = 20 if batch * tokens <= 4096 else 4
    us = microseconds(lambda: quantize(*sides, *vectors, 0), calls)
    copied = microseconds(lambda: append(*vectors, *copies, 0), calls)
    written = batch * KV_HEADS * tokens * PRESETS[preset].token_bytes(HEAD_DIM, HEAD_DIM)
    return {
        "format": preset,
        "batch": batch,
        "q_heads": Q_HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "tokens": tokens,
        "us": round(us, 2),
        "baseline": "bf16 copy of keys and values in one launch",
        "baseline_us": round(copied, 2),
        "ratio": round(copied / us, 3),
        "packed_gb_s": round((written + sum(x.nbytes for x in vectors)) / us / 1e3, 1),
    }


def copy_gb_s() -> float:
    """Bytes read and written by a large copy, a second."""
    source = torch.randn(1, KV_HEADS, 1 << 19, HEAD_DIM, device="cuda").bfloat16()
    target = torch.empty_like(source)
    return round(2 * 2 * source.nbytes / microseconds(lambda: append(source, source, target, target, 0), 4) / 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where to write the rows as JSON")
    parser.add_argument("--presets", nargs="*", default=list(PRESETS))
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 64, 1024, 4096, 32768])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    ceiling = copy_gb_s()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {ceiling} GB/s copied"
    )
    rows = []
    for batch in arguments.batches:
        print(f"batch {batch}, us {' ' * 8}" + "".join(f"{tokens:>10}" for tokens in arguments.tokens))
        for preset in arguments.presets:
            new = [measure(preset, batch, tokens) | {"copy_gb_s": ceiling} for tokens in arguments.tokens]
            print(f"{preset:20}" + "".join(f"{row['us']:10.1f}" for row in new), flush=True)
            rows += new
        print(f"{'bf16 copy':20}" + "".join(f"{row['baseline_us']:10.1f}" for row in new), flush=True)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
