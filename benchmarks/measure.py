"""What the benchmarks share: timing by CUDA graph replay, the baselines of PyTorch, and result files."""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def microseconds(run: Callable[[], Any], calls: int = 10, repeats: int = 15) -> float:
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


def copy_gb_s(size: int = 1 << 30) -> float:
    """Speed of a device copy of `size` bytes by a kernel, read and written, GB/s.

    Not `copy_`: in a CUDA graph that is a memcpy node, which reaches two thirds of it on an H200.
    """
    source = torch.randn(size // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / microseconds(lambda: torch.add(source, 0, out=target)) / 1e3


def best_sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any) -> tuple[str, float]:
    """The faster of PyTorch's flash and cuDNN attention: its name, and microseconds."""
    found = {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                found[name] = microseconds(
                    lambda: scaled_dot_product_attention(query, keys, values, enable_gqa=True, **options)
                )
        except RuntimeError as problem:
            print(f"SDPA {name}: {str(problem)[:100]}", file=sys.stderr)
    name = min(found, key=found.__getitem__)
    return f"sdpa {name}", found[name]


def machine() -> dict[str, str]:
    name = torch.cuda.get_device_properties(0).name
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": " ".join(["python", *sys.argv]),
    }


def table_line(row: dict[str, Any]) -> str:
    """One row as a line of text."""
    shape = f"{row['batch']:3} x {row['tokens']:7,}  {row['q_heads']}/{row['kv_heads']}/{row['head_dim']}"
    times = f"{row['us']:9.1f} us  {row['baseline']:10} {row['baseline_us']:9.1f} us  {row['ratio']:5.2f}x"
    return f"{row['format']:9} {shape:28} {times}  {row['packed_gb_s']:6.0f} of {row['copy_gb_s']:.0f} GB/s"


def write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Keep the rows, with the machine, as JSON."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        path.write_text(f'{{"machine": {json.dumps(machine())},\n "rows": [\n  {lines}\n ]}}\n')
