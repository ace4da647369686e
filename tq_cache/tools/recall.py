"""Recall at depth: facts hidden in long stories, and whether a cache still has them when it is asked at the end.

Prompts of all kinds and depths go through as one batch.  They are filled up at the front, with the end of another
story, to the same length; a padded batch would measure how a cache treats padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .runs import encode
from .scores import prefill
from .tasks import build_case, heldout_text

# Tokens at a prompt's end that are decoded rather than prefilled, so that the question reads the packed cache.
QUESTION_TOKENS = 32


@dataclass(frozen=True)
class RecallCase:
    """A question at the end of a story: `kind` of `tasks.KINDS`, and the `depth` of the fact, 0 (start) to 1."""

    kind: str
    depth: float
    prompt: list[int]
    answer: list[int]


def recall_cases(
    tokenizer: Any, length: int, kinds: Sequence[str], depths: Sequence[float], count: int, seed: int
) -> list[RecallCase]:
    """`count` cases per kind and depth, of about `length` tokens, all prompts of the same length."""

    def tokens(text: str) -> int:
        return len(encode(tokenizer, text))

    cases = []
    for depth in depths:
        for kind in kinds:
            for index in range(count):
                case = build_case(kind, length, tokens, seed + index, depth)
                cases.append(RecallCase(kind, depth, encode(tokenizer, case.prompt), encode(tokenizer, case.target)))
    longest = max((len(case.prompt) for case in cases), default=0)
    filler = encode(tokenizer, heldout_text(max(longest, 1), tokens, seed)) if cases else []
    return [
        RecallCase(case.kind, case.depth, filler[len(filler) - longest + len(case.prompt) :] + case.prompt, case.answer)
        for case in cases
    ]


@torch.inference_mode()
def recalled(model: Any, cases: Sequence[RecallCase], cache: Any, prefill_chunk: int | None = None) -> list[bool]:
    """Whether every token of each answer is the most likely one under `cache`, those before it given.

    All but the last `QUESTION_TOKENS` of the prompts, which are equally long, are prefilled; those and the answers go
    through in one forward.  One miss does not lead the rest of an answer astray.
    """
    length, most = len(cases[0].prompt), max(len(case.answer) for case in cases)
    # What is behind a shorter answer is read by nobody.
    rows = [case.prompt + case.answer + case.answer[-1:] * (most - len(case.answer)) for case in cases]
    ids = torch.tensor(rows, device=model.device)
    start = max(length - QUESTION_TOKENS, 1)
    prefill(model, ids[:, :start], cache, prefill_chunk)
    logits = model(ids[:, start:-1], past_key_values=cache, logits_to_keep=most).logits
    right = (logits.argmax(dim=-1) == ids[:, length:]).cpu()
    return [bool(row[: len(case.answer)].all()) for row, case in zip(right, cases, strict=True)]


def shares(labels: Sequence[str], hits: Sequence[bool]) -> dict[str, float]:
    """The share of hits for each label, in the order in which labels first come."""
    found: dict[str, list[bool]] = {}
    for label, hit in zip(labels, hits, strict=True):
        found.setdefault(label, []).append(hit)
    return {label: sum(own) / len(own) for label, own in found.items()}
