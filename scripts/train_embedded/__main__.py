"""Train the embedded model of tq_cache from text that ``tq_cache/tools/tasks.py`` makes.

One command, no downloads, one GPU::

    python scripts/train_embedded --out DIR --minutes 9 --results RESULTS.json
    python scripts/train_embedded --out DIR --eval-only --results RESULTS.json
    python scripts/train_embedded --out DIR --smoke        # a few minutes on a CPU

It trains a byte-level BPE tokenizer, then a small Qwen3 decoder on packed sequences whose length
grows 512 -> 1024 -> 2048 -> 4608, and measures recall at 1024, 2048 and 4096 tokens. ``DIR`` is
an ordinary Hugging Face folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import sys
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # The workers are the parallelism.
sys.path.pop(0)  # This folder: its modules import each other as a package, and tq_cache from the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tokenizers
import torch
import transformers

from train_embedded.evaluate import evaluate, start_cases
from train_embedded.model import check_forward, make_model
from train_embedded.text import Encoder, Feed, train_tokenizer
from train_embedded.train import train


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train_embedded", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--results", type=Path, help="JSON file for settings and metrics")
    parser.add_argument("--minutes", type=float, default=9.0, help="whole run, start to end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eval-only", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="two layers, a few steps, any CPU")
    return parser.parse_args()


def start_feed(args: argparse.Namespace, workers: int, report: dict) -> Feed:
    """Train the tokenizer and start the workers that make training text."""
    encoder = Encoder(train_tokenizer(args.out, args.seed, 100 if args.smoke else 3000))
    report["chars_per_token"] = round(encoder.chars_per_token, 3)
    print("tokenizer:", report, flush=True)
    return Feed(encoder, workers, args.seed)


def train_model(args: argparse.Namespace, feed: Feed, begin: float, device: torch.device, report: dict) -> None:
    """Train until the whole run's time is nearly up; adds to the report."""
    torch.manual_seed(args.seed)
    model = make_model(args.smoke)
    report["parameters"] = model.num_parameters()
    report["forward_check"] = check_forward(model)
    if report["forward_check"] >= 1e-4:
        raise SystemExit(f"the training forward is not the model's: {report}")
    # Leave time for compiling and for the evaluation (10 to 20 s each on an H200).
    reserve = 5 if args.smoke else 45
    seconds = args.minutes * 60 - (time.perf_counter() - begin) - reserve
    if seconds <= 0:
        raise SystemExit("no time is left for training: give more --minutes")
    report["training"] = train(model, feed, args.out, seconds, device, args.smoke)
    feed.stop()
    print(f"trained: {time.perf_counter() - begin:.1f} s", flush=True)


def environment(device: torch.device) -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def main() -> None:
    args = arguments()
    begin = time.perf_counter()
    report: dict = {"minutes": args.minutes, "seed": args.seed}
    workers = max(1, (os.cpu_count() or 2) - 1)
    # All workers are forked before CUDA is touched; the evaluation's work beside the training.
    feed = None if args.eval_only else start_feed(args, workers, report)
    with mp.get_context("fork").Pool(workers if args.eval_only else 2) as pool:
        pending = start_cases(pool, args.out, args.smoke)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if feed:
            train_model(args, feed, begin, device, report)
        cases = pending.get()
    report["environment"] = environment(device)
    start = time.perf_counter()
    report["evaluation"] = evaluate(args.out, cases, device)
    report["evaluation"]["seconds"] = round(time.perf_counter() - start, 1)
    report["total_seconds"] = round(time.perf_counter() - begin, 1)
    if args.results:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["evaluation"], indent=1), flush=True)
    print(f"total: {report['total_seconds']} s")


if __name__ == "__main__":
    main()
