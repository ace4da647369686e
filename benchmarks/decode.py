"""Decode attention on packed keys and values: right against float64, then timed beside bf16 SDPA and a device copy.

python benchmarks/decode.py --out benchmarks/results/decode_first_h200.json
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import torch  # noqa: E402
import triton  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from tq_kernels import tuning  # noqa: E402
from tq_kernels.decode import code_table, decode  # noqa: E402

from tq_cache import codebook, packing  # noqa: E402

# name: (key bits, value bits, values uniform with a zero)
MODES = {
    "fp8": (8, 8, False),
    "k8v4": (8, 4, True),
    "4bit": (4, 4, True),
    "tq4": (4, 4, False),
    "k3v4": (3, 4, True),
    "3bit": (3, 3, True),
    "tq2": (2, 2, False),
}
SHAPES = {"8x32768": (8, 32, 8, 128, 32768), "1x131072": (1, 32, 8, 128, 131072), "32x4096": (32, 32, 8, 128, 4096)}


def books(mode):
    key_bits, value_bits, zero = MODES[mode]
    return codebook.GAUSSIAN.get(key_bits), (codebook.UNIFORM if zero else codebook.GAUSSIAN).get(value_bits)


def make_side(batch, kv_heads, blocks, dim, bits, device):
    """Random packed codes and scales.  Any bytes are valid codes below 8 bits."""
    shape = (batch, kv_heads, blocks, dim * 64 * bits // 8)
    if bits == 8:
        packed = torch.randn(shape, device=device).to(torch.float8_e4m3fn).view(torch.uint8)
        return packed, torch.rand(batch, kv_heads, device=device) + 0.5
    packed = torch.randint(0, 256, shape, device=device, dtype=torch.uint8)
    return packed, ((torch.rand(batch, kv_heads, blocks * 64, device=device) + 0.5) * 0.2).half()


def make_case(mode, shape, device="cuda"):
    batch, heads, kv_heads, dim, tokens = shape
    key_bits, value_bits, zero = MODES[mode]
    blocks = -(-tokens // 64)
    key = make_side(batch, kv_heads, blocks, dim, key_bits, device)
    value = make_side(batch, kv_heads, blocks, dim, value_bits, device)
    if zero:
        value = (*value, (torch.randn_like(value[1], dtype=torch.float32) * 0.1).half())
    query = torch.randn(batch, heads, dim, device=device, dtype=torch.bfloat16)
    key_book, value_book = books(mode)
    arguments = dict(
        tokens=tokens,
        key_bits=key_bits,
        value_bits=value_bits,
        key_table=code_table(key_book.magnitudes) if key_book else (0, 0),
        value_table=code_table(value_book.magnitudes) if value_book else (0, 0),
        softmax_scale=dim**-0.5,
    )
    return query, key, value, arguments


def to_float64(side, bits, book, dim, transposed):
    """What a packed side stands for, float64 [B, H, tokens, D]."""
    codes = packing.unpack(side[0], bits, 64 if transposed else dim)
    codes = codes.transpose(-1, -2) if transposed else codes
    codes = codes.flatten(2, 3)
    if bits == 8:
        return codes.contiguous().view(torch.float8_e4m3fn).double() * side[1].double()[..., None, None]
    x = book.values(device=codes.device, dtype=torch.float64)[codes.long()] * side[1].double()[..., None]
    return x + side[2].double()[..., None] if len(side) > 2 else x


def reference(query, key, value, arguments, mode):
    tokens, dim = arguments["tokens"], query.shape[-1]
    key_book, value_book = books(mode)
    k = to_float64(key, arguments["key_bits"], key_book, dim, False)[:, :, :tokens]
    v = to_float64(value, arguments["value_bits"], value_book, dim, True)[:, :, :tokens]
    q = query.double().unflatten(1, (k.shape[1], -1))
    scores = q @ k.transpose(-1, -2) * arguments["softmax_scale"]
    return (scores.softmax(-1) @ v).flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)


def error(mode, shape, **options):
    """Relative error of the output and largest error of the log-sum-exp against float64."""
    query, key, value, arguments = make_case(mode, shape)
    out, lse = decode(query.float(), key, value, **arguments, **options)
    expected, expected_lse = reference(query, key, value, arguments, mode)
    relative = (out.double() - expected).norm() / expected.norm()
    return relative.item(), (lse - expected_lse).abs().max().item()


def microseconds(run, calls=10, repeats=15):
    """Median time of one call, in a CUDA graph of `calls` calls."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / calls)
    return statistics.median(times)


def baselines(shape):
    """bf16 SDPA by backend, microseconds, and the device copy, GB/s."""
    batch, heads, kv_heads, dim, tokens = shape
    query = torch.randn(batch, heads, 1, dim, device="cuda", dtype=torch.bfloat16)
    key, value = torch.randn(2, batch, kv_heads, tokens, dim, device="cuda", dtype=torch.bfloat16)
    rows = {}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                rows[name] = microseconds(lambda: scaled_dot_product_attention(query, key, value, enable_gqa=True))
        except RuntimeError as problem:
            print(f"SDPA {name}: {str(problem)[:120]}")
    target = torch.empty_like(key)
    rows["copy_GBps"] = 2 * key.nbytes / microseconds(lambda: target.copy_(key)) / 1e3
    return rows


def time_mode(mode, shape, best, **options):
    query, key, value, arguments = make_case(mode, shape)
    spent = microseconds(lambda: decode(query, key, value, **arguments, **options))
    read = sum(t.nbytes for t in (*key, *value))
    return {"us": round(spent, 1), "GBps": round(read / spent / 1e3), "times_bf16": round(best / spent, 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.cuda.get_device_properties(0)
    result = {
        "device": device.name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "errors": {},
        "times": {},
    }
    for mode in options.modes:
        errors = {
            s: error(mode, (b, 32, 8, 128, n)) for s, (b, n) in {"2x1000": (2, 1000), "1x32768": (1, 32768)}.items()
        }
        result["errors"][mode] = errors
        print(f"{mode:5}", *(f"{s}: output {o:.1e} lse {e:.1e}  " for s, (o, e) in errors.items()), flush=True)
        assert all(math.isfinite(o) and o < 5e-3 for o, _ in errors.values()), mode
    for name in options.shapes:
        base = baselines(SHAPES[name])
        best = min(base[k] for k in ("flash", "cudnn") if k in base)
        result["times"][name] = {"baselines": base}
        print(name, {k: round(v, 1) for k, v in base.items()})
        for mode in options.modes:
            row = result["times"][name][mode] = time_mode(mode, SHAPES[name], best)
            print(f"  {mode:5} {row['us']:7.1f} us  {row['times_bf16']:5.2f}x  {row['GBps']:5} GB/s", flush=True)
    result["configs"] = {bits: vars(config) for bits, config in tuning.DECODE.items()}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
