"""Training text: the tokenizer, documents, packed sequences, and the workers that make them."""

from __future__ import annotations

import collections
import json
import math
import multiprocessing as mp
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tq_cache.tools import tasks

from .settings import BATCH_TOKENS, EOS, POSITIONS, STAGES, VOCAB, W_ANSWER, W_FACT, W_QUESTION, W_STORY


def train_tokenizer(folder: Path, seed: int, documents: int = 3000) -> Tokenizer:
    """Byte-level BPE with one token per digit, so that numbers are copied digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = tasks.rng_for("train/tokenizer", seed)
    texts = ("".join(t for t, _ in document(rng, 1500, 1.0)) for _ in range(documents))
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": POSITIONS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return tokenizer


# --------------------------------------------------------------------------------------------
# Training text


def document(rng: random.Random, n_tokens: int, chars_per_token: float) -> list[tuple[str, int]]:
    """A story or a task with several questions: (text, loss weight in tenths) to join.

    ``n_tokens`` is kept only roughly, by character count.
    """

    def count(text: str) -> int:
        return int(len(text) / chars_per_token) + 1

    kind = rng.choices(("story", "passkey", "recall", "copy", "ledger"), (10, 25, 27, 20, 18))[0]
    if kind == "story":
        return [(piece, W_STORY) for piece in take(tasks.story_pieces(rng), n_tokens, count)]
    most = max(1, n_tokens // {"passkey": 40, "recall": 24, "copy": 80, "ledger": 30}[kind])
    cap = {"passkey": 32, "recall": 48, "copy": 8, "ledger": 48}[kind]
    if kind == "recall" and rng.random() < 0.2:
        cap = 300  # Sometimes a list that fills the text.
    items = min(most, cap, int(2 ** rng.uniform(0, math.log2(cap) + 0.5)))
    task = random_words(rng) if kind == "copy" and rng.random() < 0.1 else None
    task = task or tasks.make_task(kind, rng, items=items)
    questions = task.questions[: rng.randint(1, 16)]
    asked = "".join(question + " " + answer for question, answer in questions)
    pieces = tasks.hide(rng, task, n_tokens - count(asked), count)
    fact_weight = W_STORY if kind == "ledger" else W_FACT  # Totals can be worked out.
    parts = [(text, fact_weight if is_fact else W_STORY) for text, is_fact in pieces]
    for question, answer in questions:
        parts += [(question, W_QUESTION), (" " + answer + ".", W_ANSWER)]
    return parts


def random_words(rng: random.Random) -> tasks.Task:
    """A memo of random characters, so that every byte's token gets trained and can be copied."""
    letters = [chr(c) for c in range(33, 127)] + list("äöüéñßçøλдя漢字🙂")
    words = ["".join(rng.choices(letters, k=rng.randint(1, 8))) for _ in range(10)]
    memo = " ".join(words)
    number = str(rng.randint(10, 99))
    question = f"\n\nQuestion: What does memo {number} say?\nAnswer:"
    return tasks.Task("copy", [(rng.random(), f"\n\nMemo {number}: {memo}.")], [(question, memo)])


def take(pieces: Iterator[str], n_tokens: int, count: Callable[[str], int]) -> list[str]:
    """Pieces until they come to about ``n_tokens``."""
    taken, total = [], 0
    while total < n_tokens:
        taken.append(next(pieces))
        total += count(taken[-1])
    return taken


class Encoder:
    """Packs documents into sequences of token ids."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.eos = tokenizer.token_to_id(EOS)
        text = tasks.story_text(20_000, len, 0, "train")
        self.chars_per_token = len(text) / len(tokenizer.encode(text).ids)

    def encode(self, parts: list[tuple[str, int]]) -> tuple[list[int], list[int]]:
        """Ids and weights of one document, with its end token.

        Parts start with a space or a line break and end with neither, so encoding them apart
        gives the same ids as encoding the whole text.
        """
        merged: list[list] = []
        for text, weight in parts:
            if merged and merged[-1][1] == weight:
                merged[-1][0] += text
            else:
                merged.append([text, weight])
        ids: list[int] = []
        weights: list[int] = []
        for encoding, (_, weight) in zip(self.tokenizer.encode_batch([m[0] for m in merged]), merged, strict=True):
            ids += encoding.ids
            weights += [weight] * len(encoding.ids)
        return ids + [self.eos], weights + [W_STORY]

    def sequence(self, rng: random.Random, length: int) -> tuple[np.ndarray, np.ndarray]:
        """``length`` + 1 ids (uint16) and loss weights (uint8)."""
        one_document = rng.random() < 0.5
        ids: list[int] = []
        weights: list[int] = []
        while len(ids) <= length:
            room = length - len(ids)
            if one_document and not ids:
                n_tokens = int(room * rng.uniform(0.85, 0.95))
            else:
                n_tokens = int(2 ** rng.uniform(7, max(7.1, math.log2(length / 2))))
                n_tokens = min(n_tokens, int(room * 0.93))
            if n_tokens < 100:
                parts = [(piece, W_STORY) for piece in take(tasks.story_pieces(rng), room + 64, len)]
            else:
                parts = document(rng, n_tokens, self.chars_per_token)
            new_ids, new_weights = self.encode(parts)
            ids += new_ids
            weights += new_weights
        return (
            np.array(ids[: length + 1], np.uint16),
            np.array(weights[: length + 1], np.uint8),
        )


def work(encoder: Encoder, seed: int, length, queue) -> None:
    """Worker process: blocks of about 37k tokens at the length now asked for, without end."""
    rng = tasks.rng_for("train/worker", seed)
    while True:
        n = length.value
        rows = [encoder.sequence(rng, n) for _ in range(max(1, BATCH_TOKENS // 4 // n))]
        ids, weights = (np.stack(part) for part in zip(*rows, strict=True))
        queue.put((n, ids, weights))


class Feed:
    """Batches from the workers; repeats recent sequences when they cannot keep up."""

    def __init__(self, encoder: Encoder, workers: int, seed: int):
        context = mp.get_context("fork")
        self.length = context.Value("i", STAGES[0][1])
        self.queue = context.Queue(maxsize=4 * workers)
        self.processes = [
            context.Process(target=work, args=(encoder, seed * 1000 + i, self.length, self.queue), daemon=True)
            for i in range(workers)
        ]
        for process in self.processes:
            process.start()
        self.fresh: dict[int, collections.deque] = collections.defaultdict(collections.deque)
        self.recent: dict[int, collections.deque] = collections.defaultdict(lambda: collections.deque(maxlen=2000))
        self.used = self.repeated = 0
        threading.Thread(target=self._collect, daemon=True).start()

    def _collect(self) -> None:
        while True:
            n, ids, weights = self.queue.get()
            while len(self.fresh[n]) > 400:
                time.sleep(0.01)
            self.fresh[n].append((ids, weights))

    def batch(self, length: int, tokens: int, rng: random.Random) -> tuple[torch.Tensor, ...]:
        """Ids (rows, length + 1) and weights (same shape), int64 and float32 on the CPU."""
        rows, blocks = 0, []
        while rows < tokens // length:
            self.used += 1
            if self.fresh[length]:
                blocks.append(self.fresh[length].popleft())
                self.recent[length].append(blocks[-1])
            elif len(self.recent[length]) >= 100:
                blocks.append(rng.choice(self.recent[length]))
                self.repeated += 1
            else:
                self.used -= 1
                time.sleep(0.005)
                continue
            rows += len(blocks[-1][0])
        ids, weights = (np.concatenate(part)[: tokens // length] for part in zip(*blocks, strict=True))
        return torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(weights)

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
