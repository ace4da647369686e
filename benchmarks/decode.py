"""Decode attention of one layer over a packed cache, beside bf16 SDPA and a device copy of the same run.

    python benchmarks/decode.py --out benchmarks/results/decode_h200.json

Medians of CUDA graph replays.  A cache of n tokens has n - 64 packed ones and 64 in bfloat16, as a real one about has;
all launches count.  Every preset is first checked against float64.
"""

import argparse
import itertools
from pathlib import Path

import torch
from measure import best_sdpa, copy_gb_s, microseconds, table_line, write

from tq_cache.backends import reference
from tq_cache.backends.triton import attend
from tq_cache.formats.presets import PRESETS, Preset
from tq_cache.formats.states import Calibration, KVView, PackedStates

NAMES = ("fp8_e4m3", "fp8_e5m2", "k8v4", "4bit_nc", "k3v4_nc", "3bit_nc", "tq4", "tq3", "tq2")
HEADS = ((32, 8, 128), (64, 8, 128), (16, 8, 128), (28, 4, 128), (32, 32, 64), (16, 2, 256))
BATCHES, CONTEXTS, TAIL = (1, 8, 32), (1024, 4096, 32768, 131072), 64


def make_states(
    role: str, preset: Preset, batch: int, kv_heads: int, tokens: int, dim: int, device: str = "cuda"
) -> PackedStates:
    """Packed states of random codes and scales: any bytes are valid codes below 8 bits."""
    fmt = preset.key if role == "key" else preset.value
    like, vector = torch.empty(batch, kv_heads, 0, dim, device=device), (batch, kv_heads, 1, dim)
    calibration = Calibration(
        center=torch.randn(vector, device=device) * 0.1 if preset.center else None,
        smooth=torch.rand(vector, device=device) + 0.5 if preset.smooth and role == "key" else None,
        scale=torch.rand(batch, kv_heads, 1, 1, device=device) + 0.5 if fmt.float8 else None,
    )
    states = PackedStates.empty(role, fmt, like, -(-tokens // 64) * 64, calibration)
    if fmt.float8:
        for row in states.packed:  # a sequence at a time: normal numbers take more memory than their codes
            row.copy_(torch.randn(row.shape, device=device).to(fmt.float8).view(torch.uint8))
    else:
        states.packed.random_(0, 256)
        states.scale.uniform_(0.1, 0.3)
    if states.zero is not None:
        states.zero.normal_(0.0, 0.1)
    return states


def make_view(preset: Preset, batch: int, kv_heads: int, tokens: int, dim: int) -> KVView:
    packed = tokens - TAIL
    tail = torch.randn(2, batch, kv_heads, TAIL, dim, device="cuda", dtype=torch.bfloat16)
    key, value = (make_states(role, preset, batch, kv_heads, packed, dim) for role in ("key", "value"))
    return KVView(*tail.unbind(), packed, key, value)


def check(name: str, heads: int, kv_heads: int, dim: int) -> None:
    """Raise AssertionError unless the kernels' error is at most twice that of bf16 attention; both against float64."""
    view = make_view(PRESETS[name], 2, kv_heads, 3000, dim)
    query = torch.randn(2, heads, 1, dim, device="cuda", dtype=torch.bfloat16)
    expected, _ = reference.attend(query.double(), view, None, dim**-0.5)
    keys, values = (
        torch.cat([reference.dequantize(states, view.packed_length, torch.bfloat16), exact], dim=2)
        for states, exact in ((view.key, view.tail_keys), (view.value, view.tail_values))
    )
    plain = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    out, _ = attend(query, view, None, dim**-0.5)
    error, budget = ((x.double() - expected).norm() / expected.norm() for x in (out, plain))
    print(f"{name:9} {heads}/{kv_heads}/{dim}: error {error:.1e}, of bf16 attention {budget:.1e}", flush=True)
    assert error < 2 * budget, name


def measure(shape: tuple[int, int, int, int, int], names: list[str], copy: float) -> list[dict]:
    batch, heads, kv_heads, dim, tokens = shape
    query = torch.randn(batch, heads, 1, dim, device="cuda", dtype=torch.bfloat16)
    keys, values = (torch.randn(batch, kv_heads, tokens, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    baseline, baseline_us = best_sdpa(query, keys, values)
    del keys, values
    rows = []
    for name in names:
        view = make_view(PRESETS[name], batch, kv_heads, tokens, dim)
        us = microseconds(lambda view=view: attend(query, view, None, dim**-0.5))
        packed = batch * kv_heads * (view.packed_length * PRESETS[name].token_bytes(dim, dim) + TAIL * 4 * dim)
        row = dict(format=name, batch=batch, q_heads=heads, kv_heads=kv_heads, head_dim=dim, tokens=tokens)
        row |= dict(us=round(us, 2), baseline=baseline, baseline_us=round(baseline_us, 2))
        row |= dict(ratio=round(baseline_us / us, 3), packed_gb_s=round(packed / us / 1e3), copy_gb_s=round(copy))
        print(table_line(row), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", default=list(NAMES))
    parser.add_argument("--heads", nargs="*", type=int, default=list(range(len(HEADS))), help="indices into HEADS")
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--contexts", nargs="*", type=int, default=list(CONTEXTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    copy, rows = copy_gb_s(), []
    for index in options.heads:
        for name in options.formats:
            check(name, *HEADS[index])
        for batch, tokens in itertools.product(options.batches, options.contexts):
            rows += measure((batch, *HEADS[index], tokens), options.formats, copy)
            write(options.out, rows)


if __name__ == "__main__":
    main()
