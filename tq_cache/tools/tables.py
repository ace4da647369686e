"""What the command line prints: results as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from ..backends import describe
from ..backends.hardware import ARCHITECTURES
from ..cache import TurboQuantCache
from ..checkpoint.declaration import find_folder, read_declaration
from ..formats.presets import PRESETS
from ..planning.geometry import LayerGeometry
from ..planning.memory import MOST_TOKENS, MemoryPlan
from .evaluate import EvalResult
from .harness import Results
from .records import TABLE_HEAD_DIM, preset_record, stored
from .runs import Generated
from .tasks import Case


def demo_table(case: Case, runs: Sequence[Generated], device: torch.device) -> Table:
    """One line per cache; the first is what the others are compared with."""
    table = _table("cache", "text", ">agreement", ">KV bytes", ">bits/element", ">smaller", ">tokens/s")
    question = " ".join(case.prompt.rsplit("\n\n", 1)[-1].split())
    table.title = f"a story of {case.length:,} tokens, then: {question}   (told in the story: {case.answer})"
    for run in runs:
        row = [run.name, _one_line(run.text, 80), f"{run.agreement(runs[0]):.0%}", f"{run.nbytes_16bit:,}"]
        smaller = f"{run.ratio:.2f}x" if run.ratio >= 1 else "not yet"
        table.add_row(*row, f"{run.bits_per_element:.2f}", smaller, f"{run.tokens_per_second:.1f}")
    notes = [
        f"agreement: share of {len(runs[0].tokens)} tokens equal to those with the 16-bit cache; KV bytes: all that a "
        f"cache holds, its newest tokens in the model's dtype too; computed by: {describe(device)}"
    ]
    if runs[0].nbytes != runs[0].nbytes_16bit:
        notes.append(
            f"the model runs in {runs[0].dtype} on {device.type}; KV bytes are those of the same caches in a 16-bit "
            "model, as it runs on a GPU"
        )
    if any(run.ratio < 1 for run in runs):
        notes.append("not yet: few tokens are packed so far; try a longer --prompt-tokens")
    table.caption = "\n".join(notes)
    return table


def generated_line(run: Generated) -> str:
    """What one run took, in words."""
    return f"\n{len(run.tokens)} tokens, {run.tokens_per_second:.1f} tokens/s; {run.name} cache: {run.held}"


def machine_table(machine: Mapping[str, Any]) -> Table:
    """Of a `machine_record`."""
    table, row = Table(title="this machine", show_header=False), machine["architecture"]
    where = f"{machine['device']}: {machine['name']}, architecture {row['name']}"
    table.add_row("device", f"{where}, {machine['cpu_threads']} CPU threads")
    table.add_row("computed by", f"{machine['computed_by']}, all formats")
    table.add_row("decode path", f"{row['decode_path']}: {row['reason']}")
    fp8 = f"convert: {_formats(row['fp8_convert'])}; multiply: {_formats(row['fp8_multiply'])}"
    table.add_row("fp8 by instruction", fp8)
    table.add_row("python, system", f"{machine['python']}, {machine['system']}")
    table.add_row("torch, transformers", f"{machine['torch']}, {machine['transformers']}")
    table.add_row("triton, tq-cache", ", ".join(machine[name] or "not installed" for name in ("triton", "tq-cache")))
    return table


def preset_table() -> Table:
    """Every preset, with its bytes for vectors of `TABLE_HEAD_DIM` elements."""
    table = _table("preset", "keys", "values", ">bytes/token", ">smaller", "centred", "smoothed")
    table.title = f"presets (bytes of one packed token of one KV head, head_dim {TABLE_HEAD_DIM})"
    exact = 4 * TABLE_HEAD_DIM
    for said in map(preset_record, PRESETS.values()):
        center = " and ".join(f"{role}s" for role in said["center"]) or "-"
        row = [said["name"], said["keys"], said["values"], f"{said['bytes']}", f"{exact / said['bytes']:.2f}x"]
        table.add_row(*row, center, f"{said['smooth']:g}" if said["smooth"] else "-")
    table.caption = (
        "float8 scales: those of k_scale=, v_scale=; else those that the checkpoint ships; else one per sequence and "
        "KV head, from the first tokens (info --model says which, and why)"
    )
    return table


def checkpoint_table(config: Any) -> Table:
    """What the checkpoint of a config says about float8 scales, and what that means for each preset with float8."""
    table = _table("preset", "float8 scales")
    folder = find_folder(config)
    declaration = read_declaration(config, folder)
    has = "ships fp8 KV scales" if declaration.has_fp8_scales else "ships no fp8 KV scales"
    table.title = escape(f"checkpoint {folder}: {has} ({declaration.reason})")
    for preset in PRESETS.values():
        if preset.key.float8 or preset.value.float8:
            table.add_row(preset.name, escape(_scales_of(config, preset.name)))
    table.caption = "the other presets take no such scales"
    return table


def hardware_table() -> Table:
    """Every architecture known."""
    table = _table("architecture", "GPUs", "fp8 convert", "fp8 multiply", "decode path")
    table.title = "architectures, and how keys and values are read on each"
    for row in ARCHITECTURES.values():
        table.add_row(row.name, row.gpus, _formats(row.fp8_convert), _formats(row.fp8_multiply), row.decode_path)
    return table


def geometry_table(plan: MemoryPlan) -> Table:
    """Layers of a model that are alike, a line each."""
    table = _table(">layers", "kind", ">KV heads", ">key dim", ">value dim", ">window", "stored", "why")
    table.title = f"{plan.geometry.model_type}: {len(plan.geometry.layers)} cache layers"
    groups: dict[tuple[str, ...], int] = {}
    for layer, layer_plan in zip(plan.geometry.layers, plan.layer_plans, strict=True):
        key = (*_dims(layer), stored(layer, layer_plan), layer_plan.reason)
        groups[key] = groups.get(key, 0) + 1
    for key, count in groups.items():
        table.add_row(str(count), *key)
    notes = ["; ".join(plan.geometry.notes), escape(_prefill_line(plan))]
    table.caption = "\n".join(filter(None, notes)) or None
    return table


def _prefill_line(plan: MemoryPlan) -> str:
    """What a prefill takes, or why that is not known; empty where it was not asked for."""
    if plan.prefill_bytes is None:
        return plan.prefill_unknown
    batch = f"{plan.settings.batch} x " if plan.settings.batch > 1 else ""
    size = f"{plan.prefill_bytes:,} bytes ({plan.prefill_bytes / 1e9:.3f} GB)"
    return f"a prefill of {batch}{plan.settings.context:,} tokens takes, beside weights and cache, {size} at its peak"


def plan_table(plan: MemoryPlan) -> Table:
    """KV bytes per cache, and what fits."""
    table = _table("cache", ">KV bytes", ">GB", ">bits/element", ">smaller")
    settings = plan.settings
    table.title = (
        f"{settings.context:,} tokens x {settings.batch} sequences, residual_length {settings.residual_length}, "
        f"sink_tokens {settings.sink_tokens}"
    )
    if plan.memory is not None:
        table.add_column(f"longest context in {plan.memory / 1e9:.2f} GB", justify="right")
    for row in plan.rows:
        cells = [row.name, f"{row.nbytes:,}", f"{row.nbytes / 1e9:.3f}", f"{row.bits_per_element:.2f}"]
        longest = [] if row.longest_context is None else [_longest(row.longest_context, plan.positions)]
        table.add_row(*cells, f"{row.ratio:.2f}x", *longest)
    table.caption = "\n".join(escape(line) for line in _plan_notes(plan))
    return table


def _plan_notes(plan: MemoryPlan) -> list[str]:
    """What the bytes are of, and what the longest contexts leave room for."""
    notes = ["bytes after a prefill; a cache that grew by decoding holds up to an eighth more packed memory"]
    if plan.positions is not None and plan.settings.context > plan.positions:
        notes.append(f"{plan.settings.context:,} tokens are more than the model has positions ({plan.positions:,})")
    if plan.memory is None:
        return notes
    weights = f"{plan.weights_bytes / 1e9:.2f} GB of weights" if plan.weights_bytes else "no weights"
    prefill = "no prefill, which is not known"
    if plan.prefill_bytes is not None:
        prefill = "the peak of its prefill (fewer with generate(prefill_chunk_size=...))"
    limit = "" if plan.positions is None else f"; at most the model's {plan.positions:,} positions"
    return [*notes, f"longest context: beside {weights} and {prefill}{limit}"]


def eval_tables(result: EvalResult) -> list[Table]:
    """Quality per cache: how far from the exact one, and what that does to recall and greedy decoding."""
    tables = [_closeness_table(result)]
    if result.settings.cases or result.settings.greedy:
        tables.append(_task_table(result))
    return tables


def _closeness_table(result: EvalResult) -> Table:
    """KL, perplexity and true bytes."""
    columns = (">bytes", ">KL e-3", ">99 %", ">99.9 %", ">top-1", ">perplexity", ">log ppl e-3")
    table = _table("cache", "setting", *columns)
    settings = result.settings
    table.title = f"{settings.context:,} tokens prefilled, {result.rows[0].texts} x {settings.decode} decoded"
    for row in result.rows:
        cells = [row.preset, row.setting, f"{row.bytes_per_token:.1f}", _thousandths(row.kl, row.kl_se)]
        cells += [f"{1000 * row.kl_p99:.1f}", f"{1000 * row.kl_p999:.1f}", f"{row.top1:.1%}", f"{row.ppl:.3f}"]
        table.add_row(*cells, _thousandths(row.dlogppl, row.dlogppl_se))
    for other in result.not_run:
        table.add_row(other.preset, other.setting, *["-"] * len(columns))
    table.caption = "\n".join([
        "bytes: true ones, per token of one KV head and layer; KL: nats per token to the exact cache, mean, error over "
        "texts, percentiles over tokens; log ppl: above the exact cache's",
        *[f"not run: {escape(f'{other.preset}, {other.setting}: {other.reason}')}" for other in result.not_run],
    ])  # fmt: skip
    return table


def _task_table(result: EvalResult) -> Table:
    """Recall by depth and by kind, and greedy agreement."""
    first, greedy = result.rows[0], result.settings.greedy
    recall = [f">recall {float(depth):.0%}" for depth in first.recall]
    kinds = [f">{kind}" for kind in first.recall_by_kind]
    table = _table("cache", "setting", *recall, *kinds, *([">greedy"] if greedy else []))
    for row in result.rows:
        shares = [*row.recall.values(), *row.recall_by_kind.values()]
        cells = [f"{share:.0%}" for share in shares]
        cells += [] if row.greedy_first is None else [f"{row.greedy_first:g}"]
        table.add_row(row.preset, row.setting, *cells)
    notes = ["recall: by depth of the fact, 0 % is the start, and by kind"] if first.recall else []
    notes += [f"greedy: of {greedy} tokens, those before the first that differs, median"] if greedy else []
    table.caption = "; ".join(notes)
    return table


def _thousandths(value: float, error: float | None) -> str:
    return f"{1000 * value:.3g}" + ("" if error is None else f" ± {1000 * error:.2g}")


def _scales_of(config: Any, preset: str) -> str:
    """A line per role, for all layers that can be packed, or why the preset is refused."""
    try:
        cache = TurboQuantCache(config, preset, skip_layers="sliding_window")
    except ValueError as error:
        return f"refused: {error}"
    return "\n".join(str(scales) for scales in cache.scales.values())


def harness_table(results: Results) -> Table:
    """What lm-evaluation-harness says: a line for each task and metric, a column for each cache."""
    table = _table("task", "metric", *(f">{name}" for name in results))
    for task, metrics in next(iter(results.values())).items():
        for metric in (name for name in metrics if not name.endswith("_stderr")):
            said = [own[task] for own in results.values()]
            errors = [own.get(f"{metric}_stderr") for own in said]
            cells = (f"{x[metric]:.4g}" + (f" ± {e:.2g}" if e else "") for x, e in zip(said, errors, strict=True))
            table.add_row(task, metric, *cells)
    return table


def _table(*headings: str) -> Table:
    """A table with these headings; ">" in front aligns right."""
    table = Table(title_justify="left", caption_justify="left")
    for heading in headings:
        right = heading.startswith(">")
        table.add_column(heading.removeprefix(">"), justify="right" if right else "left", no_wrap=right)
    return table


def _dims(layer: LayerGeometry) -> tuple[str, ...]:
    if not layer.num_kv_heads:
        return (layer.kind, "-", "-", "-", "-")
    window = "-" if layer.window is None else f"{layer.window:,}"
    kind = f"{layer.kind}, latents" if layer.latent else layer.kind
    return (kind, str(layer.num_kv_heads), str(layer.key_dim), str(layer.value_dim), window)


def _longest(tokens: int, positions: int | None) -> str:
    return "any" if tokens >= MOST_TOKENS else f"{tokens:,}{' (all positions)' if tokens == positions else ''}"


def _formats(names: Sequence[str]) -> str:
    return ", ".join(names) or "-"


def _one_line(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
