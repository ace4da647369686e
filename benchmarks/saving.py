"""Saving a long prompt's cache, loading it again, and computing it again: seconds, GB/s, and whether it is the same.

    python benchmarks/saving.py --out benchmarks/results/saving_h200.json

The shape of Llama-3.1-8B with random weights; the cache that is saved is that of a real prefill with "turboquant".
Loading is the median of a few, from files that the save left in the page cache, or, with `--cold`, after they were
dropped from it.  All bytes are compared with their checksums in either.  `--device cpu --layers 2 --tokens 4096` tries
it without a GPU.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import write
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from tq_cache import TurboQuantCache
from tq_cache.saving.folder import HEADER, files_named, read_header, total_bytes

PRESETS = ("tq4", "4bit_nc", "fp8_e4m3")
LOAD_SHARE, LOAD_GB_S = 0.5, 3.0  # to be shown (issue 15): of the time of a prefill, at most; at least
CHUNK = 4096  # tokens of a prefill at once: memory of logits


def make_model(layers: int, device: str) -> Any:
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=140000,
    )  # fmt: skip
    config._attn_implementation = "turboquant"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def seconds(run: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def prefill(model: Any, ids: torch.Tensor, preset: str) -> TurboQuantCache:
    cache = TurboQuantCache(model.config, preset)
    for part in ids.split(CHUNK, dim=1):
        model.model(part, past_key_values=cache, use_cache=True)
    return cache


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    subprocess.run(["sync"], check=True)
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def same(cache: TurboQuantCache, other: TurboQuantCache) -> bool:
    """Whether every packed bit is."""
    pairs = zip(cache.layers, other.layers, strict=True)
    views = [(x.storage.view(), y.storage.view()) for x, y in pairs]
    return all(
        torch.equal(getattr(a, side).packed[:, :, : a.packed_length // 64], getattr(b, side).packed)
        for a, b in views
        for side in ("key", "value")
    )


def measure(
    model: Any, preset: str, tokens: int, folder: Path, device: str, cold: bool, repeats: int
) -> dict[str, Any]:
    ids = torch.randint(100, 128000, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    held: list[TurboQuantCache] = []
    held.append(prefill(model, ids[:, : 2 * CHUNK], preset))  # compiles, also what reads a packed past
    held.clear()
    compute = seconds(lambda: held.append(prefill(model, ids, preset)), device)
    cache = held[0]
    save = seconds(lambda: cache.save_pretrained(folder, model=model, input_ids=ids), device)
    size = total_bytes(folder, [*files_named(read_header(folder)), HEADER])
    loads, loaded = [], cache

    def load() -> None:
        nonlocal loaded
        loaded = TurboQuantCache.from_pretrained(folder, model.config, device=device)

    for _ in range(repeats):
        if cold:
            forget(folder)
        loads.append(seconds(load, device))
    row = dict(preset=preset, tokens=tokens, layers=len(cache.layers), bytes=size, held_bytes=cache.nbytes)
    row |= dict(prefill_s=round(compute, 3), save_s=round(save, 3), load_s=round(statistics.median(loads), 3))
    row |= dict(load_first_s=round(loads[0], 3), load_gb_s=round(size / statistics.median(loads) / 1e9, 2), cold=cold)
    return row | dict(save_gb_s=round(size / save / 1e9, 2), same=same(cache, loaded))


def verdict(row: dict[str, Any]) -> str:
    share, speed = row["load_s"] / row["prefill_s"], row["load_gb_s"]
    right = share <= LOAD_SHARE and speed >= LOAD_GB_S and row["same"]
    said = (
        f"{row['preset']:9} {row['tokens']:,} tokens, {row['bytes'] / 1e9:.2f} GB: prefill {row['prefill_s']:.2f} s, "
    )
    said += f"save {row['save_s']:.2f} s, load {row['load_s']:.2f} s = {share:.2f}x (at most {LOAD_SHARE}), "
    said += f"{speed:.2f} GB/s (at least {LOAD_GB_S}), {'the same bits' if row['same'] else 'OTHER BITS'}: "
    return said + ("ok" if right else "MISSED")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="*", default=list(PRESETS))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, help="where to save; a temporary folder if left out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop files from the page cache before each load")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    model, rows = make_model(options.layers, options.device), []
    for preset in options.presets:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            row = measure(
                model, preset, options.tokens, folder / "cache", options.device, options.cold, options.repeats
            )
        finally:
            shutil.rmtree(folder)
        rows.append(row)
        print(verdict(row), flush=True)
        write(options.out, rows)


if __name__ == "__main__":
    main()
