"""A folder of tensors: safetensors files, and a header in JSON that says what they are.  Nothing is unpickled.

    cache.json                          the header; a folder without one holds no cache
    cache-<save>-<rank>-<n>.safetensors tensors; the header has their names, shapes, dtypes and checksums

Every save has names of its own for its files, and replaces the header last and in one step.  One that is interrupted
leaves what was there before, and what it wrote is not looked at.  Files of the header before are removed after that.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

HEADER = "cache.json"
FILE_NAME = re.compile(r"cache-[0-9a-f]{16}-\d{1,5}-\d{1,6}\.safetensors")
MOST_HEADER_BYTES = 256 << 20
CHUNK = 4 << 20  # bytes that are hashed at once, each by a thread
READERS = 2  # tensors that are read ahead at once, each hashed by several threads: more were slower on 16 cores
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.uint8, torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
MOST_COUNT = 2**40  # of anything that a header counts


class CacheFileError(ValueError):
    """A folder that holds no cache, a damaged one, or one of something else."""


def checksum(tensor: torch.Tensor) -> str:
    """SHA-256 of the SHA-256 sums of each 4 MiB of a tensor's bytes, in hexadecimal."""
    bytes_of: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    flat = memoryview(bytes_of)
    pieces = [flat[start : start + CHUNK] for start in range(0, len(flat), CHUNK)]
    if len(pieces) <= 1:
        sums = [hashlib.sha256(piece).digest() for piece in pieces]
    else:
        sums = list(_threads().map(lambda piece: hashlib.sha256(piece).digest(), pieces))
    return hashlib.sha256(b"".join(sums)).hexdigest()


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    """hashlib lets other threads run."""
    return ThreadPoolExecutor(min(os.cpu_count() or 1, 16), thread_name_prefix="tq_cache checksum")


