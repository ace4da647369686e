"""The training loop: stages by the clock, the log, saving."""

from __future__ import annotations

import copy
import json
import math
import random
import time
from pathlib import Path

import torch
from transformers import GenerationConfig

from .model import Forward
from .optimizer import Optimizer
from .settings import BATCH_TOKENS, POSITIONS, STAGES
from .text import Feed

# Workers move on to the next stage's length this many seconds early, so that it starts with a stock.
SECONDS_AHEAD = 6
# The clock starts once everything is compiled.
WARMUP_STEPS = 3


def save(model, folder: Path) -> None:
    """bf16 weights, config and generation config; the tokenizer is there already."""
    half = copy.deepcopy(model).to("cpu", torch.bfloat16)
    half.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0, do_sample=False)
    half.save_pretrained(folder)


def stage_length(progress: float) -> int:
    """Sequence length at a share of the training time."""
    return next((n for end, n in STAGES if progress < end), POSITIONS)


def learning_rate(step: int, progress: float) -> float:
    """Share of the full learning rate: 100 steps up, level, then down over the last 40 % of the time."""
    return min(1.0, (step + 1) / 100, max(0.01, (1 - progress) / 0.4))


def to_device(tensors: tuple[torch.Tensor, ...], device: torch.device) -> list[torch.Tensor]:
    if device.type != "cuda":
        return list(tensors)
    return [t.pin_memory().to(device, non_blocking=True) for t in tensors]


class Log:
    """Loss, accuracy and speed since the last entry, every 50 steps."""

    def __init__(self, feed: Feed, device: torch.device, smoke: bool):
        self.feed, self.smoke = feed, smoke
        self.sums = torch.zeros(4, device=device)
        self.entries: list[dict] = []
        self.tokens = self.logged_tokens = 0
        self.last = 0.0

    def due(self, step: int) -> bool:
        return step % (5 if self.smoke else 50) == 0

    def write(self, step: int, length: int, clock: float) -> float:
        """Add an entry; returns its seconds since ``clock``."""
        story, n_story, hits, n_answer = self.sums.tolist()
        now = time.perf_counter() - clock
        entry = {
            "step": step,
            "seconds": round(now, 1),
            "length": length,
            "mtokens": round(self.tokens / 1e6, 1),
            "mtokens_per_s": round((self.tokens - self.logged_tokens) / (now - self.last) / 1e6, 3),
            "story_loss": round(story / max(n_story, 1), 4),
            "answer_token_accuracy": round(hits / max(n_answer, 1), 4),
            "repeated_share": round(self.feed.repeated / self.feed.used, 3),
        }
        self.sums.zero_()
        self.last, self.logged_tokens = now, self.tokens
        self.entries.append(entry)
        if step % 200 == 0 or self.smoke:
            print(json.dumps(entry), flush=True)
        if not math.isfinite(story):
            raise SystemExit("the loss is not finite")
        return now


def train(model, feed: Feed, folder: Path, seconds: float, device: torch.device, smoke: bool) -> dict:
    """Train for ``seconds``; saves every minute and at the end; returns a summary with a log."""
    cuda = device.type == "cuda"
    model.to(device)
    forward = Forward(model, torch.bfloat16 if cuda else torch.float32, compiled=cuda)
    kernel = forward.pick_attention(device) if cuda else "default"
    optimizer, log, rng = Optimizer(model, fused=cuda), Log(feed, device, smoke), random.Random(0)
    tokens_per_step = 2 * POSITIONS if smoke else BATCH_TOKENS
    step, clock, elapsed, last_save = 0, 0.0, 0.0, 0.0
    while elapsed < seconds:
        progress = elapsed / seconds
        length = stage_length(progress)
        feed.length.value = stage_length((elapsed + SECONDS_AHEAD) / seconds)
        ids, weights = to_device(feed.batch(length, tokens_per_step, rng), device)
        loss, stats = forward(ids, weights)
        loss.backward()
        optimizer.step(learning_rate(step, progress))
        model.zero_grad(set_to_none=True)
        log.sums += stats
        step += 1
        if step == WARMUP_STEPS:
            if cuda:
                torch.cuda.synchronize()
            clock = time.perf_counter()
        elif step > WARMUP_STEPS:
            log.tokens += ids[:, 1:].numel()
            if log.due(step) and log.write(step, length, clock) - last_save > 60:
                save(model, folder)
                last_save = log.last
        elapsed = time.perf_counter() - clock if clock else 0.0
    save(model, folder)
    return {
        "steps": step,
        "tokens": log.tokens,
        "train_seconds": round(time.perf_counter() - clock, 1),
        "attention_kernel": kernel,
        "log": log.entries[:: max(1, len(log.entries) // 60)],
    }
