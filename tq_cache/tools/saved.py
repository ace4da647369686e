"""Saved caches on the command line: what a folder holds, whether it is whole, and a prompt that begins with it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ..cache import TurboQuantCache
from ..hf.caller import ATTENTION_NAME
from ..saving.folder import HEADER, Reader, files_named, read_header, total_bytes, unneeded
from ..saving.load import check_header


def summary(folder: Path) -> dict[str, Any]:
    """What a folder holds, as JSON; tensors are not read.  Raises CacheFileError unless it is a cache's."""
    header = check_header(read_header(folder), str(folder))
    files = files_named(header)
    first: dict[str, Any] = next((layer["tokens"] for layer in header["layers"] if "tokens" in layer), {})
    return dict(
        tokens=header["length"], sequences=first.get("batch"), kv_heads=first.get("heads"),
        preset=header["options"].get("preset"), model=header["model"].get("model_type"),
        weights=header["weights"]["name"], layers=len(header["layers"]),
        packed_layers=sum(layer["preset"] is not None for layer in header["layers"]),
        input_ids="input_ids" in header["tensors"], files=len(files), bytes=total_bytes(folder, [*files, HEADER]),
        layout=header["layout"], written_by=header["written_by"], unneeded_files=unneeded(folder, header),
    )  # fmt: skip


def table(said: Mapping[str, Any], title: str) -> Table:
    """A summary, a row each."""
    made = Table(title=title, show_header=False)
    for name, value in said.items():
        text = f"{value:,}" if type(value) is int else ", ".join(value) if isinstance(value, list) else str(value)
        made.add_row(name.replace("_", " "), text)
    return made


def verify(folder: Path, progress: Callable[[str, int], AbstractContextManager[Callable[[], None]]]) -> int:
    """Read every tensor; how many there are.  Raises CacheFileError at the first that is not as it was saved."""
    with Reader(folder) as reader, progress("verifying", len(reader.tensors)) as advance:
        check_header(reader.header, str(folder))
        for name in reader.tensors:
            reader.read(name)
            advance()
        return len(reader.tensors)


def load_beginning(folder: Path, model: Any, input_ids: torch.Tensor) -> TurboQuantCache | None:
    """The saved tokens with which a prompt [1, T] begins; None where nothing is saved there."""
    if not (folder / HEADER).is_file():
        return None
    cache = TurboQuantCache.from_pretrained(folder, model, input_ids=input_ids)
    model.set_attn_implementation(ATTENTION_NAME)
    return cache


def save_run(folder: Path, cache: TurboQuantCache, model: Any, input_ids: torch.Tensor) -> None:
    """A cache after a run, of whose tokens [1, T] it holds all but the last."""
    cache.save_pretrained(folder, model=model, input_ids=input_ids[:, : int(cache.get_seq_length())])
