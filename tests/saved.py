"""What tests of saved caches share: a cache that goes on after a save, and what was loaded from it, side by side."""

from pathlib import Path
from typing import Any

import torch
from architectures import prompt
from transformers import PreTrainedModel

from tq_cache import TurboQuantCache

OPTIONS: dict[str, Any] = dict(residual_length=0, sink_tokens=3)


@torch.no_grad()
def filled(model: PreTrainedModel, length: int = 133, preset: str = "tq4", **options: Any) -> TurboQuantCache:
    """A cache of so many tokens of `prompt`, 2 sequences, the last ones in steps."""
    cache = TurboQuantCache(model.config, preset, **(OPTIONS | options))
    ids = prompt(model, length)["input_ids"]
    for part in (ids[:, : length - 3], *ids[:, length - 3 :].split(1, dim=1)):
        model(part, past_key_values=cache, use_cache=True)
    return cache


@torch.no_grad()
def continued(model: PreTrainedModel, cache: TurboQuantCache, chunks: tuple[int, ...] = (1, 7, 70, 1)) -> list:
    """Logits of more tokens, some at once, through more packings."""
    ids, found, start = prompt(model, sum(chunks), seed=9)["input_ids"], [], 0
    for count in chunks:
        out = model(ids[:, start : start + count], past_key_values=cache, use_cache=True)
        found.append(out.logits.clone())
        start += count
    return found


def assert_same(found: list, expected: list) -> None:
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def reloaded(cache: TurboQuantCache, model: PreTrainedModel, folder: Path, **options: Any) -> TurboQuantCache:
    cache.save_pretrained(folder)
    return TurboQuantCache.from_pretrained(folder, model.config, **options)
