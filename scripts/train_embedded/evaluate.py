"""Recall by kind, length and depth, and perplexity of a trained folder, with its 16-bit cache."""

from __future__ import annotations

import collections
import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tq_cache.tools import tasks

EVAL_LENGTHS = (1024, 2048, 4096)
EVAL_CASES = 220
# name: (kind, number of facts); None takes the default of tasks.py.
EVALS = {kind: (kind, None) for kind in tasks.KINDS} | {
    "passkey_32_names": ("passkey", 32),
    "recall_96_pairs": ("recall", 96),
}
DEPTHS = tuple(i / 10 for i in range(11))
# (name, length, depth, prompt ids, target ids)
EvalCase = tuple[str, int, float, list[int], list[int]]


def start_cases(pool, folder: Path, smoke: bool):
    """All evaluation cases, made by a pool of workers: an ``AsyncResult`` of a list of them."""
    jobs = [
        (str(folder / "tokenizer.json"), name, length, index)
        for length in ((512,) if smoke else EVAL_LENGTHS)
        for name in (tasks.KINDS if smoke else EVALS)
        for index in range(11 if smoke else EVAL_CASES)
    ]
    return pool.map_async(eval_case, jobs, chunksize=20)


def eval_case(job: tuple[str, str, int, int]) -> EvalCase:
    """One case of (tokenizer file, name, length, index)."""
    tokenizer_file, name, length, index = job
    kind, items = EVALS[name]
    tokenizer = _tokenizer(tokenizer_file)
    case = tasks.build_case(
        kind,
        length,
        lambda text: len(tokenizer.encode(text).ids),
        seed=length * 10_000 + index,
        depth=DEPTHS[index % len(DEPTHS)],
        items=items,
    )
    return name, length, case.depth, tokenizer.encode(case.prompt).ids, tokenizer.encode(case.target).ids


_tokenizer = functools.cache(Tokenizer.from_file)


@torch.no_grad()
def evaluate(folder: Path, cases: list[EvalCase], device: torch.device) -> dict:
    """Exact-match accuracy by kind, length and depth, and held-out perplexity."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sample = tasks.heldout_text(2000, lambda t: len(raw.encode(t).ids), seed=99)
    if AutoTokenizer.from_pretrained(folder)(sample)["input_ids"] != raw.encode(sample).ids:
        raise SystemExit("AutoTokenizer does not encode as tokenizer.json does")
    return {
        "cases_each": EVAL_CASES,
        **accuracies(model, cases, device),
        "generate_longest": generate_longest(model, cases, device),
        "heldout_perplexity": perplexity(model, raw, device),
    }


def accuracies(model, cases: list[EvalCase], device: torch.device) -> dict:
    """Accuracy of greedy decoding, by one forward pass over prompt and target.

    An answer is right if every target token is the most likely one after those before it.
    """
    hits = collections.defaultdict(list)
    by_depth = collections.defaultdict(list)
    for start in range(0, len(cases), 20):
        batch = cases[start : start + 20]
        rows = [prompt + target for _, _, _, prompt, target in batch]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for row, values in zip(ids, rows, strict=True):
            row[: len(values)] = torch.tensor(values)
        best = model(ids.to(device)).logits.argmax(-1).cpu()
        for row, (name, length, depth, prompt, target) in zip(best, batch, strict=True):
            got = row[len(prompt) - 1 : len(prompt) + len(target) - 1].tolist()
            hits[name, length].append(got == target)
            by_depth[name, length, depth].append(got == target)
    accuracy: dict = {}
    for (name, length), values in sorted(hits.items()):
        accuracy.setdefault(name, {})[length] = round(sum(values) / len(values), 4)
    at_depth: dict = {}
    for (name, length, depth), values in sorted(by_depth.items()):
        at_depth.setdefault(name, {}).setdefault(length, {})[depth] = round(sum(values) / len(values), 3)
    return {"accuracy": accuracy, "accuracy_by_depth": at_depth}


def generate_longest(model, cases: list[EvalCase], device: torch.device) -> dict[str, str]:
    """About 44 of the longest cases decoded with ``generate``: name -> "right/all"."""
    longest = [c for c in cases if c[1] == max(c[1] for c in cases)]
    decoded = collections.defaultdict(list)
    for name, _, _, prompt, target in longest[:: max(1, len(longest) // 44)]:
        out = model.generate(
            torch.tensor([prompt], device=device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=device),
            max_new_tokens=len(target),
            do_sample=False,
        )
        decoded[name].append(out[0, len(prompt) :].tolist() == target)
    return {name: f"{sum(v)}/{len(v)}" for name, v in sorted(decoded.items())}


def perplexity(model, tokenizer: Tokenizer, device: torch.device) -> dict:
    """Per token, of 16 held-out texts of 4096 tokens."""
    rows = []
    for seed in range(16):
        text = tasks.heldout_text(4096, lambda t: len(tokenizer.encode(t).ids), seed=seed)
        ids = torch.tensor([tokenizer.encode(text).ids[:4096]], device=device)
        logits = model(ids).logits[0, :-1].float()
        rows.append(F.cross_entropy(logits, ids[0, 1:], reduction="none").cpu())
    losses = torch.stack(rows)
    return {
        "tokens": losses.numel(),
        "all": round(losses.mean().exp().item(), 4),
        "positions_0_512": round(losses[:, :512].mean().exp().item(), 4),
        "positions_2048_4096": round(losses[:, 2048:].mean().exp().item(), 4),
    }
