"""Texts to measure on, as token ids of equal length: from a file, or held-out stories."""

import json
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .runs import encode
from .tasks import heldout_text


class Text(NamedTuple):
    """A text and what it is called."""

    name: str
    text: str


def read_text(path: Path) -> str:
    """A text file; raises ValueError unless it can be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"expected a text file in UTF-8, got {str(path)!r}: {error}") from None


def read_texts(path: Path) -> str | list[Text]:
    """A text, or from a .json the list of {"name", "text"} in it.  Raises ValueError unless the file is one."""
    content = read_text(path)
    if path.suffix != ".json":
        return content
    try:
        texts = [Text(row["name"], row["text"]) for row in json.loads(content)]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"expected a list of {{name, text}} in {str(path)!r}: {type(error).__name__} {error}"
        ) from None
    if not texts:
        raise ValueError(f"expected a list of {{name, text}} in {str(path)!r}, got an empty one")
    return texts


def windows(tokenizer: Any, length: int, text: str | Sequence[Text] | None, count: int, seed: int) -> torch.Tensor:
    """Token ids, int64 [N, length]: the start of each of several texts, or `count` rows of one text or of stories.

    Raises ValueError where a text is too short.
    """
    if text is None:
        stories = (
            heldout_text(length, lambda piece: len(encode(tokenizer, piece)), seed + index) for index in range(count)
        )
        return torch.tensor([encode(tokenizer, story)[:length] for story in stories])
    if isinstance(text, str):
        ids = encode(tokenizer, text)
        if len(ids) < count * length:
            raise ValueError(
                f"expected a text of {count} x {length} tokens or more, got {len(ids)}; lower context, decode or texts"
            )
        return torch.tensor(ids[: count * length]).view(count, length)
    rows = [encode(tokenizer, own.text) for own in text]
    for own, ids in zip(text, rows, strict=True):
        if len(ids) < length:
            raise ValueError(
                f"expected texts of {length} tokens or more, got {len(ids)} in {own.name!r}; lower context or decode"
            )
    return torch.tensor([ids[:length] for ids in rows])


def long_windows(tokenizer: Any, length: int, texts: Sequence[Text], ending: str) -> torch.Tensor:
    """Token ids, int64 [N, length]: one row for each text with `ending` in its name, at whose first part it ends.

    Before it stand the others, one behind the other and again from the first until it is long enough.  Raises
    ValueError where no text has such a name.
    """
    rows = []
    for index, last in enumerate(texts):
        if ending not in last.name:
            continue
        # Half of the last text at most: what is decoded then continues what was read.
        tail = encode(tokenizer, last.text)
        parts = [tail[: min(len(tail), length // 2)]]
        others = cycle([*texts[:index], *texts[index + 1 :]] or [last])
        while sum(map(len, parts)) < length:
            parts.append(encode(tokenizer, next(others).text + "\n\n"))
        rows.append([token for part in reversed(parts) for token in part][-length:])
    if not rows:
        raise ValueError(f"expected a text with {ending!r} in its name, got {', '.join(repr(x.name) for x in texts)}")
    return torch.tensor(rows)
