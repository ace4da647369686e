"""A folder of tensors: safetensors files, and a header in JSON that says what they are.  Nothing is unpickled.

    cache.json                          the header; a folder without one holds no cache
    cache-<save>-<rank>-<n>.safetensors tensors; the header has their names, shapes, dtypes and checksums
    .cache.json-<save>                  a save that goes on; in the end it is renamed to the header

Every save has names of its own for its files, and replaces the header last and in one step.  One that is interrupted
leaves what was there before, and what it wrote is not looked at.  Then all files that the header does not name are
removed, but for those of saves that go on.  A reader opens all files before it reads any, so that they stay readable;
if one has gone meanwhile, it begins again with the header that is there now.
"""

import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

HEADER = "cache.json"
FILE_NAME = re.compile(r"cache-([0-9a-f]{16})-\d{1,5}-\d{1,6}\.safetensors")
UNFINISHED = re.compile(r"\.cache\.json-([0-9a-f]{16})")
ABANDONED = 24 * 3600.0  # seconds without a write after which a save counts as killed
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
    save:    the name of the save, set before anything is added
    """

    save: str

    def __init__(self, folder: Path, rank: int, most_bytes: int) -> None:
        self.folder, self.rank, self.most_bytes = folder, rank, most_bytes
        self.entries: dict[str, dict[str, Any]] = {}
        self._shard: dict[str, torch.Tensor] = {}
        self._files: list[Path] = []

    def __enter__(self) -> "Writer":
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
        """Write what was added.  Raises OSError where that cannot be."""
        if self._shard:
            path = self._path(len(self._files))
            self._files.append(path)
            try:
                save_file(self._shard, path, metadata={"format": "pt"})
            except SafetensorError as error:  # which holds the number of the system's error as text alone
                number = re.search(r"os error (\d+)", str(error))
                size = sum(x.nbytes for x in self._shard.values())
                raise OSError(
                    int(number[1]) if number else errno.EIO,
                    f"expected to write {size} bytes, got {error}; free some room, or save to another folder",
                    str(path),
                ) from error
            with path.open("rb") as opened:
                os.fsync(opened.fileno())
            self._shard = {}

    def _path(self, number: int) -> Path:
        return self.folder / f"cache-{self.save}-{self.rank}-{number}.safetensors"


@contextmanager
def new_save(folder: Path) -> Iterator[str]:
    """A name that no other save has; until this is left, nobody removes files of that name."""
    folder.mkdir(parents=True, exist_ok=True)
    save = secrets.token_hex(8)
    path = _unfinished(folder, save)
    path.touch()
    try:
        yield save
    finally:
        path.unlink(missing_ok=True)


def _unfinished(folder: Path, save: str) -> Path:
    return folder / f".{HEADER}-{save}"


def write_header(folder: Path, header: dict[str, Any], save: str) -> None:
    """Replace the header, which ends the save, and remove the files that nobody needs any more."""
    text = json.dumps(header | {"checksum": header_checksum(header)}, indent=1)
    path = _unfinished(folder, save)
    with path.open("w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(path, folder / HEADER)
    _remove_unneeded(folder)


def _remove_unneeded(folder: Path) -> None:
    """Remove the files that the header does not name, but for those of saves that go on."""
    found = {path: save for path in folder.iterdir() if (save := _save_of(path.name))}
    written: dict[str, float] = {}
    for path, save in found.items():
        with suppress(FileNotFoundError):
            written[save] = max(written.get(save, 0.0), path.stat().st_mtime)
    now = (folder / HEADER).stat().st_mtime  # by the clock that the others are by
    ongoing = {x for x, last in written.items() if _unfinished(folder, x).exists() and now - last < ABANDONED}
    # Read last: a save that has ended meanwhile is in the header, or in none any more.
    needed = files_named(read_header(folder))
    for path, save in found.items():
        if save not in ongoing and path.name not in needed:
            with suppress(OSError):  # the save is whole all the same; `unneeded` lists the file
                path.unlink()


def _save_of(name: str) -> str | None:
    """The save that a file is of; None if it is of none."""
    match = FILE_NAME.fullmatch(name) or UNFINISHED.fullmatch(name)
    return match[1] if match else None


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
        self._stack = ExitStack()
        self.header = self._opened()
        self.tensors: dict[str, dict[str, Any]] = self.header["tensors"]
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
        file = self._files[part["file"]]
        try:
            cut = file.get_slice(name)  # says what is there before anything is read
            expect(list(cut.get_shape()) == shape, f"{name} as {shape}", list(cut.get_shape()), where)
            tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CacheFileError(f"expected a whole file with {name}, got {where}: {error}; save again") from None
        expect(tensor.dtype == DTYPES[entry["dtype"]], f"{name} in {entry['dtype']}", tensor.dtype, where)
        found = checksum(tensor)
        expect(found == part["sha256"], f"{name} with the checksum {part['sha256']}", found, where)
        return tensor

    def _opened(self) -> dict[str, Any]:
        """The header, whose files are all open: whatever is saved or removed from now on, they can be read."""
        while True:
            header = read_header(self.folder)
            try:
                self._files = {name: self._open(name) for name in sorted(files_named(header))}
                return header
            except CacheFileError:
                self._stack.close()
                if read_header(self.folder)["checksum"] == header["checksum"]:
                    raise  # else another save has replaced this one

    def _open(self, name: str) -> Any:
        path = self.folder / name
        try:
            return self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError, RuntimeError) as error:  # the last from torch, which opens it, too
            if not path.is_file():
                raise CacheFileError(
                    f"expected {name} in {str(self.folder)!r}, got no such file; copy the whole folder"
                ) from None
            raise CacheFileError(f"expected a whole file, got {str(path)!r}: {error}; save again") from None


def unneeded(folder: Path, header: Mapping[str, Any]) -> list[str]:
    """Files that the header does not name: of saves that were interrupted, or still go on."""
    named = files_named(header)
    return sorted(x.name for x in folder.iterdir() if _save_of(x.name) and x.name not in named)


def total_bytes(folder: Path, names: Iterable[str]) -> int:
    return sum((folder / name).stat().st_size for name in names if (folder / name).is_file())
