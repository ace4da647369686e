"""lm-evaluation-harness (lm_eval) under the 16-bit cache and under presets, with the tasks made here or its own."""

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..generation import disable
from .continuations import EXACT

TASKS = Path(__file__).parent / "harness_tasks"
OWN = tuple(sorted(path.stem for path in TASKS.glob("tq_*.yaml")))
Results = dict[str, dict[str, dict[str, float]]]  # by preset, task and metric


def measure(
    model: Any,
    tokenizer: Any,
    presets: Sequence[str],
    tasks: Sequence[str],
    words: int = 600,
    limit: int = 100,
    batch_size: int = 1,
    **cache_options: Any,
) -> Results:
    """What lm-evaluation-harness says of the 16-bit cache, first, and of each preset.

    tasks: names of `OWN`, with contexts of about `words` words, or any of lm-evaluation-harness's, which it downloads
    limit: documents of each task at most
    batch_size: sequences that generate at once; those that are scored go one by one
    cache_options: as those of `enable`

    Raises ValueError on unknown tasks, or without lm_eval, and what `CachedLM` raises.  The model is not enabled then.
    """
    if find_spec("lm_eval") is None:
        raise ValueError("expected lm-evaluation-harness (lm_eval), found none; pip install lm-eval")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from .harness_model import CachedLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    about = {"words": words, "count": limit}
    others = not all(name.startswith("tq_") for name in tasks)  # to read what there is takes a while
    manager = TaskManager(include_path=str(TASKS), include_defaults=others, metadata=about)
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown or not tasks:
        got = ", ".join(unknown) or "none"
        raise ValueError(f"expected tasks of lm-evaluation-harness or {', '.join(OWN)}, got {got}")
    options = dict(task_manager=manager, limit=limit, bootstrap_iters=100, log_samples=False)
    results: Results = {}
    try:
        for preset in (EXACT, *presets):
            lm = CachedLM(model, tokenizer=tokenizer, batch_size=batch_size, preset=preset, cache_options=cache_options)
            said = simple_evaluate(lm, tasks=list(tasks), **options)["results"]
            results[preset] = {task: _numbers(numbers) for task, numbers in said.items()}
    finally:
        disable(model)
    return results


def _numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of a task by name, "acc" of "acc,none", with their standard errors as "acc_stderr"."""
    return {name.partition(",")[0]: x for name, x in result.items() if "," in name and isinstance(x, float)}
