"""Saved caches on the command line: what a folder holds, whether it is whole, and a prompt that begins with it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ..cache import TurboQuantCache
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


def prompt_cache(
    folder: Path, model: Any, input_ids: torch.Tensor, fresh: TurboQuantCache, asked: Sequence[str]
) -> tuple[TurboQuantCache, bool]:
    """A cache with the tokens of a prompt [1, T] that are saved in a folder, and whether there were any.

    Where nothing is saved there, `fresh` is given all of them but the last, and saved: the same prompt, or one that
    goes on, finds them all, also where layers keep a state that cannot be cut.

    asked: options of `fresh` that were asked for

    Raises ValueError where what is saved has others of these, or is of no use for the prompt.
    """
    if not (folder / HEADER).is_file():
        folder.mkdir(parents=True, exist_ok=True)  # where it cannot be made, nothing is computed for it
        if input_ids.shape[1] > 1:
            read(model, fresh, input_ids[:, :-1])
            fresh.save_pretrained(folder, model=model, input_ids=input_ids[:, :-1])
        return fresh, False
    cache = TurboQuantCache.from_pretrained(folder, model, input_ids=input_ids)
    for name in asked:
        if cache.options[name] != fresh.options[name]:
            raise ValueError(
                f"expected {name.replace('_', ' ')} {cache.options[name]!r}, as in {str(folder)!r}, got "
                f"{fresh.options[name]!r}; leave it out, or name another folder"
            )
    if not cache.get_seq_length():
        raise ValueError(
            f"expected a prompt that begins as the one in {str(folder)!r}, got one of {input_ids.shape[1]} tokens that "
            "shares none that could be taken from there; name another folder"
        )
    return cache, True


@torch.inference_mode()
def read(model: Any, cache: TurboQuantCache, input_ids: torch.Tensor) -> None:
    """Give a cache the tokens [1, T]."""
    logits = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    model(input_ids=input_ids, past_key_values=cache, use_cache=True, **logits)
