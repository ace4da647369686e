"""Quality of a cache: perplexity, KL to the 16-bit cache, top-1 agreement, recall at depth.

Only positions decoded under the cache count: a prefill sees exact keys and values.  Every text is prefilled in one
forward and then decoded in small chunks; every recall case is prefilled up to its question, and its answer is forced
token by token.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..formats.presets import resolve_preset
from ..planning.memory import EXACT, PlanSettings, cache_bytes, model_geometry
from .runs import encode, make_cache
from .tasks import build_case, heldout_text

# Tokens at a recall prompt's end that are decoded rather than prefilled, so that the question reads the packed cache.
QUESTION_TOKENS = 32


@dataclass(frozen=True)
class EvalSettings:
    """What is measured.

    context, decode: tokens prefilled, and tokens then decoded, per text; `chunk` tokens a forward
    texts:           how many texts
    cases:           recall cases per kind and depth; each prompt has `context` tokens
    residual_length, skip_layers, boundary_layers: of the caches (`TurboQuantCache`)
    """

    context: int = 1024
    decode: int = 256
    chunk: int = 16
    texts: int = 2
    cases: int = 4
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    kinds: tuple[str, ...] = ("passkey", "recall")
    residual_length: int = 128
    skip_layers: tuple[str | int, ...] = ("boundary", "sliding_window")
    boundary_layers: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.context, self.decode, self.chunk, self.texts) < 1 or self.cases < 0:
            raise ValueError("expected context, decode, chunk and texts of 1 or more and cases of 0 or more")

    @property
    def cache_kwargs(self) -> dict[str, Any]:
        return {
            "residual_length": self.residual_length,
            "skip_layers": self.skip_layers,
            "boundary_layers": self.boundary_layers,
        }


@dataclass(frozen=True)
class EvalRow:
    """One cache.  `kl` is the mean of KL(16-bit || this) in nats, `top1` the share of equal most likely tokens,
    `recall` the share of answers recalled exactly by depth, `bits_per_element` of the whole cache at `context`."""

    name: str
    perplexity: float
    kl: float
    top1: float
    recall: dict[str, float]
    bits_per_element: float


@dataclass(frozen=True)
class EvalResult:
    """The first row is the 16-bit cache."""

    model: str
    settings: EvalSettings
    rows: tuple[EvalRow, ...]

    def save_json(self, path: str | Path) -> None:
        """Write everything as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    def save_plot(self, path: str | Path) -> None:
        """KL and recall over bits per element, as an image.  Needs matplotlib."""
        figure_class = plotting()
        figure = figure_class(figsize=(10, 4.5), layout="constrained")
        quality, recall = figure.subplots(1, 2)
        for row in self.rows[1:]:
            quality.plot(row.bits_per_element, max(row.kl, 1e-7), "o", label=row.name)
            depths = [float(depth) for depth in row.recall]
            recall.plot(depths, [100 * share for share in row.recall.values()], "o-", label=row.name)
        quality.set(xlabel="bits per element", ylabel="mean KL to the 16-bit cache (nats)", yscale="log")
        recall.set(xlabel="depth of the fact (0: start)", ylabel="recall (%)", ylim=(-5, 105))
        quality.legend(fontsize="small")
        figure.suptitle(f"{self.model}: {self.settings.context} tokens, then {self.settings.decode} decoded")
        figure.savefig(path, dpi=120)


def evaluate(
    model: Any,
    tokenizer: Any,
    presets: Sequence[str],
    settings: EvalSettings,
    text: str | None = None,
    advance: Callable[[], None] = lambda: None,
) -> EvalResult:
    """Measure the 16-bit cache and every preset.

    text:    measured on instead of held-out stories; ValueError if it is too short
    advance: called after every text and every recall case; `steps` says how often
    """
    windows = _windows(tokenizer, settings, text)
    cases = list(_recall_cases(tokenizer, settings))
    exact: list[torch.Tensor] = []
    rows = []
    for preset in [None, *presets]:
        scores = []
        for index, ids in enumerate(windows):
            logits = decode_logits(model, ids, settings.context, settings.chunk, _cache(model, preset, settings))
            log_probs = logits.log_softmax(dim=-1)
            if preset is None:
                exact.append(log_probs)
            scores.append(text_scores(log_probs, exact[index], ids[settings.context + 1 :].to(log_probs.device)))
            advance()
        recall = _recall(model, cases, preset, settings, advance)
        loss, kl, top1 = (sum(column) / len(column) for column in zip(*scores, strict=True))
        bits = _bits_per_element(model, preset, settings)
        rows.append(EvalRow(preset or EXACT, math.exp(loss), kl, top1, recall, bits))
    return EvalResult(str(model.config.name_or_path), settings, tuple(rows))


