"""Quality of caches, each against the exact one: KL, perplexity, greedy agreement, recall at depth, and true bytes.

All texts go through as a batch: the prompt in one forward under the cache, which sees exact keys and values, then the
rest in forwards of a few tokens.  Only those count.  Exact logits and greedy tokens are computed once and kept.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import estimates, recall
from .baselines import Candidate, exact, turboquant
from .files import replacing, write_json
from .footprint import Footprint, footprint
from .greedy import Agreement, agreement, greedy_tokens
from .runs import make_cache
from .scores import TokenScores, decode, decode_scores, prefill
from .texts import Text, windows


@dataclass(frozen=True)
class EvalSettings:
    """What is measured.

    context, decode: tokens prefilled, and tokens then decoded, per text; `chunk` tokens a forward
    texts:           how many texts, unless a list of them is given
    cases:           recall cases per kind and depth; each prompt has about `context` tokens
    greedy:          tokens of the exact cache's greedy continuation to agree with; 0 for none
    group:           texts, or recall cases, that go through at once
    prefill_chunk:   tokens of a prompt a forward, where it does not fit in one; None: all
    residual_length, skip_layers, boundary_layers: of caches that are given by name; None: `TurboQuantCache`'s defaults
    """

    context: int = 1024
    decode: int = 256
    chunk: int = 16
    texts: int = 2
    cases: int = 4
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    kinds: tuple[str, ...] = ("passkey", "recall")
    residual_length: int | None = None
    skip_layers: tuple[str | int, ...] | None = None
    boundary_layers: int | None = None
    seed: int = 0
    greedy: int = 0
    group: int = 12
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        least = min(self.context, self.decode, self.chunk, self.texts, self.group)
        if least < 1 or self.cases < 0 or self.greedy < 0 or (self.prefill_chunk or 1) < 1:
            raise ValueError(
                "expected context, decode, chunk, texts, group and prefill_chunk of 1 or more and cases and greedy of "
                "0 or more"
            )

    @property
    def cache_kwargs(self) -> dict[str, Any]:
        """Arguments of `TurboQuantCache` that differ from its own defaults."""
        names = ("residual_length", "skip_layers", "boundary_layers")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclass(frozen=True)
class EvalRow:
    """One cache against the exact one.  Errors (_se) are standard errors over texts; None with one text.

    kl:               mean of KL(exact || this) in nats; `kl_p99` and `kl_p999` percentiles over tokens,
                      `kl_by_quarter` means over quarters of the decoded tokens
    top1:             share of equal most likely tokens
    ppl, dlogppl:     perplexity, and by how much its logarithm is above the exact cache's on the same tokens
    bytes_per_token:  true bytes per token of one KV head, over all layers; `bytes_per_packed_layer` over packed ones
    recall:           share of answers recalled exactly, by depth; `recall_by_kind` by kind
    greedy_agreement: share of the greedy tokens before the first that differs from the exact cache's, and
                      `greedy_first` its position, medians over texts; `greedy_same` the share of equal tokens where the
                      exact run goes on after a difference.  None if not measured
    """

    preset: str
    setting: str
    kl: float
    kl_se: float | None
    kl_p99: float
    kl_p999: float
    kl_by_quarter: tuple[float, ...]
    top1: float
    ppl: float
    dlogppl: float
    dlogppl_se: float | None
    bytes_per_token: float
    bytes_per_packed_layer: float | None
    recall: dict[str, float]
    recall_by_kind: dict[str, float]
    greedy_agreement: float | None
    greedy_first: float | None
    greedy_same: float | None
    texts: int

    @property
    def name(self) -> str:
        """The preset, and the setting if it is not the default."""
        return self.preset if self.setting == "default" else f"{self.preset}, {self.setting}"

    @property
    def perplexity(self) -> float:
        return self.ppl


@dataclass(frozen=True)
class NotRun:
    """A cache that could not be measured here, and the error that says why."""

    preset: str
    setting: str
    reason: str


@dataclass(frozen=True)
class EvalResult:
    """The first row is the exact cache."""

    model: str
    settings: EvalSettings
    rows: tuple[EvalRow, ...]
    not_run: tuple[NotRun, ...] = ()

    def save_json(self, path: str | Path) -> None:
        """Write everything as JSON."""
        write_json(path, asdict(self))

    def save_plot(self, path: str | Path) -> None:
        """KL over bytes per token, and recall by depth, as an image.  Needs matplotlib."""
        figure = plotting()(figsize=(10, 4.5), layout="constrained")
        quality, by_depth = figure.subplots(1, 2)
        for row in self.rows[1:]:
            quality.plot(row.bytes_per_token, max(row.kl, 1e-7), "o", label=row.name)
            depths = [float(depth) for depth in row.recall]
            by_depth.plot(depths, [100 * share for share in row.recall.values()], "o-", label=row.name)
        quality.set(
            xlabel="bytes per token of one KV head and layer", ylabel="mean KL to the exact cache (nats)", yscale="log"
        )
        by_depth.set(xlabel="depth of the fact (0: start)", ylabel="recall (%)", ylim=(-5, 105))
        quality.legend(fontsize="small")
        figure.suptitle(f"{self.model}: {self.settings.context} tokens, then {self.settings.decode} decoded")
        with replacing(path) as part:
            figure.savefig(part, dpi=120)


def evaluate(
    model: Any,
    tokenizer: Any,
    caches: Sequence[str | Candidate],
    settings: EvalSettings,
    text: str | Sequence[Text] | torch.Tensor | None = None,
    advance: Callable[[EvalRow | NotRun], None] = lambda row: None,
) -> EvalResult:
    """Measure the exact cache and every other, a name of a preset or a `Candidate`.

    text:    measured on instead of held-out stories: one, in windows; a list, each from its start; or token ids, int64
             [N, context + decode + 1].  ValueError if one is too short
    advance: called with every row as it is done
    """
    ids = text
    if not isinstance(ids, torch.Tensor):
        length = settings.context + settings.decode + 1
        ids = windows(tokenizer, length, text, settings.texts, settings.seed)  # type: ignore[arg-type]
    cases = recall.recall_cases(
        tokenizer, settings.context, settings.kinds, settings.depths, settings.cases, settings.seed
    )
    kwargs = settings.cache_kwargs
    own = [turboquant(x, "given" if kwargs else "default", **kwargs) if isinstance(x, str) else x for x in caches]
    references = [_reference(model, part.to(model.device), settings) for part in ids.split(settings.group)]
    rows, not_run = [], []
    losses: torch.Tensor | None = None
    for candidate in [exact(), *own]:
        try:
            measured = _measure(model, candidate, references, cases, settings)
        except Exception as error:
            if not candidate.foreign:
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            not_run.append(NotRun(candidate.preset, candidate.setting, reason))
            advance(not_run[-1])
            continue
        losses = measured.scores.loss if losses is None else losses
        rows.append(measured.row(candidate, losses, settings.greedy))
        advance(rows[-1])
    return EvalResult(str(model.config.name_or_path), settings, tuple(rows), tuple(not_run))


def plotting() -> Any:
    """matplotlib's figure class; raises ValueError unless it is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("expected matplotlib for a plot, found none; pip install matplotlib") from None
    return Figure


