"""The longest context that fits into limited GPU memory beside the weights of an 8B model, by cache.

    python benchmarks/longest_context.py --out benchmarks/results/longest_context_h200.json

A cache is filled with random keys and values, 2,048 tokens at a time; of every 4,096, the model itself runs the last
chunk and a step, with all the memory they need.  The last length at which that worked counts.
"""

import argparse
import gc
from pathlib import Path

import torch
from generate import fill, make_cache, make_model
from measure import write

CHUNK, EVERY = 2048, 4096


def longest(model: torch.nn.Module, name: str) -> int:
    """Tokens that were in the cache when a chunk and a step last fitted."""
    cache, attention = make_cache(name, "eager", model.config, 0)
    model.set_attn_implementation(attention)
    reached = 0
    try:
        while True:
            for _ in range((EVERY - CHUNK) // CHUNK):
                fill(cache, model.config, 1, CHUNK)
            with torch.inference_mode():
                for tokens in (CHUNK, 1):
                    ids = torch.randint(0, 1000, (1, tokens), device="cuda")
                    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            torch.cuda.synchronize()
            reached = int(cache.get_seq_length())
    except torch.OutOfMemoryError:
        return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--caches", nargs="*", default=["DynamicCache", "fp8_e4m3", "4bit_nc", "tq3"])
    parser.add_argument("--gigabytes", type=float, default=24.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(options.gigabytes * 1e9 / total)
    model, rows = make_model("llama-8b"), []
    for name in options.caches:
        tokens = longest(model, name)
        gc.collect()
        torch.cuda.empty_cache()
        rows.append(dict(model="llama-8b", cache=name, gigabytes=options.gigabytes, tokens=tokens))
        rows[-1] |= dict(ratio=round(tokens / rows[0]["tokens"], 2))
        print(f"{name:14} {tokens:8,} tokens  {rows[-1]['ratio']:.2f}x", flush=True)
        write(options.out, rows)


if __name__ == "__main__":
    main()