def plotting() -> Any:
    """matplotlib's figure class; raises ValueError unless it is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("expected matplotlib for a plot, found none; pip install tq-cache[plot]") from None
    return Figure


def steps(presets: Sequence[str], settings: EvalSettings) -> int:
    """How often `evaluate` calls `advance`."""
    cases = settings.cases * len(settings.depths) * len(settings.kinds)
    return (len(presets) + 1) * (settings.texts + cases)


@torch.inference_mode()
def decode_logits(model: Any, ids: torch.Tensor, prefill: int, chunk: int, cache: Any) -> torch.Tensor:
    """Logits, float32 [T - 1 - prefill, vocabulary], for tokens prefill + 1 .. T of `ids` int64 [T].

    The first `prefill` tokens go through in one forward, the rest under `cache`, `chunk` at a time.
    """
    ids = ids.to(model.device)[None]
    model(ids[:, :prefill], past_key_values=cache, logits_to_keep=1)
    parts = [
        model(ids[:, start : min(start + chunk, ids.shape[1] - 1)], past_key_values=cache).logits[0].float()
        for start in range(prefill, ids.shape[1] - 1, chunk)
    ]
    return torch.cat(parts)


def text_scores(log_probs: torch.Tensor, exact: torch.Tensor, targets: torch.Tensor) -> tuple[float, float, float]:
    """Mean loss on `targets` [T], mean KL(exact || this) in nats, share of equal top tokens; both [T, vocabulary]."""
    loss = -log_probs.gather(-1, targets[:, None]).mean()
    kl = (exact.exp() * (exact - log_probs)).sum(dim=-1).mean()
    top1 = (log_probs.argmax(-1) == exact.argmax(-1)).float().mean()
    return loss.item(), kl.item(), top1.item()


@dataclass(frozen=True)
class _RecallCase:
    depth: float
    ids: torch.Tensor
    answer_length: int


def _windows(tokenizer: Any, settings: EvalSettings, text: str | None) -> list[torch.Tensor]:
    """`settings.texts` rows of context + decode + 1 token ids, from one text or one story each."""
    length = settings.context + settings.decode + 1
    if text is not None:
        ids = encode(tokenizer, text)
        if len(ids) < settings.texts * length:
            raise ValueError(
                f"expected a text of {settings.texts} x {length} tokens or more, got {len(ids)}; "
                "lower context, decode or texts"
            )
        return list(torch.tensor(ids[: settings.texts * length]).split(length))
    stories = (
        heldout_text(length, lambda piece: len(encode(tokenizer, piece)), settings.seed + index)
        for index in range(settings.texts)
    )
    return [torch.tensor(encode(tokenizer, story)[:length]) for story in stories]


def _recall_cases(tokenizer: Any, settings: EvalSettings) -> Iterator[_RecallCase]:
    for depth in settings.depths:
        for kind in settings.kinds:
            for index in range(settings.cases):
                seed = settings.seed + index
                case = build_case(kind, settings.context, lambda text: len(encode(tokenizer, text)), seed, depth)
                answer = encode(tokenizer, case.target)
                yield _RecallCase(depth, torch.tensor(encode(tokenizer, case.prompt) + answer), len(answer))


def _recall(
    model: Any, cases: list[_RecallCase], preset: str | None, settings: EvalSettings, advance: Callable[[], None]
) -> dict[str, float]:
    hits: dict[str, list[bool]] = {}
    for case in cases:
        hit = recalls(model, case.ids, case.answer_length, _cache(model, preset, settings))
        hits.setdefault(f"{case.depth:g}", []).append(hit)
        advance()
    return {depth: sum(found) / len(found) for depth, found in hits.items()}


@torch.inference_mode()
def recalls(model: Any, ids: torch.Tensor, answer_length: int, cache: Any) -> bool:
    """Whether every one of the last `answer_length` tokens of `ids` [T] is the most likely one under `cache`.

    The tokens before it are given, so one miss does not lead the rest astray.
    """
    prompt = len(ids) - answer_length
    prefill = max(prompt - QUESTION_TOKENS, 1)
    ids_ = ids.to(model.device)[None]
    model(ids_[:, :prefill], past_key_values=cache, logits_to_keep=1)
    spans = [(prefill, prompt), *[(end, end + 1) for end in range(prompt, len(ids) - 1)]]
    tops = [model(ids_[:, a:b], past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax() for a, b in spans]
    return torch.stack(tops).tolist() == ids[prompt:].tolist()


def _cache(model: Any, preset: str | None, settings: EvalSettings) -> Any:
    return make_cache(model, preset, **settings.cache_kwargs)


def _bits_per_element(model: Any, preset: str | None, settings: EvalSettings) -> float:
    """Of the whole cache at `settings.context`, for a 16-bit model, whatever dtype this one runs in."""
    geometry = model_geometry(model.config)
    plan = PlanSettings(settings.context, **settings.cache_kwargs)
    exact = cache_bytes(geometry, None, plan)
    return 16 * cache_bytes(geometry, None if preset is None else resolve_preset(preset), plan) / exact