def check_plot(path: Path) -> None:
    """Raise ValueError unless matplotlib is there and knows such pictures: better known before the measuring."""
    plotting()
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"expected a plot with a suffix of {', '.join(sorted(known))}, got {path.name!r}")


@dataclass(frozen=True)
class _Reference:
    """A group of texts: `ids` int64 [N, context + decode + 1], exact logits [N, decode, vocabulary] behind the
    context, and its prompts with the exact greedy tokens behind them (None: not asked for)."""

    ids: torch.Tensor
    logits: torch.Tensor
    greedy: torch.Tensor | None


@dataclass
class _Measured:
    """What was measured of one cache, group by group."""

    parts: list[TokenScores] = field(default_factory=list)
    footprints: list[tuple[int, Footprint]] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    recalled: list[bool] = field(default_factory=list)
    cases: Sequence[recall.RecallCase] = ()

    @property
    def scores(self) -> TokenScores:
        return TokenScores.cat(self.parts, dim=0)

    def row(self, candidate: Candidate, exact_loss: torch.Tensor, greedy: int) -> EvalRow:
        """In numbers, against the exact cache's loss [N, T] on the same tokens."""
        scores = self.scores
        kl, difference = estimates.over_texts(scores.kl), estimates.paired_difference(scores.loss, exact_loss)
        first = torch.cat([x.first for x in self.agreements]) if self.agreements else None
        same = torch.cat([x.same for x in self.agreements]) if self.agreements else None
        position = None if first is None else estimates.median(first)
        return EvalRow(
            candidate.preset,
            candidate.setting,
            kl=kl.mean,
            kl_se=kl.error,
            kl_p99=estimates.percentile(scores.kl, 99),
            kl_p999=estimates.percentile(scores.kl, 99.9),
            kl_by_quarter=estimates.by_quarter(scores.kl) if scores.kl.shape[1] >= 4 else (),
            top1=scores.same.mean().item(),
            ppl=math.exp(scores.loss.mean().item()),
            dlogppl=difference.mean,
            dlogppl_se=difference.error,
            bytes_per_token=self._mean_bytes(lambda x: x.all_layers) or 0.0,
            bytes_per_packed_layer=self._mean_bytes(lambda x: x.packed_layers),
            recall=recall.shares([f"{case.depth:g}" for case in self.cases], self.recalled),
            recall_by_kind=recall.shares([case.kind for case in self.cases], self.recalled),
            greedy_agreement=None if position is None else position / greedy,
            greedy_first=position,
            greedy_same=None if same is None else same.mean().item(),
            texts=len(scores.kl),
        )

    def _mean_bytes(self, of: Callable[[Footprint], float | None]) -> float | None:
        """Over texts; None where a cache packs nothing."""
        found = [(count, of(own)) for count, own in self.footprints]
        known = [(count, value) for count, value in found if value is not None]
        return sum(count * value for count, value in known) / sum(count for count, _ in known) if known else None


