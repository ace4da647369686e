"""generate() of a whole model, plain, with `tq_cache.enable`, and with a cache preallocated by hand: ms a token.

    python benchmarks/enable.py --out benchmarks/results/enable_h200.json

Models as in `generate.py`.  The device's clock is read at the second token of a call and at its last: what lies between
is the time of a token without the prompt; all that the call takes, through all its tokens, is that with it.  Of as many
calls as begin within `--seconds` (5 at most) the median counts, after one for what is compiled or planned.  By hand is
one cache with just the room needed, reset() before each call, in turn with the calls without one.  Then five calls of
the enabled model with other prompt lengths, none longer: how many graphs they compile.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
from generate import MODELS, make_model, milliseconds
from measure import write

import tq_cache
from tq_cache import TurboQuantCache

SHAPES = ((1, 1024), (1, 32768), (8, 32768))
SHORTER = (1.0, 0.97, 0.9, 0.75, 0.5)  # of the longest prompt
MOST_CALLS = 5
SLACK = 1.03  # of the enabled path over the one by hand


class Clock:
    """A logits processor that changes nothing: the device's clock at every token."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record()
        return scores

    def ms_per_token(self) -> float:
        """Of the tokens after the second, the first of which a step gave."""
        return self.events[1].elapsed_time(self.events[-1]) / (len(self.events) - 2)


def call(model: Any, batch: int, tokens: int, new: int, cache: TurboQuantCache | None) -> tuple[float, float]:
    """Milliseconds of a token, and of the whole call, with a prompt of so many tokens."""
    ids, clock = torch.randint(3, 1000, (batch, tokens), device=model.device), Clock()
    given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=new, logits_processor=[clock])
    given |= dict(do_sample=False, pad_token_id=0, eos_token_id=None)
    if cache is not None:
        cache.reset()
        given["past_key_values"] = cache
    whole = milliseconds(model.generate, ids, **given)
    return clock.ms_per_token(), whole


def in_turn(ways: dict[str, Callable[[], tuple[float, float]]], seconds: float) -> dict[str, tuple[float, float, int]]:
    """Medians of the calls of every way, and how many: one of each in turn, as the CPU is not always as fast."""
    for way in ways.values():
        way()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    until = time.monotonic() + seconds
    for count in range(MOST_CALLS):
        if count and time.monotonic() > until:
            break
        for name, way in ways.items():
            times[name].append(way())
    medians = {name: [statistics.median(part) for part in zip(*taken, strict=True)] for name, taken in times.items()}
    return {name: (token, whole, len(times[name])) for name, (token, whole) in medians.items()}


def compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def measure(model: Any, name: str, preset: str, shape: tuple[int, int], new: int, seconds: float) -> list[dict]:
    """The rows of one shape; where the 16-bit cache finds no room, without it."""
    batch, tokens = shape
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = {}
    try:
        found = in_turn({"plain": lambda: call(model, batch, tokens, new, None)}, seconds)
    except torch.OutOfMemoryError as problem:
        print(f"{name:10} {batch} x {tokens}  plain: {str(problem)[:80]}", flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    cache = TurboQuantCache(model.config, preset, max_cache_len=tokens + new)
    with tq_cache.enable(model, preset):
        ways = {"enabled": None, "by hand": cache}  # a cache that is given wins
        calls = {way: lambda given=given: call(model, batch, tokens, new, given) for way, given in ways.items()}
        found |= in_turn(calls, seconds)
        graphs, lengths = compilations(), [int(tokens * share) for share in SHORTER]
        others = [call(model, batch, length, new, None)[1] for length in lengths]
        more = compilations() - graphs
    rows = []
    for way, (ms, whole, count) in found.items():
        row = dict(model=name, way=way, preset=None if way == "plain" else preset, batch=batch, tokens=tokens, new=new)
        row |= dict(ms_per_token=round(ms, 3), ms_with_prompt=round(whole / new, 3), calls=count)
        if way == "enabled":
            row |= dict(lengths=lengths, whole_ms=[round(x, 1) for x in others], recompilations=more)
        print(f"{name:10} {batch:3} x {tokens:7,}  {way:8} {ms:8.2f} ms a token, with the prompt {whole / new:8.2f}")
        rows.append(row)
    return rows


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
    parser.add_argument("--preset", default="tq4")
    parser.add_argument("--new", type=int, default=64, help="tokens that a call generates")
    parser.add_argument(
        "--seconds", type=float, default=15, help="for the calls that are measured of plain, and of the others"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, rows = make_model(options.model), []
    for shape in options.shapes:
        batch, tokens = map(int, shape.split("x"))
        rows += measure(model, options.model, options.preset, (batch, tokens), options.new, options.seconds)
        write(options.out, rows)
    print("\n".join(verdicts(rows)))


if __name__ == "__main__":
    main()
