"""Seeded text tasks whose answers live in the KV cache.

Everything is made from templates with :class:`random.Random`: it needs no download and no
particular tokenizer. Four kinds of question are hidden in filler stories (:mod:`.stories`):

``passkey``  "The secret code of Mira is 48213." somewhere in a long story, asked at the end
``recall``   a price list of ``key: value`` lines, one price asked
``copy``     short memos of unrelated words, one asked back word for word
``ledger``   accounts with running totals, one final total asked

:func:`build_case` makes one of about ``n_tokens`` tokens for any ``count_tokens(text) -> int``;
:func:`heldout_text` gives story text for perplexity.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .stories import invented_name, story, story_pieces  # noqa: F401
from .words import COLOURS, HE, PLAIN, SHE, THINGS

KINDS = ("passkey", "recall", "copy", "ledger")
CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Case:
    """One question: feed ``prompt``, expect ``answer``.

    ``depth`` is where the fact lies in the filler (0 start, 1 end); ``length`` is ``count_tokens(prompt)``.
    """

    prompt: str
    answer: str
    kind: str
    depth: float
    length: int

    @property
    def target(self) -> str:
        """The text that follows the prompt, with its leading space."""
        return " " + self.answer

    def matches(self, generated: str) -> bool:
        """Whether generated text (without the prompt) starts with exactly the answer."""
        text = generated.strip()
        rest = text[len(self.answer) :]
        return text.startswith(self.answer) and not rest[:1].isalnum()


@dataclass(frozen=True)
class Task:
    """Facts to insert into filler, and questions about them.

    ``inserts``: (depth, text) with 0 <= depth <= 1; ``questions``: (question, answer), the first
    is about the fact at the depth that was asked for.
    """

    kind: str
    inserts: list[tuple[float, str]]
    questions: list[tuple[str, str]]


def _question(text: str) -> str:
    return f"\n\nQuestion: {text}\nAnswer:"


def _digits(rng: random.Random, count: int) -> str:
    return str(rng.randint(10 ** (count - 1), 10**count - 1))


def _unique(draw: Callable[[], str], count: int) -> list[str]:
    found: dict[str, None] = {}
    for _ in range(1000 * count):
        if len(found) < count:
            found[draw()] = None
    if len(found) == count:
        return list(found)
    raise ValueError(f"expected fewer than {count} items: there are about {len(found)} different ones")


def _any_name(rng: random.Random) -> str:
    return invented_name(rng) if rng.random() < 0.3 else rng.choice(SHE + HE)


def passkey_task(rng: random.Random, depth: float, items: int) -> Task:
    """``items`` codes of different people: one at ``depth``, the others anywhere."""
    names = _unique(lambda: _any_name(rng), items)
    inserts, questions = [], []
    for index, name in enumerate(names):
        code = _digits(rng, 5)
        where = depth if index == 0 else rng.random()
        inserts.append((where, f" The secret code of {name} is {code}."))
        questions.append((_question(f"What is the secret code of {name}?"), code))
    return Task("passkey", inserts, questions)


def recall_task(rng: random.Random, depth: float, items: int) -> Task:
    """One price list of ``items`` lines at ``depth``."""
    keys = _unique(lambda: f"{rng.choice(COLOURS)} {rng.choice(THINGS)}", items)
    prices = [_digits(rng, 4) for _ in keys]
    lines = [f"\n{key}: {price}" for key, price in zip(keys, prices, strict=True)]
    questions = [
        (_question(f"What is the price of the {key}?"), price) for key, price in zip(keys, prices, strict=True)
    ]
    rng.shuffle(questions)
    return Task("recall", [(depth, "\n\nList of prices." + "".join(lines))], questions)


def copy_task(rng: random.Random, depth: float, items: int, words: int = 12) -> Task:
    """``items`` numbered memos of ``words`` unrelated words: one at ``depth``."""
    numbers = _unique(lambda: _digits(rng, 2), items)
    inserts, questions = [], []
    for index, number in enumerate(numbers):
        memo = " ".join(rng.choice(rng.choice((PLAIN, THINGS, COLOURS))) for _ in range(words))
        where = depth if index == 0 else rng.random()
        inserts.append((where, f"\n\nMemo {number}: {memo}."))
        questions.append((_question(f"What does memo {number} say?"), memo))
    return Task("copy", inserts, questions)


def ledger_task(rng: random.Random, depth: float, items: int) -> Task:
    """A ledger of ``items`` lines over four accounts at ``depth``; the last totals are asked."""
    names = _unique(lambda: _any_name(rng), 4)
    totals: dict[str, int] = {}
    lines = []
    for index in range(max(items, len(names))):
        if index < len(names):
            name = names[index]
            totals[name] = rng.randint(10, 60)
            lines.append(f"\n{name} starts with {totals[name]} coins.")
            continue
        name = rng.choice(names)
        amount = rng.randint(2, 9)
        if totals[name] - amount < 10 or (totals[name] + amount < 100 and rng.random() < 0.5):
            totals[name] += amount
            lines.append(f"\n{name} gets {amount} coins and has {totals[name]} coins.")
        else:
            totals[name] -= amount
            lines.append(f"\n{name} pays {amount} coins and has {totals[name]} coins.")
    questions = [
        (_question(f"How many coins does {name} have at the end?"), str(total)) for name, total in totals.items()
    ]
    rng.shuffle(questions)
    return Task("ledger", [(depth, "\n\nLedger of coins." + "".join(lines))], questions)


_MAKERS: tuple[Callable[..., Task], ...] = (passkey_task, recall_task, copy_task, ledger_task)
_TASKS = dict(zip(KINDS, _MAKERS, strict=True))
DEFAULT_ITEMS = {"passkey": 8, "recall": 24, "copy": 3, "ledger": 24}


def make_task(kind: str, rng: random.Random, depth: float | None = None, items: int | None = None) -> Task:
    """A task of one of :data:`KINDS`; ``items`` is its number of codes, lines or memos."""
    if kind not in _TASKS:
        raise ValueError(f"unknown task kind {kind!r}; choose from {', '.join(KINDS)}")
    if depth is None:
        depth = rng.random()
    return _TASKS[kind](rng, depth, items or DEFAULT_ITEMS[kind])


def hide(rng: random.Random, task: Task, n_tokens: int, count_tokens: CountTokens) -> list[tuple[str, bool]]:
    """Filler story text with the task's facts in it, as (text, is_fact) pieces to join.

    Filler is added by the sentence while facts, filler and first question stay within ``n_tokens``;
    facts stand at the sentence nearest their depth.
    """
    question = task.questions[0][0]
    used = count_tokens(question) + _facts_size(task, count_tokens)
    used += count_tokens("\n\n") * len(task.inserts)  # Each may start a new paragraph.
    filler: list[str] = []
    starts: list[int] = []  # Tokens of filler before each piece.
    total = 0
    for piece in story_pieces(rng):
        size = count_tokens(piece)
        if used + total + size > n_tokens:
            break
        filler.append(piece)
        starts.append(total)
        total += size
    starts.append(total)

    before: dict[int, list[str]] = {}
    for depth, text in sorted(task.inserts, key=lambda insert: insert[0]):
        nearest = min(range(len(starts)), key=lambda i: abs(starts[i] - depth * total))
        before.setdefault(nearest, []).append(text)
    pieces: list[tuple[str, bool]] = []
    for index in range(len(starts)):
        pieces += [(text, True) for text in before.get(index, [])]
        if index < len(filler):
            piece = filler[index]
            if index in before:
                # A list or memo ends its paragraph: the story goes on in a new one.
                after_block = before[index][-1].startswith("\n")
                piece = ("\n\n" if after_block else " ") + piece.lstrip()
            pieces.append((piece, False))
    pieces[0] = (pieces[0][0].lstrip(), pieces[0][1])
    return pieces


def _facts_size(task: Task, count_tokens: CountTokens) -> int:
    return sum(count_tokens(text) for _, text in task.inserts)


def build_case(
    kind: str,
    n_tokens: int,
    count_tokens: CountTokens,
    seed: int,
    depth: float | None = None,
    items: int | None = None,
    split: str = "eval",
) -> Case:
    """A case whose prompt has about ``n_tokens`` tokens: a sentence or two short, rarely a token over.

    Unless ``items`` is given, short prompts get fewer facts, so that filler is at least half.
    Tokens are counted sentence by sentence, so leave special tokens out of ``count_tokens``. The
    same arguments give the same case. ``split`` names the seed space: training uses "train" only.
    """
    rng = rng_for(f"{split}/{kind}", seed)
    task = make_task(kind, rng, depth, items)
    default = DEFAULT_ITEMS.get(kind, 0)
    while items is None and default > 1 and _facts_size(task, count_tokens) > n_tokens / 2:
        default //= 2
        task = make_task(kind, rng, depth, default)
    where = task.inserts[0][0]
    question, answer = task.questions[0]
    pieces = hide(rng, task, n_tokens, count_tokens)
    prompt = "".join(text for text, _ in pieces) + question
    return Case(prompt, answer, kind, where, count_tokens(prompt))


def rng_for(split: str, seed: int) -> random.Random:
    """A generator for one seed of one split; different splits never share a stream."""
    return random.Random(f"tq_cache/{split}/{seed}")


def story_text(n_tokens: int, count_tokens: CountTokens, seed: int, split: str) -> str:
    """Story text about one cast, of at least ``n_tokens`` tokens (over by at most a sentence)."""
    pieces: list[str] = []
    total = 0
    for piece in story_pieces(rng_for(split, seed)):
        pieces.append(piece)
        total += count_tokens(piece)
        if total >= n_tokens:
            break
    return "".join(pieces)


def heldout_text(n_tokens: int, count_tokens: CountTokens, seed: int = 0) -> str:
    """Held-out story text for perplexity: the embedded model never saw this seed space."""
    return story_text(n_tokens, count_tokens, seed, "heldout")
