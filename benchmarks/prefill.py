"""Prefill of a chunk over a packed past, on a CUDA GPU: checked against float64, then timed beside SDPA in bfloat16.

    PYTHONPATH=.:kernels python3 benchmarks/prefill.py --out benchmarks/results/prefill_h200.json

The last 2,048 of 32,768 tokens are the queries (32 query heads, 8 KV heads, head_dim 128), 30,720 tokens are packed.
Times are medians of CUDA graph replays.  Baselines, over keys and values of all 32,768 tokens in bfloat16; the better
one counts:

flash  FlashAttention with a causal mask aligned to the lower right
cudnn  in two calls, the past (full) and the chunk (causal), since cuDNN's causal mask is aligned to the upper left; the
       merge that the two calls would need is left out, in favour of the baseline
"""

import argparse
import json
from pathlib import Path

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from tq_kernels.decode import code_table
from tq_kernels.prefill import prefill

from tq_cache import quantizers, reference
from tq_cache.parts import KVView, PackedStates
from tq_cache.presets import PRESETS, Format
from tq_cache.rotation import rotation_matrix

FORMATS = ("fp8_e4m3", "k8v4", "4bit_nc", "3bit_nc", "tq4")
SHAPE = dict(batch=1, q_heads=32, kv_heads=8, head_dim=128)


def make(preset: str, chunk: int, past: int, batch: int, q_heads: int, kv_heads: int, head_dim: int):
    """A query and a view whose newest tokens are its chunk, random, bfloat16."""
    chosen, states = PRESETS[preset], []
    counts = torch.ones(batch, 1, past, 1, dtype=torch.bool, device="cuda")
    for role, fmt, smooth in (("key", chosen.key, chosen.smooth), ("value", chosen.value, 0.0)):
        x = torch.randn(batch, kv_heads, past, head_dim, device="cuda") + torch.randn(head_dim, device="cuda") / 2
        calibration = quantizers.calibrate(x, fmt, chosen.center, smooth, counts)
        states.append(PackedStates.empty(role, fmt, x, -(-past // 64) * 64, calibration))
        quantizers.store(states[-1], x, 0)
    shapes = [(batch, heads, chunk, head_dim) for heads in (q_heads, kv_heads, kv_heads)]
    query, keys, values = (torch.randn(shape, device="cuda").bfloat16() for shape in shapes)
    return query, KVView(keys, values, past, *states)


def launcher(query: torch.Tensor, view: KVView, segments: bool | None = None):
    """A function without arguments that runs the kernels."""

    def code(fmt: Format):
        return (fmt.bits, code_table(fmt.codebook.magnitudes)) if fmt.codebook else (8, (4, 3))

    def flat(x):
        return None if x is None else x.flatten(2)

    def rotation(states):
        return rotation_matrix(states.head_dim, query.device, torch.float32) if states.format.rotated else None

    def factors(states):
        scale = states.calibration.scale.flatten(1) if states.scale is None else states.scale
        return tuple(x for x in (states.packed, scale, states.zero) if x is not None)

    key, value = view.key, view.value
    arguments = dict(
        packed_length=view.packed_length, scaling=query.shape[-1] ** -0.5, key_code=code(key.format),
        value_code=code(value.format), smooth=flat(key.calibration.smooth), rotations=(rotation(key), rotation(value)),
        centers=(flat(key.calibration.center), flat(value.calibration.center)), segments=segments,
    )  # fmt: skip
    parts = (factors(key), factors(value), view.keys, view.values)
    return lambda: prefill(query, *parts, **arguments)


def check(preset: str) -> None:
    """Raise unless the error against float64 is at most twice that of the reference in bfloat16, either way."""
    query, view = make(preset, 300, 5000, 1, 8, 2, 128)
    view64 = KVView(view.keys.double(), view.values.double(), view.packed_length, view.key, view.value)
    exact = reference.attend(query.double(), view64, None, 128**-0.5)[0]
    allowed = (reference.attend(query, view, None, 128**-0.5)[0].double() - exact).norm() / exact.norm()
    for segments in (False, True):
        error = (launcher(query, view, segments)()[0].double() - exact).norm() / exact.norm()
        print(f"{preset:9} {'segments' if segments else 'tiles':8}: error {error:.2e}, the reference's {allowed:.2e}")
        if not error <= 2 * allowed:
            raise SystemExit(f"{preset}: the error is more than twice the reference's")


def microseconds(function) -> float:
    with torch.cuda.stream(torch.cuda.Stream()):
        return triton.testing.do_bench_cudagraph(function, rep=300, return_mode="median") * 1e3


def baselines(chunk: int, past: int, batch: int, q_heads: int, kv_heads: int, head_dim: int) -> dict[str, float]:
    query = torch.randn(batch, q_heads, chunk, head_dim, device="cuda", dtype=torch.bfloat16)
    keys, values = torch.randn(2, batch, kv_heads, past + chunk, head_dim, device="cuda", dtype=torch.bfloat16)

    def flash():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            mask = causal_lower_right(chunk, past + chunk)
            scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            scaled_dot_product_attention(query, keys[:, :, :past], values[:, :, :past], enable_gqa=True)
            new = keys[:, :, past:], values[:, :, past:]
            scaled_dot_product_attention(query, *new, is_causal=True, enable_gqa=True)

    return {"sdpa flash": microseconds(flash), "sdpa cudnn": microseconds(cudnn)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the rows as JSON")
    parser.add_argument("--chunks", type=int, nargs="+", default=[2048, 512, 256, 64])
    parser.add_argument("--total", type=int, default=32768, help="tokens of past and chunk")
    options = parser.parse_args()
    torch.manual_seed(0)
    for preset in FORMATS:
        check(preset)
    rows = []
    for chunk in options.chunks:
        past = options.total - chunk
        beside = baselines(chunk, past, **SHAPE)
        best = min(beside, key=beside.get)
        print(f"chunk {chunk}: " + ", ".join(f"{name} {time:.1f} us" for name, time in beside.items()))
        for preset in FORMATS:
            query, view = make(preset, chunk, past, **SHAPE)
            ways = {"default": None, "tiles": False}
            times = {name: microseconds(launcher(query, view, segments)) for name, segments in ways.items()}
            row = dict(format=preset, **SHAPE, chunk=chunk, past=past, us=times["default"], tiles_us=times["tiles"])
            row |= dict(baseline=best, baseline_us=beside[best], ratio=beside[best] / times["default"])
            rows.append(row | {name.replace(" ", "_") + "_us": time for name, time in beside.items()})
            line = ", ".join(f"{name} {time:.1f} us" for name, time in times.items())
            print(f"  {preset:9} {line}; {row['ratio']:.2f}x {best}")
        if options.out:  # after every chunk length, so that a run that is cut short leaves something
            options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