def _reference(model: Any, ids: torch.Tensor, settings: EvalSettings) -> _Reference:
    """With `DynamicCache`: what every row is compared with."""
    prompts, cache = ids[:, : settings.context], make_cache(model, None)
    behind = prefill(model, prompts, cache, settings.prefill_chunk)
    branch = copy.deepcopy(cache)
    logits = torch.cat(list(decode(model, ids, settings.context, settings.chunk, cache)), dim=1)
    greedy = greedy_tokens(model, prompts, behind, branch, settings.greedy) if settings.greedy else None
    return _Reference(ids, logits, greedy)


def _measure(
    model: Any,
    candidate: Candidate,
    references: Sequence[_Reference],
    cases: Sequence[recall.RecallCase],
    settings: EvalSettings,
) -> _Measured:
    context, chunk = settings.context, candidate.chunk or settings.chunk
    measured = _Measured(cases=cases)
    for reference in references:
        cache = candidate.make(model)
        prefill(model, reference.ids[:, :context], cache, settings.prefill_chunk)
        branch = copy.deepcopy(cache) if reference.greedy is not None else None  # the same prompt, other tokens behind
        measured.parts.append(decode_scores(model, reference.ids, context, chunk, cache, reference.logits))
        measured.footprints.append((len(reference.ids), footprint(cache, model.config, len(reference.ids))))
        if branch is not None and reference.greedy is not None:
            measured.agreements.append(agreement(model, reference.greedy, context, chunk, branch))
    for start in range(0, len(cases), settings.group):
        group = cases[start : start + settings.group]
        measured.recalled += recall.recalled(model, group, candidate.make(model), settings.prefill_chunk)
    return measured
