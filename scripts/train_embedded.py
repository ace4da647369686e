"""Train the embedded model of tq_cache from text that ``tq_cache/tasks.py`` makes.

One command, no downloads, one GPU::

    python scripts/train_embedded.py --out DIR --minutes 9 --results RESULTS.json
    python scripts/train_embedded.py --out DIR --eval-only --results RESULTS.json
    python scripts/train_embedded.py --out DIR --smoke        # seconds on a CPU

It trains a byte-level BPE tokenizer, then a small Qwen3 decoder on packed sequences whose length
grows 512 -> 1024 -> 2048 -> 4608, and measures recall at 1024, 2048 and 4096 tokens. ``DIR`` is
an ordinary Hugging Face folder.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import math
import multiprocessing as mp
import os
import platform
import random
import threading
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # The workers are the parallelism.

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.attention import SDPBackend, sdpa_kernel

# Loaded by path: this needs the text generator only, not the package around it.
_SPEC = importlib.util.spec_from_file_location(
    "tq_cache_tasks", Path(__file__).resolve().parent.parent / "tq_cache" / "tasks.py"
)
tasks = importlib.util.module_from_spec(_SPEC)
# dataclasses looks the module up by name.
__import__("sys").modules["tq_cache_tasks"] = tasks
_SPEC.loader.exec_module(tasks)

EOS = "<|endoftext|>"
VOCAB = 1024
LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM = 8, 192, 512, 4, 2, 64
POSITIONS = 4608
ROPE_THETA = 100_000.0
# Divisible by every length, so that the compiled code sees one shape.
BATCH_TOKENS = 147_456
# (share of the training time at which the stage ends, sequence length)
STAGES = ((0.22, 512), (0.37, 1024), (0.60, 2048), (1.0, POSITIONS))
# Loss weights in tenths: random digits of a fact cannot be predicted, answers are the point.
W_STORY, W_FACT, W_QUESTION, W_ANSWER = 10, 2, 2, 40
EVAL_LENGTHS = (1024, 2048, 4096)
EVAL_CASES = 220
# name: (kind, number of facts); None takes the default of tasks.py.
EVALS = {kind: (kind, None) for kind in tasks.KINDS} | {
    "passkey_32_names": ("passkey", 32),
    "recall_96_pairs": ("recall", 96),
}
DEPTHS = tuple(i / 10 for i in range(11))


# --------------------------------------------------------------------------------------------
# Tokenizer


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


def take(pieces, n_tokens: int, count) -> list[str]:
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


# --------------------------------------------------------------------------------------------
# Model


def make_model(smoke: bool):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=2 if smoke else LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    for layer in model.model.layers:
        # Residual branches start at zero; sharper attention from the start suits recall.
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, 1.4)
        torch.nn.init.constant_(layer.self_attn.k_norm.weight, 1.4)
    return model


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (tokens, heads, 64) by (tokens, 1, 64)."""
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


def attention_in(x, norm, wq, wk, wv, q_norm, k_norm, cos, sin):
    """(tokens, hidden) -> q, k, v of (tokens, heads, 64)."""
    h = rms(x, norm)
    q, k, v = (F.linear(h, w.to(h.dtype)).unflatten(-1, (-1, HEAD_DIM)) for w in (wq, wk, wv))
    return rotate(rms(q, q_norm), cos, sin), rotate(rms(k, k_norm), cos, sin), v


def attention_out(x, attended, wo, norm, gate, up, down):
    """Output projection and MLP, each with its residual; (tokens, hidden) again."""
    x = x + F.linear(attended, wo.to(x.dtype))
    h = rms(x, norm)
    h = F.silu(F.linear(h, gate.to(x.dtype))) * F.linear(h, up.to(x.dtype))
    return x + F.linear(h, down.to(x.dtype))