def header_checksum(header: Mapping[str, Any]) -> str:
    """Of all of a header but its own checksum."""
    rest = {name: value for name, value in header.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def own_copy(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Of its own, since a file may change."""
    return x.to(device, copy=True).contiguous()


# ---------------------------------------------------------------------------------------------------------- writing


class Writer:
    """Writes tensors to files of a folder, some at a time; removes them all where it is left by an exception.

    entries: what the header is to say of every tensor: dtype, shape, file and checksum
    """

    def __init__(self, folder: Path, save: str, rank: int, most_bytes: int) -> None:
        self.folder, self.save, self.rank, self.most_bytes = folder, save, rank, most_bytes
        self.entries: dict[str, dict[str, Any]] = {}
        self._shard: dict[str, torch.Tensor] = {}
        self._files: list[Path] = []

    def __enter__(self) -> "Writer":
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for file in self._files:
                file.unlink(missing_ok=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor of any device, copied to the CPU at once."""
        held = sum(x.nbytes for x in self._shard.values())
        if self._shard and held + tensor.nbytes > self.most_bytes:
            self.flush()
        file = self._path(len(self._files)).name
        self._shard[name] = copy = tensor.detach().to("cpu", copy=True).contiguous()
        dtype = str(copy.dtype).removeprefix("torch.")
        self.entries[name] = dict(dtype=dtype, shape=list(copy.shape), file=file, sha256=checksum(copy))

    def flush(self) -> None:
        """Write what was added."""
        if self._shard:
            path = self._path(len(self._files))
            self._files.append(path)
            save_file(self._shard, path, metadata={"format": "pt"})
            with path.open("rb") as opened:
                os.fsync(opened.fileno())
            self._shard = {}

    def _path(self, number: int) -> Path:
        return self.folder / f"cache-{self.save}-{self.rank}-{number}.safetensors"


def new_save() -> str:
    """A name that no other save has."""
    return secrets.token_hex(8)


def write_header(folder: Path, header: dict[str, Any], save: str) -> None:
    """Replace the header, and remove the files that the one before named."""
    before = _files_of(folder)
    text = json.dumps(header | {"checksum": header_checksum(header)}, indent=1)
    path = folder / f".{HEADER}-{save}"
    try:
        with path.open("w") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(path, folder / HEADER)
    finally:
        path.unlink(missing_ok=True)
    for name in before - files_named(header):
        (folder / name).unlink(missing_ok=True)


def _files_of(folder: Path) -> set[str]:
    """Files of the save that is there; none where there is none that can be read."""
    try:
        return files_named(read_header(folder))
    except CacheFileError:
        return set()


def files_named(header: Mapping[str, Any]) -> set[str]:
    return {part["file"] for entry in header["tensors"].values() for part in entry["parts"]}


# ---------------------------------------------------------------------------------------------------------- reading


def expect(holds: bool, expected: str, got: Any, where: str) -> None:
    """Raise CacheFileError unless it holds."""
    if not holds:
        raise CacheFileError(f"expected {expected} in {where}, got {got!r:.100}; the folder is damaged, save again")


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_COUNT


def read_header(folder: Path) -> dict[str, Any]:
    """The header of a folder, whole, and right about tensors.  Raises CacheFileError."""
    path = folder / HEADER
    if not path.is_file():
        raise CacheFileError(f"expected a saved cache, got {str(folder)!r}, which has no {HEADER}")
    if path.stat().st_size > MOST_HEADER_BYTES:
        raise CacheFileError(f"expected {HEADER} of at most {MOST_HEADER_BYTES} bytes, got {path.stat().st_size}")
    try:
        header = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise CacheFileError(f"expected JSON, got {str(path)!r}, which is none; save again") from None
    where = str(path)
    expect(isinstance(header, dict), "an object", header, where)
    said = header.get("checksum")
    expect(header_checksum(header) == said, "the checksum of what is there", said, where)
    tensors = header.get("tensors")
    expect(isinstance(tensors, dict), "tensors as an object", tensors, where)
    for name, entry in tensors.items():
        _check_entry(name, entry, where)
    return header


def _check_entry(name: str, entry: Any, where: str) -> None:
    right = isinstance(entry, dict) and set(entry) == {"dtype", "shape", "parts"} and entry["dtype"] in DTYPES
    right = right and isinstance(entry["shape"], list) and all(is_count(size) for size in entry["shape"])
    expect(right and isinstance(entry["parts"], list) and bool(entry["parts"]), f"dtype, shape, parts of {name}",
           entry, where)  # fmt: skip
    heads = 0
    for part in entry["parts"]:
        right = isinstance(part, dict) and set(part) == {"file", "heads", "sha256"} and isinstance(part["sha256"], str)
        right = right and isinstance(part["file"], str) and FILE_NAME.fullmatch(part["file"]) is not None
        expect(right, f"file, heads, sha256 of {name}", part, where)
        if len(entry["parts"]) > 1 or part["heads"] is not None:
            own = part["heads"]
            right = isinstance(own, list) and len(own) == 2 and all(map(is_count, own)) and own[0] == heads < own[1]
            expect(right, f"heads of {name} from {heads} on", own, where)
            heads = own[1]
    expect(not heads or (len(entry["shape"]) > 1 and entry["shape"][1] == heads), f"all heads of {name}", heads, where)


class Reader:
    """Tensors of a folder by name, of which each is as the header says, or a CacheFileError."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.header = read_header(self.folder)
        self.tensors: dict[str, dict[str, Any]] = self.header["tensors"]
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._opening = Lock()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="tq_cache read")
        self._ahead: dict[str, Future[torch.Tensor]] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._readers.shutdown(cancel_futures=True)
        self._stack.close()

    def names(self, prefix: str) -> set[str]:
        """What follows `prefix` in the names of tensors."""
        return {name.removeprefix(prefix) for name in self.tensors if name.startswith(prefix)}

    def read_ahead(self, prefix: str) -> None:
        """Begin to read the tensors whose names start with this, for `read` to take, beside what is done until then."""
        for name in self.tensors:
            if name.startswith(prefix) and name not in self._ahead:
                self._ahead[name] = self._readers.submit(self._read, name)

    def read(self, name: str) -> torch.Tensor:
        """On the CPU; maybe in the file's own memory."""
        return self._ahead.pop(name).result() if name in self._ahead else self._read(name)

    def _read(self, name: str) -> torch.Tensor:
        if name not in self.tensors:
            raise CacheFileError(f"expected the tensor {name} in {str(self.folder)!r}, got none; save again")
        entry = self.tensors[name]
        parts = [self._part(name, entry, part) for part in entry["parts"]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _part(self, name: str, entry: Mapping[str, Any], part: Mapping[str, Any]) -> torch.Tensor:
        shape, where = list(entry["shape"]), str(self.folder / part["file"])
        if part["heads"] is not None:
            shape[1] = part["heads"][1] - part["heads"][0]
        try:
            file = self._open(part["file"])
            cut = file.get_slice(name)  # says what is there before anything is read
            expect(list(cut.get_shape()) == shape, f"{name} as {shape}", list(cut.get_shape()), where)
            tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CacheFileError(f"expected a whole file with {name}, got {where}: {error}; save again") from None
        expect(tensor.dtype == DTYPES[entry["dtype"]], f"{name} in {entry['dtype']}", tensor.dtype, where)
        found = checksum(tensor)
        expect(found == part["sha256"], f"{name} with the checksum {part['sha256']}", found, where)
        return tensor

    def _open(self, name: str) -> Any:
        with self._opening:
            if name not in self._files:
                path = self.folder / name
                if not path.is_file():
                    raise CacheFileError(
                        f"expected {name} in {str(self.folder)!r}, got no such file; copy the whole folder"
                    )
                self._files[name] = self._stack.enter_context(safe_open(path, framework="pt"))
            return self._files[name]


def unneeded(folder: Path, header: Mapping[str, Any]) -> list[str]:
    """Files of saves that were interrupted, which nobody reads."""
    named = files_named(header)
    return sorted(x.name for x in folder.iterdir() if FILE_NAME.fullmatch(x.name) and x.name not in named)


def total_bytes(folder: Path, names: Iterable[str]) -> int:
    return sum((folder / name).stat().st_size for name in names if (folder / name).is_file())
