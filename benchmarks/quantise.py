"""Quantise on update, on a CUDA GPU, beside what a 16-bit cache does: a bf16 copy of the same tokens.

    python benchmarks/quantise.py --out benchmarks/results/quantise_h200.json

Keys and values of 8 KV heads, head_dim 128, bf16, in one launch, for every preset.  Times are medians of CUDA graph
replays; `packed_gb_s` counts bytes read and written, `copy_gb_s` those of a large device copy in the same run.
"""

import argparse
from pathlib import Path

import torch
from measure import copy_gb_s, machine, microseconds, write
from tq_kernels.store.append import append
from tq_kernels.store.quantize import quantize

from tq_cache.backends.calibration import calibrate
from tq_cache.backends.triton import states_of
from tq_cache.formats.presets import PRESETS
from tq_cache.formats.states import PackedStates

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def make(preset: str, batch: int, tokens: int) -> tuple[list[PackedStates], list[torch.Tensor]]:
    """Empty key and value states with room for `tokens`, and random vectors for them."""
    chosen, capacity = PRESETS[preset], -(-tokens // 64) * 64
    packed, vectors = [], []
    for role, fmt, smooth in (("key", chosen.key, chosen.smooth), ("value", chosen.value, 0.0)):
        x = torch.randn(batch, KV_HEADS, tokens, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        first = torch.randn(batch, KV_HEADS, 64, HEAD_DIM, device="cuda")
        counts = torch.ones(batch, 1, 64, 1, dtype=torch.bool, device="cuda")
        calibration = calibrate(first, fmt, chosen.center, smooth, counts)
        packed.append(PackedStates.empty(role, fmt, x, capacity, calibration))
        vectors.append(x)
    return packed, vectors


def measure(preset: str, batch: int, tokens: int, copy: float) -> dict:
    packed, vectors = make(preset, batch, tokens)
    copies = [torch.empty_like(x) for x in vectors]
    sides = [states_of(states) for states in packed]
    calls = 20 if batch * tokens <= 4096 else 4
    us = microseconds(lambda: quantize(*sides, *vectors, 0), calls)
    copied = microseconds(lambda: append(*vectors, *copies, 0), calls)
    written = batch * KV_HEADS * tokens * PRESETS[preset].token_bytes(HEAD_DIM, HEAD_DIM)
    moved = written + sum(x.nbytes for x in vectors)
    row = dict(format=preset, batch=batch, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, tokens=tokens)
    row |= dict(us=round(us, 2), baseline="bf16 copy of keys and values in one launch", baseline_us=round(copied, 2))
    return row | dict(ratio=round(copied / us, 3), packed_gb_s=round(moved / us / 1e3, 1), copy_gb_s=round(copy, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the rows as JSON")
    parser.add_argument("--presets", nargs="*", default=list(PRESETS))
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 64, 1024, 4096, 32768])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8])
    options = parser.parse_args()
    torch.manual_seed(0)
    copy, rows = copy_gb_s(), []
    print("{device}, torch {torch}, triton {triton}".format(**machine()) + f", {copy:.1f} GB/s copied")
    for batch in options.batches:
        print(f"batch {batch}, us {' ' * 8}" + "".join(f"{tokens:>10}" for tokens in options.tokens))
        for preset in options.presets:
            new = [measure(preset, batch, tokens, copy) for tokens in options.tokens]
            print(f"{preset:20}" + "".join(f"{row['us']:10.1f}" for row in new), flush=True)
            rows += new
            write(options.out, rows)
        print(f"{'bf16 copy':20}" + "".join(f"{row['baseline_us']:10.1f}" for row in new), flush=True)


if __name__ == "__main__":
    main()
