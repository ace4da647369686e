"""Prefill of a chunk over a packed past, on a CUDA GPU, timed beside SDPA over the same tokens in bfloat16.

    PYTHONPATH=.:kernels python3 benchmarks/prefill.py --out benchmarks/results/prefill_h200.json

`past` tokens are packed, the `chunk` newest are the queries and are exact: of one sequence, and of a batch of eight,
with and without left padding.  Times are medians of CUDA graph replays.  The better baseline counts:

flash  FlashAttention with a causal mask aligned to the lower right; takes no padding
cudnn  in two calls, the past (full) and the chunk (causal), since cuDNN's causal mask is aligned to the upper left; the
       merge that the two calls would need is left out, in favour of the baseline.  With padding: one call with a mask
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from measure import BACKENDS, best_sdpa, copy_gb_s, microseconds, table_line, write
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from tq_kernels.prefill.attend import prefill

from tq_cache.backends import quantizers
from tq_cache.backends.calibration import calibrate
from tq_cache.backends.triton import states_of
from tq_cache.formats.presets import PRESETS
from tq_cache.formats.states import PackedStates

HEADS = dict(q_heads=32, kv_heads=8, head_dim=128)
FORMATS = ("fp8_e4m3", "fp8_e5m2", "k8v4", "4bit_nc", "k3v4_nc", "3bit_nc", "tq4", "tq3", "tq2")
FEW = ("fp8_e4m3", "4bit_nc", "tq4", "tq3")
# Batch, chunk, past, left padding, presets.
SHAPES = (
    (1, 2048, 30720, False, FORMATS),
    (1, 512, 32256, False, FEW[::2]),
    (1, 128, 32640, False, FEW[::2]),
    (8, 512, 6144, False, FEW[::2]),
    (8, 512, 6144, True, FEW),
)


def pack(preset: str, batch: int, past: int) -> list[PackedStates]:
    """Packed keys and values, of random numbers around a random centre."""
    chosen, states = PRESETS[preset], []
    counts = torch.ones(batch, 1, past, 1, dtype=torch.bool, device="cuda")
    for role, fmt, smooth in (("key", chosen.key, chosen.smooth), ("value", chosen.value, 0.0)):
        x = torch.randn(batch, HEADS["kv_heads"], past, HEADS["head_dim"], device="cuda")
        x += torch.randn(HEADS["head_dim"], device="cuda") / 2
        calibration = calibrate(x, fmt, chosen.center, smooth, counts)
        states.append(PackedStates.empty(role, fmt, x, -(-past // 64) * 64, calibration))
        quantizers.store(states[-1], x, 0)
    return states


def random(batch: int, heads: int, tokens: int) -> torch.Tensor:
    return torch.randn(batch, heads, tokens, HEADS["head_dim"], device="cuda").bfloat16()


def left_padding(batch: int, chunk: int, past: int) -> torch.Tensor:
    """Causal mask of rows that begin at 0, 512, 1,024, ..., bool [B, 1, chunk, past + chunk]."""
    tokens = torch.arange(past + chunk, device="cuda")
    causal = tokens <= tokens[past:, None]
    return causal & (tokens >= 512 * torch.arange(batch, device="cuda")[:, None])[:, None, None]


def baseline(query: torch.Tensor, past: int, mask: torch.Tensor | None) -> tuple[str, float]:
    """The better of two: its name, and microseconds."""
    batch, _, chunk, _ = query.shape
    keys, values = (random(batch, HEADS["kv_heads"], past + chunk) for _ in range(2))
    if mask is not None:
        return best_sdpa(query, keys, values, attn_mask=mask)

    def flash() -> None:
        scaled_dot_product_attention(
            query, keys, values, attn_mask=causal_lower_right(chunk, past + chunk), enable_gqa=True
        )

    def cudnn() -> None:
        scaled_dot_product_attention(query, keys[:, :, :past], values[:, :, :past], enable_gqa=True)
        new = keys[:, :, past:], values[:, :, past:]
        scaled_dot_product_attention(query, *new, is_causal=True, enable_gqa=True)

    times = {}
    for name, run in (("flash", flash), ("cudnn", cudnn)):
        with sdpa_kernel(BACKENDS[name]):
            times[name] = microseconds(run)
    name = min(times, key=times.__getitem__)
    return f"sdpa {name}", times[name]


def measure(batch: int, chunk: int, past: int, padded: bool, presets: tuple[str, ...], copy: float) -> list[dict]:
    """A row for each preset."""
    query = random(batch, HEADS["q_heads"], chunk)
    new = [random(batch, HEADS["kv_heads"], chunk) for _ in range(2)]
    mask = left_padding(batch, chunk, past) if padded else None
    name, allowed = baseline(query, past, mask)
    rows: list[dict[str, Any]] = []
    for preset in presets:
        states = pack(preset, batch, past)
        key, value = map(states_of, states)
        options = dict(packed_length=past, scaling=HEADS["head_dim"] ** -0.5, mask=mask)
        time = microseconds(lambda: prefill(query, key, value, *new, **options))  # noqa: B023 (called at once)
        size = PRESETS[preset].token_bytes(HEADS["head_dim"], HEADS["head_dim"]) * batch * HEADS["kv_heads"] * past
        row = dict(format=preset, batch=batch, **HEADS, tokens=past + chunk, chunk=chunk, past=past, padded=padded)
        row |= dict(us=time, baseline=name, baseline_us=allowed, ratio=allowed / time)
        rows.append(row | dict(packed_gb_s=size / time / 1e3, copy_gb_s=copy))
        print(f"{table_line(rows[-1])}  chunk {chunk}{', padded' if padded else ''}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where to write the rows as JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    copy, rows = copy_gb_s(), []
    for shape in SHAPES:
        rows += measure(*shape, copy)
        write(options.out, rows)  # after every shape, so that a run that is cut short leaves something


if __name__ == "__main__":
    main()
