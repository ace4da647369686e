"""Quantise on update, on a CUDA GPU: checked against the reference, then timed beside a device copy of the same run.

    PYTHONPATH=.:kernels python3 benchmarks/quantise.py --out benchmarks/results/quantise_h200.json

Rows: 32,768 tokens x 8 KV heads x head_dim 128 and one token, keys and values in one launch, for every preset; and
the way back to bfloat16 (`dequantize`).  Times are medians of CUDA graph replays; GB/s counts bytes read and written.
"""

import argparse
import json
from pathlib import Path

import torch
import triton
from tq_kernels.dequantize import dequantize
from tq_kernels.quantize import LEAST_SQUARES, MIN_MAX, NORM, PER_HEAD, UNBIASED, Coding, Side, quantize

from tq_cache import packing, reference
from tq_cache.parts import PackedStates, tensors
from tq_cache.presets import PRESETS, Format
from tq_cache.rotation import rotation_matrix

RULES = {
    "per_head": PER_HEAD,
    "norm": NORM,
    "unbiased": UNBIASED,
    "least_squares": LEAST_SQUARES,
    "min_max": MIN_MAX,
}


def coding(fmt: Format) -> Coding:
    exponent = 5 if fmt.float8 == torch.float8_e5m2 else 4
    if fmt.codebook is None:
        return Coding(fmt.bits, RULES[fmt.scale], exponent=exponent)
    return Coding(fmt.bits, RULES[fmt.scale], fmt.codebook.magnitudes, fmt.codebook.unit)


def side(states: PackedStates, x: torch.Tensor) -> Side:
    """What the kernel takes."""
    held = states.calibration
    rotation = rotation_matrix(x.shape[-1], x.device, torch.float32) if states.format.rotated else None
    parts = (states.packed, states.scale, states.zero, held.center, held.smooth, held.scale, rotation)
    return Side(x, *parts, coding(states.format))


def make(preset: str, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> list[tuple[PackedStates, torch.Tensor]]:
    """Empty key and value states with room for `tokens`, and random vectors for them."""
    chosen, capacity = PRESETS[preset], -(-tokens // 64) * 64
    out = []
    for role, fmt, smooth in (("key", chosen.key, chosen.smooth), ("value", chosen.value, 0.0)):
        x = torch.randn(1, heads, tokens, dim, device="cuda")
        x = (x * (1 + torch.rand(dim, device="cuda")) + torch.randn(dim, device="cuda")).to(dtype)
        first = x[:, :, :4096]
        counts = torch.ones(1, 1, first.shape[2], 1, dtype=torch.bool, device="cuda")
        calibration = reference.calibrate(first, fmt, chosen.center, smooth, counts)
        out.append((PackedStates.empty(role, fmt, x, capacity, calibration), x))
    return out


def codes(states: PackedStates) -> torch.Tensor:
    """Codes [B, H_kv, T, D] of all tokens there is room for."""
    if states.role == "value":
        return packing.unpack(states.packed, states.format.bits, 64).transpose(-1, -2).flatten(2, 3)
    return packing.unpack(states.packed, states.format.bits, states.head_dim).flatten(2, 3)


def check(pairs: list[tuple[PackedStates, torch.Tensor]], split: int) -> str:
    """Store in two calls, compare with the reference: share of codes that differ, worst scale and dequantised error."""
    bad = scale_error = value_error = 0.0
    for call in (slice(0, split), slice(split, None)):
        quantize(*(side(states, x[:, :, call]) for states, x in pairs), call.start)
    for states, x in pairs:
        wanted = PackedStates.empty(states.role, states.format, x, states.capacity, states.calibration)
        reference.store(wanted, x, 0)
        tokens = x.shape[2]
        bad = max(bad, (codes(states)[:, :, :tokens] != codes(wanted)[:, :, :tokens]).float().mean().item())
        if wanted.scale is not None and states.scale is not None:
            right, got = wanted.scale[:, :, :tokens].float(), states.scale[:, :, :tokens].float()
            scale_error = max(scale_error, ((got - right).abs() / right.abs()).max().item())
        right = reference.dequantize(states, tokens, torch.float32)
        got = dequantize(side(states, x), tokens, torch.float32, value=states.role == "value")
        value_error = max(value_error, ((got - right).norm() / right.norm()).item())
    return f"{bad:8.1e} {scale_error:8.1e} {value_error:8.1e}"


def time_us(function, repeats: int = 30) -> float:
    """Median of graph replays, of ten calls each, in microseconds a call."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            function()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 100)
    return sorted(times)[repeats // 2]


def measure(preset: str, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> list[dict]:
    """One row for quantising keys and values of all tokens, and one for the way back."""
    pairs = make(preset, tokens, heads, dim, dtype)
    sides = [side(states, x) for states, x in pairs]
    packed = sum(tensor.nbytes for states, _ in pairs for tensor in (states.packed, states.scale, states.zero) if tensor is not None)
    moved = packed * tokens // pairs[0][0].capacity + sum(x.nbytes for _, x in pairs)
    row = {"format": preset, "tokens": tokens, "kv_heads": heads, "head_dim": dim}

    def back() -> None:
        for one, (states, _) in zip(sides, pairs, strict=True):
            dequantize(one, tokens, dtype, value=states.role == "value")

    rows = []
    for name, function in (("quantise", lambda: quantize(*sides, 0)), ("dequantise", back)):
        us = time_us(function)
        rows.append({"operation": name} | row | {"us": round(us, 2), "gb_s": round(moved / us / 1e3, 1)})
    return rows


def copy_gb_s() -> float:
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_us(lambda: target.copy_(source), 10) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where to write the rows as JSON")
    parser.add_argument("--presets", nargs="*", default=list(PRESETS))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    ceiling = round(copy_gb_s(), 1)
    print(f"device copy {ceiling} GB/s\n{'':9}   differ    scale   dequantise      us    GB/s  one token us   back us")
    rows = []
    for preset in args.presets:
        checked = check(make(preset, 2000, args.heads, args.dim, torch.bfloat16), 777)
        whole, back = measure(preset, args.tokens, args.heads, args.dim, torch.bfloat16)
        one, _ = measure(preset, 1, args.heads, args.dim, torch.bfloat16)
        rows += [row | {"copy_gb_s": ceiling} for row in (whole, one, back)]
        print(f"{preset:9} {checked}  {whole['us']:9.1f} {whole['gb_s']:7.0f} {one['us']:9.2f} {back['us']:12.1f}", flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
