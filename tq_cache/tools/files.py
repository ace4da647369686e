"""Result files: whole, or not there."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place at the end, unless by an exception (or Ctrl-C)."""
    path = Path(path)
    part = path.with_name(f".part-{os.getpid()}-{path.name}")  # the same suffix: some writers go by it
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: str | Path, record: Any) -> None:
    with replacing(path) as part:
        with part.open("w") as file:
            json.dump(record, file, indent=2)
            file.write("\n")


def check_outputs(*paths: Path | None) -> None:
    """Raise ValueError unless such files can be written: better known before the measuring than after."""
    for path in paths:
        if path is None:
            continue
        if path.exists() and not path.is_file():
            raise ValueError(f"expected a file to write, got {str(path)!r}, which is none; name a file in a folder")
        if not path.parent.is_dir():
            raise ValueError(f"expected a folder for {str(path)!r}, there is none; make it first")
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ValueError(f"expected a folder for {str(path)!r} that you may write to; name another")