def head(x, norm, embedding, targets, weights):
    """Weighted loss; sums and counts of story loss and answer hits for the log."""
    logits = F.linear(rms(x, norm), embedding.to(x.dtype)).float()
    losses = F.cross_entropy(logits, targets, reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    story, answer = weights == W_STORY, weights == W_ANSWER
    hits = logits.argmax(-1) == targets
    stats = torch.stack(((losses * story).sum(), story.sum(), (hits & answer).sum(), answer.sum()))
    return loss, stats.detach()


class Forward:
    """The training forward pass over the parameters of a Qwen3ForCausalLM.

    The same function as the Hugging Face model (``check_forward``), but flat over tokens, so that
    one compiled shape serves all sequence lengths.
    """

    def __init__(self, model, dtype: torch.dtype, compiled: bool):
        self.model, self.dtype = model, dtype
        wrap = torch.compile(dynamic=False) if compiled else (lambda f: f)
        self.attention_in, self.attention_out = wrap(attention_in), wrap(attention_out)
        self.head = wrap(head)
        self.backends: list[SDPBackend] = []

    def angles(self, length: int, rows: int, device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin: (rows * length, 1, 64)."""
        inverse = ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
        angle = torch.outer(torch.arange(length, device=device).float(), inverse)
        angle = torch.cat((angle, angle), dim=-1).repeat(rows, 1).unsqueeze(1)
        return angle.cos(), angle.sin()

    def attend(self, q, k, v, rows: int) -> torch.Tensor:
        q, k, v = (t.unflatten(0, (rows, -1)).transpose(1, 2) for t in (q, k, v))
        if self.backends:
            with sdpa_kernel(self.backends):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(-1, HEADS * HEAD_DIM)

    def __call__(self, ids: torch.Tensor, weights: torch.Tensor):
        """ids, weights: (rows, length + 1), the weights those of predicting each token."""
        rows, length = ids.shape[0], ids.shape[1] - 1
        inner = self.model.model
        cos, sin = self.angles(length, rows, ids.device)
        x = F.embedding(ids[:, :-1].reshape(-1), inner.embed_tokens.weight).to(self.dtype)
        for layer in inner.layers:
            a, m = layer.self_attn, layer.mlp
            q, k, v = self.attention_in(
                x,
                layer.input_layernorm.weight,
                a.q_proj.weight,
                a.k_proj.weight,
                a.v_proj.weight,
                a.q_norm.weight,
                a.k_norm.weight,
                cos,
                sin,
            )
            x = self.attention_out(
                x,
                self.attend(q, k, v, rows),
                a.o_proj.weight,
                layer.post_attention_layernorm.weight,
                m.gate_proj.weight,
                m.up_proj.weight,
                m.down_proj.weight,
            )
        targets = ids[:, 1:].reshape(-1).long()
        return self.head(
            x,
            inner.norm.weight,
            inner.embed_tokens.weight,
            targets,
            weights[:, 1:].reshape(-1).float(),
        )

    def pick_attention(self, device) -> str:
        """Use the faster of the two fused attention kernels at the longest length."""
        rows = BATCH_TOKENS // POSITIONS
        shape = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        qkv = [torch.randn(BATCH_TOKENS, h, HEAD_DIM, device=device, dtype=self.dtype) for h in shape.values()]
        best = math.inf
        chosen: list[SDPBackend] = []
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            self.backends = [backend]
            leaves = [t.clone().requires_grad_() for t in qkv]
            try:
                for step in range(6):
                    if step == 2:
                        torch.cuda.synchronize()
                        start = time.perf_counter()
                    self.attend(*leaves, rows).sum().backward()
                torch.cuda.synchronize()
            except RuntimeError as error:
                print(f"attention {backend.name}: {str(error).splitlines()[0]}", flush=True)
                continue
            took = (time.perf_counter() - start) / 4
            print(f"attention {backend.name}: {took * 1e3:.1f} ms a layer", flush=True)
            if took < best:
                best, chosen = took, [backend]
        self.backends = chosen
        return chosen[0].name if chosen else "default"


def check_forward(model) -> float:
    """Largest relative error of the training loss against the Hugging Face model, in float32."""
    ids = torch.randint(VOCAB, (2, 65), generator=torch.Generator().manual_seed(0))
    weights = torch.full(ids.shape, float(W_STORY))
    with torch.no_grad():
        ours, _ = Forward(model, torch.float32, compiled=False)(ids, weights)
        logits = model(ids[:, :-1]).logits.flatten(0, 1)
        theirs = F.cross_entropy(logits, ids[:, 1:].flatten())
    return abs(ours.item() / theirs.item() - 1)


# --------------------------------------------------------------------------------------------
# Optimizer


class Muon:
    """Momentum, orthogonalised per matrix (Newton-Schulz), batched over equal shapes."""

    def __init__(self, params: list[torch.nn.Parameter], momentum: float = 0.95):
        groups = collections.defaultdict(list)
        for p in params:
            groups[tuple(sorted(p.shape))].append(p)
        self.groups = list(groups.values())
        self.buffers = [torch.stack([_wide(p.detach()) for p in g]) * 0 for g in self.groups]
        self.momentum = momentum

    @torch.no_grad()
    def step(self, lr: float, decay: float) -> None:
        for params, buffer in zip(self.groups, self.buffers, strict=True):
            grad = torch.stack([_wide(p.grad) for p in params])
            buffer.lerp_(grad, 1 - self.momentum)
            update = _orthogonal(grad.lerp(buffer, self.momentum))
            for p, u in zip(params, update.unbind(), strict=True):
                tall = p.shape[0] > p.shape[1]
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.mul_(1 - lr * decay).add_(u.T if tall else u, alpha=-lr * scale)


def _wide(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.T if matrix.shape[0] > matrix.shape[1] else matrix


def _orthogonal(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The nearest semi-orthogonal matrices, roughly; (count, rows, columns), rows <= columns."""
    x = g.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.to(g.dtype)


# --------------------------------------------------------------------------------------------
# Training


def save(model, folder: Path) -> None:
    """bf16 weights, config and generation config; the tokenizer is there already."""
    import copy

    from transformers import GenerationConfig

    half = copy.deepcopy(model).to("cpu", torch.bfloat16)
    half.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0, do_sample=False)
    half.save_pretrained(folder)


def train(model, feed: Feed, folder: Path, seconds: float, device, smoke: bool) -> dict:
    """Train for ``seconds``; saves every minute and at the end; returns a summary with a log."""
    cuda = device.type == "cuda"
    model.to(device)
    forward = Forward(model, torch.bfloat16 if cuda else torch.float32, compiled=cuda)
    kernel = forward.pick_attention(device) if cuda else "default"
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    embedding = model.model.embed_tokens.weight
    gains = [p for p in model.parameters() if p.ndim == 1]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(
        [{"params": [embedding], "base": 3e-3}, {"params": gains, "base": 5e-3}],
        lr=0.0,
        betas=(0.9, 0.98),
        weight_decay=0.0,
        fused=cuda,
    )
    rng = random.Random(0)
    tokens_per_step = 2 * POSITIONS if smoke else BATCH_TOKENS
    sums = torch.zeros(4, device=device)
    loss_sum = torch.zeros((), device=device)
    log, tokens, step, clock = [], 0, 0, None
    last_log, last_save, logged_tokens = 0.0, 0.0, 0
    while True:
        elapsed = 0.0 if clock is None else time.perf_counter() - clock
        progress = elapsed / seconds
        if progress >= 1:
            break
        length = next(n for end, n in STAGES if progress < end)
        # Workers move on early, so that the next stage starts with a stock.
        ahead = (elapsed + 6) / seconds
        feed.length.value = next((n for end, n in STAGES if ahead < end), POSITIONS)
        ids, weights = feed.batch(length, tokens_per_step, rng)
        if cuda:
            ids = ids.pin_memory().to(device, non_blocking=True)
            weights = weights.pin_memory().to(device, non_blocking=True)
        lr = min(1.0, (step + 1) / 100, max(0.01, (1 - progress) / 0.4))
        loss, stats = forward(ids, weights)
        loss.backward()
        muon.step(0.02 * lr, decay=0.02)
        for group in adam.param_groups:
            group["lr"] = group["base"] * lr
        adam.step()
        model.zero_grad(set_to_none=True)
        loss_sum += loss.detach()
        sums += stats
        step += 1
        if step == 3:  # The clock starts once everything is compiled.
            if cuda:
                torch.cuda.synchronize()
            clock = time.perf_counter()
            continue
        tokens += ids[:, 1:].numel()
        if step % 50 == 0 or (smoke and step % 5 == 0):
            story, n_story, hits, n_answer = sums.tolist()
            now = time.perf_counter() - clock
            entry = {
                "step": step,
                "seconds": round(now, 1),
                "length": length,
                "mtokens": round(tokens / 1e6, 1),
                "mtokens_per_s": round((tokens - logged_tokens) / (now - last_log) / 1e6, 3),
                "story_loss": round(story / max(n_story, 1), 4),
                "answer_token_accuracy": round(hits / max(n_answer, 1), 4),
                "repeated_share": round(feed.repeated / feed.used, 3),
            }
            sums.zero_()
            last_log, logged_tokens = now, tokens
            log.append(entry)
            if step % 200 == 0 or smoke:
                print(json.dumps(entry), flush=True)
            if not math.isfinite(story):
                raise SystemExit("the loss is not finite")
            if now - last_save > 60:
                save(model, folder)
                last_save = now
    save(model, folder)
    return {
        "steps": step,
        "tokens": tokens,
        "train_seconds": round(time.perf_counter() - clock, 1),
        "attention_kernel": kernel,
        "log": log[:: max(1, len(log) // 60)],
    }


# --------------------------------------------------------------------------------------------
# Evaluation


def eval_case(args: tuple[str, str, int, int]):
    """One evaluation case as (name, length, depth, prompt ids, target ids)."""
    tokenizer_file, name, length, index = args
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
    return (
        name,
        length,
        case.depth,
        tokenizer.encode(case.prompt).ids,
        tokenizer.encode(case.target).ids,
    )


_CACHE: dict[str, Tokenizer] = {}


def _tokenizer(file: str) -> Tokenizer:
    if file not in _CACHE:
        _CACHE[file] = Tokenizer.from_file(file)
    return _CACHE[file]


@torch.no_grad()
def evaluate(folder: Path, cases: list, device) -> dict:
    """Exact-match accuracy by kind, length and depth, and held-out perplexity.

    Accuracy is of greedy decoding, by one forward pass over prompt and target: the answer is
    right if every target token is the most likely one after those before it. A few cases are
    also decoded with ``generate`` and its 16-bit cache.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sample = tasks.heldout_text(2000, lambda t: len(raw.encode(t).ids), seed=99)
    if tokenizer(sample)["input_ids"] != raw.encode(sample).ids:
        raise SystemExit("AutoTokenizer does not encode as tokenizer.json does")

    hits = collections.defaultdict(list)
    by_depth = collections.defaultdict(list)
    for start in range(0, len(cases), 20):
        batch = cases[start : start + 20]
        rows = [prompt + target for _, _, _, prompt, target in batch]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for row, values in zip(ids, rows, strict=True):
            row[: len(values)] = torch.tensor(values)
        best = model(ids.to(device)).logits.argmax(-1).cpu()
        for row, (kind, length, depth, prompt, target) in zip(best, batch, strict=True):
            got = row[len(prompt) - 1 : len(prompt) + len(target) - 1].tolist()
            hits[kind, length].append(got == target)
            by_depth[kind, length, depth].append(got == target)
    result: dict = {"cases_each": EVAL_CASES, "accuracy": {}, "accuracy_by_depth": {}}
    for (kind, length), values in sorted(hits.items()):
        result["accuracy"].setdefault(kind, {})[length] = round(sum(values) / len(values), 4)
    for (kind, length, depth), values in sorted(by_depth.items()):
        result["accuracy_by_depth"].setdefault(kind, {}).setdefault(length, {})[depth] = round(
            sum(values) / len(values), 3
        )

    longest = [c for c in cases if c[1] == max(c[1] for c in cases)]
    decoded = collections.defaultdict(list)
    for kind, _, _, prompt, target in longest[:: max(1, len(longest) // 44)]:
        out = model.generate(
            torch.tensor([prompt], device=device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=device),
            max_new_tokens=len(target),
            do_sample=False,
        )
        decoded[kind].append(out[0, len(prompt) :].tolist() == target)
    result["generate_longest"] = {k: f"{sum(v)}/{len(v)}" for k, v in sorted(decoded.items())}

    losses = []
    for seed in range(16):
        ids = raw.encode(tasks.heldout_text(4096, lambda t: len(raw.encode(t).ids), seed=seed)).ids[:4096]
        ids = torch.tensor([ids], device=device)
        logits = model(ids).logits[0, :-1].float()
        losses.append(F.cross_entropy(logits, ids[0, 1:], reduction="none").cpu())
    losses = torch.stack(losses)
    result["heldout_perplexity"] = {
        "tokens": losses.numel(),
        "all": round(losses.mean().exp().item(), 4),
        "positions_0_512": round(losses[:, :512].mean().exp().item(), 4),
        "positions_2048_4096": round(losses[:, 2048:].mean().exp().item(), 4),
    }
    return result


def environment(device) -> dict:
    import tokenizers
    import transformers

    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--results", type=Path, help="JSON file for settings and metrics")
    parser.add_argument("--minutes", type=float, default=9.0, help="whole run, start to end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eval-only", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="two layers, a few steps, any CPU")
    args = parser.parse_args()
    begin = time.perf_counter()
    report: dict = {"minutes": args.minutes, "seed": args.seed}
    workers = max(1, (os.cpu_count() or 2) - 1)

    if not args.eval_only:
        tokenizer = train_tokenizer(args.out, args.seed, 100 if args.smoke else 3000)
        encoder = Encoder(tokenizer)
        report["chars_per_token"] = round(encoder.chars_per_token, 3)
        print(f"tokenizer: {time.perf_counter() - begin:.1f} s", report, flush=True)
        feed = Feed(encoder, workers, args.seed)
    # Forked before CUDA is touched; works beside the training.
    lengths = (512,) if args.smoke else EVAL_LENGTHS
    pool = mp.get_context("fork").Pool(workers if args.eval_only else 2)
    jobs = [
        (str(args.out / "tokenizer.json"), kind, length, index)
        for length in lengths
        for kind in (tasks.KINDS if args.smoke else EVALS)
        for index in range(11 if args.smoke else EVAL_CASES)
    ]
    pending = pool.map_async(eval_case, jobs, chunksize=20)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not args.eval_only:
        torch.manual_seed(args.seed)
        model = make_model(args.smoke)
        report["parameters"] = model.num_parameters()
        report["forward_check"] = check_forward(model)
        assert report["forward_check"] < 1e-4, report
        # Leave time for compiling and for the evaluation (10 to 20 s each on an H200).
        reserve = 5 if args.smoke else 45
        seconds = args.minutes * 60 - (time.perf_counter() - begin) - reserve
        report["training"] = train(model, feed, args.out, seconds, device, args.smoke)
        feed.stop()
        print(f"trained: {time.perf_counter() - begin:.1f} s", flush=True)
    report["environment"] = environment(device)
    start = time.perf_counter()
    report["evaluation"] = evaluate(args.out, pending.get(), device)
    report["evaluation"]["seconds"] = round(time.perf_counter() - start, 1)
    report["total_seconds"] = round(time.perf_counter() - begin, 1)
    if args.results:
        args.results.parent.mkdir(parents=True, exist_ok=True)
        args.results.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["evaluation"], indent=1), flush=True)
    print(f"total: {report['total_seconds']} s")


if __name__ == "__main__":
    main()
