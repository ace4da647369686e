"""generate() of a whole model, plain, with `tq_cache.enable`, and with a cache preallocated by hand: ms a token.

    python benchmarks/enable.py --out benchmarks/results/enable_h200.json

Models as in `generate.py`.  A call generates 2 tokens, then `--new` more: what the longer one takes more is that of a
token without the prompt; all that it takes, through all its tokens, is that with it.  Of several calls the median
counts, after two for what is compiled or planned.  By hand is one cache with just the room needed, reset() before each
call.  Then five calls with other prompt lengths, none longer: how many graphs they compile.
"""

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
from generate import MODELS, make_model, milliseconds
from measure import write

import tq_cache
from tq_cache import TurboQuantCache

SHAPES = ((1, 1024), (1, 32768), (8, 32768))
WAYS = ("plain", "enabled", "by hand")
SHORTER = (1.0, 0.97, 0.9, 0.75, 0.5)  # of the longest prompt
FIRST = 2  # tokens of the short calls
SLACK = 1.03  # of the enabled path over the one by hand

Call = Callable[[int, int], torch.Tensor]  # with so many tokens of a prompt, so many new ones


@contextmanager
def caller(model: Any, way: str, preset: str, batch: int, tokens: int, new: int) -> Iterator[Call]:
    """generate() in one of the ways."""
    options: dict[str, Any] = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
    cache = None
    if way == "by hand":
        model.set_attn_implementation("turboquant")
        cache = TurboQuantCache(model.config, preset, max_cache_len=tokens + new)
    if way == "enabled":
        tq_cache.enable(model, preset)

    def call(length: int, count: int) -> torch.Tensor:
        ids = torch.randint(3, 1000, (batch, length), device=model.device)
        if cache is not None:
            cache.reset()
            options["past_key_values"] = cache
        out: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options)
        return out

    try:
        yield call
    finally:
        tq_cache.disable(model)
        model.set_attn_implementation("sdpa")


def compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def measure(model: Any, name: str, way: str, preset: str, shape: tuple[int, int], new: int, calls: int) -> dict:
    batch, tokens = shape
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()
    torch.cuda.empty_cache()
    with caller(model, way, preset, batch, tokens, new) as call:
        times: dict[int, list[float]] = {FIRST: [], new: []}
        for _ in range(calls + 2):
            for count, taken in times.items():
                taken.append(milliseconds(call, tokens, count))
        first, whole = (statistics.median(taken[2:]) for taken in times.values())
        graphs = compilations()
        lengths = [int(tokens * share) for share in SHORTER]
        others = [milliseconds(call, length, new) for length in lengths]
    row = dict(model=name, way=way, preset=preset if way != "plain" else None, batch=batch, tokens=tokens, new=new)
    row |= dict(ms_per_token=round((whole - first) / (new - FIRST), 3), ms_with_prompt=round(whole / new, 3))
    row |= dict(first_token_ms=round(first, 1), graphs=graphs, lengths=lengths, ms=[round(ms, 1) for ms in others])
    row["recompilations"] = compilations() - graphs
    line = f"{name:10} {batch:3} x {tokens:7,}  {way:8} {row['ms_per_token']:8.2f} ms a token, with the prompt "
    print(f"{line}{row['ms_with_prompt']:8.2f}; {graphs} graphs, {row['recompilations']} for other lengths", flush=True)
    return row


def verdicts(rows: list[dict]) -> list[str]:
    """What must hold, and whether it does, of every shape."""
    lines = []
    for row in rows:
        if row["way"] != "enabled":
            continue
        place = f"{row['batch']} x {row['tokens']:,}"
        lines.append(f"{place}: {row['recompilations']} recompilations in {len(row['lengths'])} calls (none wanted)")
        others = {x["way"]: x for x in rows if (x["batch"], x["tokens"]) == (row["batch"], row["tokens"])}
        if "by hand" in others:
            ratio = row["ms_per_token"] / others["by hand"]["ms_per_token"]
            kept = "kept" if ratio <= SLACK else "missed"
            lines.append(f"{place}: enabled takes {ratio:.3f} of the time by hand ({SLACK} allowed: {kept})")
        if "plain" in others:
            lines.append(f"{place}: {others['plain']['ms_per_token'] / row['ms_per_token']:.2f}x of plain generate()")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--shapes", nargs="*", default=[f"{batch}x{tokens}" for batch, tokens in SHAPES])
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--preset", default="tq4")
    parser.add_argument("--new", type=int, default=66, help="tokens of the long calls")
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, rows = make_model(options.model), []
    for shape in options.shapes:
        batch, tokens = map(int, shape.split("x"))
        for way in options.ways:
            try:
                rows.append(
                    measure(model, options.model, way, options.preset, (batch, tokens), options.new, options.calls)
                )
            except torch.OutOfMemoryError as problem:
                print(f"{options.model:10} {shape:12} {way:8} {str(problem)[:80]}", flush=True)
            write(options.out, rows)
    print("\n".join(verdicts(rows)))


if __name__ == "__main__":
    main()
