"""What a cache holds, per layer and in all, as data and as a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Any, cast

import torch

from .checkpoint.scales import RoleScales
from .formats.packing import BLOCK_TOKENS
from .formats.presets import Preset, Role
from .hf.layers import PackedLayer
from .hf.room import newest_keys
from .parallel import rank_and_world
from .planning.layers import LayerPlan
from .storage.base import LayerStorage
from .storage.first_tokens import MIN_CALIBRATION_TOKENS
from .storage.growing import GrowingStorage
from .storage.preallocated import PreallocatedStorage


@dataclass(frozen=True)
class LayerReport:
    """One layer: what it is `stored` as (and why, where that is not the cache's preset), `tokens` it holds, `nbytes` of
    all its tensors, `bytes_16bit` the same keys and values would take.  `path` says how attention last read it, and
    why, where latents are cached.  `host_nbytes` more are in host memory (`offloading`).  `share`, with several
    processes, says which of the model's KV heads are in this one, which alone all figures are of: "2 of 8 KV heads", or
    "whole on every rank".  `dtype` is the model's, "" before the first token, `own_bytes` what the keys and values
    would take in it, `exact_nbytes` those of `nbytes` that are in it: tokens that are not packed, and room for more."""

    index: int
    kind: str
    stored: str
    tokens: int
    nbytes: int
    bytes_16bit: int
    path: str = ""
    host_nbytes: int = 0
    share: str = ""
    packed_tokens: int = 0
    dtype: str = ""
    own_bytes: int = 0
    exact_nbytes: int = 0

    @property
    def bits_per_element(self) -> float:
        """Bits held per key or value element, room for coming tokens included; 0 for a layer without any."""
        return 16 * (self.nbytes + self.host_nbytes) / self.bytes_16bit if self.bytes_16bit else 0.0


@dataclass(frozen=True)
class CacheReport:
    """What a cache holds, and where the scales of float8 keys and values come from; `str` gives a table.

    slot_nbytes:   bytes of the device memory to which offloaded layers are copied
    peaks:         the most bytes that PyTorch has held on each CUDA device of the cache's layers since this process
                   began (or since `torch.cuda.reset_peak_memory_stats`): weights, activations and all else with the
                   cache
    savings_begin: about how many tokens a 16-bit model's cache needs to be smaller than its keys and values are at
                   16 bits; 0 where nothing is packed
    room:          of a preallocated cache, tokens per sequence that there is memory for, of how many, and why; else ""
    """

    preset: str
    layers: list[LayerReport]
    scales: tuple[RoleScales, ...] = ()
    slot_nbytes: int = 0
    peaks: Mapping[str, int] = field(default_factory=dict)
    savings_begin: int = 0
    room: str = ""

    @property
    def peak_nbytes(self) -> int:
        """`peaks` of all devices together, which need not have been at the same time; 0 without CUDA."""
        return sum(self.peaks.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all layers and of slots, but those in host memory."""
        return sum(layer.nbytes for layer in self.layers) + self.slot_nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes in host memory."""
        return sum(layer.host_nbytes for layer in self.layers)

    @property
    def bytes_16bit(self) -> int:
        """Bytes that the keys and values held would take at 16 bits."""
        return sum(layer.bytes_16bit for layer in self.layers)

    @property
    def own_bytes(self) -> int:
        """Bytes that the keys and values held would take in the model's dtype."""
        return sum(layer.own_bytes for layer in self.layers)

    @property
    def dtype(self) -> str:
        """The model's, "" before the first token."""
        return next((layer.dtype for layer in self.layers if layer.dtype), "")

    @property
    def nbytes_16bit(self) -> int:
        """Bytes of this cache in a 16-bit model, whose exact tokens take 2 bytes an element; wherever they are, without
        slots."""
        held = self.nbytes + self.host_nbytes - self.slot_nbytes
        if not self.dtype:
            return held
        exact = sum(layer.exact_nbytes for layer in self.layers)
        return held - exact + exact * 2 // cast(torch.dtype, getattr(torch, self.dtype)).itemsize

    @property
    def ratio(self) -> float:
        """How many times smaller than at 16 bits, in a 16-bit model (`nbytes_16bit`); 0 for an empty cache."""
        return self.bytes_16bit / self.nbytes_16bit if self.nbytes_16bit else 0.0

    def held_line(self) -> str:
        """Bytes, and what they save, in words."""
        return f"{self.nbytes + self.host_nbytes:,} bytes; {self._savings()}"

    def _savings(self) -> str:
        """How much smaller than at 16 bits, or from which length on.  A model that runs in more bits is compared as the
        16-bit model that it would be on a GPU."""
        if self.ratio > 1:
            saved = f"{self.ratio:.2f}x smaller than at 16 bits"
            if self.bytes_16bit == self.own_bytes:
                return f"{saved} ({self.bytes_16bit:,} bytes)"
            return (
                f"the model runs in {self.dtype}: in 16 bits the cache would take {self.nbytes_16bit:,} bytes, {saved} "
                f"({self.bytes_16bit:,} bytes)"
            )
        if not self.savings_begin:
            return "no layer is packed"
        packed, tokens = (max(getattr(x, name) for x in self.layers) for name in ("packed_tokens", "tokens"))
        return f"{packed:,} of {tokens:,} tokens are packed: savings begin at about {self.savings_begin:,} tokens"

    def __str__(self) -> str:
        from rich.console import Console  # here, so that importing tq_cache stays light

        console = Console(file=StringIO(), width=160)
        console.print(self._table())
        for line in [
            *([self.room] if self.room else []),
            *map(str, self.scales),
            *([self._savings()] if self.own_bytes else []),
        ]:
            console.print(line, markup=False, highlight=False)
        if self.peaks:
            sizes_on = (f"{peak / 1e9:.2f} GB on {device}" for device, peak in self.peaks.items())
            console.print(f"the process held at most {', '.join(sizes_on)} so far", markup=False, highlight=False)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue().rstrip()

    def _table(self) -> Any:
        """Layers that are alike in one row, with the bytes of them all."""
        from rich.table import Table

        table = Table(title=f"TurboQuantCache, preset {self.preset}")
        more = {"attention": "path", "this rank": "share"}
        more = {heading: name for heading, name in more.items() if any(getattr(x, name) for x in self.layers)}
        hosts = ["on the host"] if self.host_nbytes else []
        for heading in ("layers", "kind", "stored as", "packed tokens", "exact tokens", "bytes", *hosts):
            table.add_column(heading, justify="left" if heading in ("layers", "kind", "stored as") else "right")
        table.add_column(f"bytes in {self.dtype}" if self.dtype else "unquantized bytes", justify="right")
        for heading in more:
            table.add_column(heading)
        alike: dict[LayerReport, list[LayerReport]] = {}
        for layer in self.layers:
            alike.setdefault(replace(layer, index=0), []).append(layer)
        for layer, group in alike.items():
            table.add_row(
                *[_ranges([x.index for x in group]), layer.kind, layer.stored],
                *[f"{layer.packed_tokens:,}", f"{layer.tokens - layer.packed_tokens:,}"],
                f"{len(group) * layer.nbytes:,}",
                *([f"{len(group) * layer.host_nbytes:,}"] if hosts else []),
                f"{len(group) * layer.own_bytes:,}",
                *[getattr(layer, name) for name in more.values()],
            )
        table.add_section()
        if hosts:
            table.add_row("slots", "", "", "", "", f"{self.slot_nbytes:,}")
        sizes = [self.nbytes, *([self.host_nbytes] if hosts else []), self.own_bytes]
        table.add_row("all", "", "", "", "", *[f"{size:,}" for size in sizes])
        return table


def _ranges(indices: Sequence[int]) -> str:
    """Ascending indices in words: "0, 2-5"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def make_report(
    preset: Preset,
    plans: Sequence[LayerPlan],
    layers: Sequence[Any],
    scales: Mapping[Role, RoleScales],
    heads: Mapping[int, int],
    slot_nbytes: int = 0,
    room: str = "",
) -> CacheReport:
    """The report of a cache's layers: plans, scales by role, the model's KV heads by layer, bytes of slots, room."""
    reports = [_layer_report(plan, layer, heads.get(plan.index)) for plan, layer in zip(plans, layers, strict=True)]
    begin = _savings_begin([layer.storage for layer in layers if isinstance(layer, PackedLayer)])
    return CacheReport(preset.name, reports, tuple(scales.values()), slot_nbytes, _peaks(layers), begin, room)


def _savings_begin(storages: Sequence[LayerStorage]) -> int:
    """`CacheReport.savings_begin`: where fixed bytes and those of packed tokens are fewer than 2 per element.

    A growing layer has room for the newest tokens, the first ones and a block, and packs none before it is calibrated.
    A preallocated one has all its room.
    """
    fixed, saved, least = 0.0, 0.0, 0  # bytes, bytes per token, tokens
    for storage in storages:
        if storage.newest is None or not storage.packs:
            continue
        batch, heads, _, key_dim = storage.newest[0].shape
        value_dim = storage.newest[1].shape[3]
        exact, packed = 2 * (key_dim + value_dim), 0
        if isinstance(storage, PreallocatedStorage):
            if storage.residual_length >= storage.max_length:  # a layer that is not packed
                continue
            room = storage.nbytes / (batch * heads)
        else:
            packed = storage.preset.token_bytes(key_dim, value_dim)
            newest, sinks = storage.residual_length, storage.sink_tokens
            room = (newest + 2 * sinks + BLOCK_TOKENS) * exact - (newest + sinks) * packed
            least = max(least, sinks + MIN_CALIBRATION_TOKENS)
        fixed += batch * heads * room
        saved += batch * heads * (exact - packed)
    return max(math.ceil(fixed / saved), least) if saved > 0 else 0


def _packed_tokens(storage: LayerStorage) -> int:
    """Tokens packed, without copying those in host memory back."""
    if isinstance(storage, GrowingStorage):
        return storage.packed_length
    states = storage.states if isinstance(storage, PreallocatedStorage) else None
    return 0 if states is None or not storage.packs else states.packed_length(storage.length)


EXACT_TENSORS = ("sink_keys", "sink_values", "tail_keys", "tail_values", "ring_keys", "ring_values")


def _exact_bytes(layer: Any) -> int:
    """Bytes of a layer's tensors in the model's dtype."""
    if not isinstance(layer, PackedLayer):
        return held_bytes(layer)
    holder = layer.storage.states if isinstance(layer.storage, PreallocatedStorage) else layer.storage
    return _tensor_bytes([*(getattr(holder, name, None) for name in EXACT_TENSORS), *_own_tensors(layer)])


def _peaks(layers: Sequence[Any]) -> dict[str, int]:
    """`CacheReport.peaks`: counters on the host, so nothing is waited for; none where CUDA has not been used."""
    if not torch.cuda.is_initialized():
        return {}
    devices = {str(device): device for layer in layers if (device := getattr(layer, "device", None)) is not None}
    return {
        name: torch.cuda.max_memory_allocated(device)
        for name, device in sorted(devices.items())
        if device.type == "cuda"
    }


def _layer_report(plan: LayerPlan, layer: Any, heads: int | None) -> LayerReport:
    packed, dtype = 0, None
    if isinstance(layer, PackedLayer):
        packed, dtype = _packed_tokens(layer.storage), layer.storage.dtype
        stored = f"{layer.storage.dtype or '-'}".removeprefix("torch.")
        if plan.preset is not None:
            first, second = ("latent", "rotary") if plan.latent else ("K", "V")
            stored = f"{first} {plan.preset.key.name}, {second} {plan.preset.value.name}"
        tokens, elements = layer.storage.length, layer.storage.num_elements
    else:
        exact = [x for x in (getattr(layer, "keys", None), getattr(layer, "values", None)) if x is not None]
        stored = f"{exact[0].dtype}".removeprefix("torch.") if exact else "-"
        tokens = exact[0].shape[-2] if exact and exact[0].numel() else 0
        elements, dtype = sum(x.numel() for x in exact), exact[0].dtype if exact else None
    stored = f"{stored} ({plan.reason})" if plan.reason else stored
    path, host = getattr(layer, "path", ""), layer.storage.host_nbytes if isinstance(layer, PackedLayer) else 0
    keys = newest_keys(layer)
    share = "" if keys is None or heads is None else _share(keys.shape[1], heads)
    said = plan.index, plan.kind, stored, tokens, held_bytes(layer), 2 * elements, path, host, share
    if dtype is None:
        return LayerReport(*said)
    name = f"{dtype}".removeprefix("torch.")
    return LayerReport(*said, packed, name, dtype.itemsize * elements, _exact_bytes(layer))


def _share(held: int, heads: int) -> str:
    """Which of a model's KV heads are here, where there are several processes."""
    if rank_and_world()[1] == 1:
        return ""
    return f"{held} of {heads} KV heads" if held < heads else "whole on every rank"


def held_bytes(layer: Any) -> int:
    """Bytes of every tensor that a cache layer, packed or transformers' own, holds; each storage once.

    Without `LayerStorage.host_nbytes`.
    """
    if isinstance(layer, PackedLayer):
        return layer.storage.nbytes + _tensor_bytes(_own_tensors(layer))
    return _tensor_bytes(list(vars(layer).values()))


def _own_tensors(layer: PackedLayer) -> list[Any]:
    """What a packed layer holds beside its storage."""
    return [value for name, value in vars(layer).items() if name != "storage"]


def _tensor_bytes(values: list[Any]) -> int:
    flat = [x for value in values for x in (value.values() if isinstance(value, dict) else [value])]
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in flat if isinstance(x, torch.Tensor)
    }
    return sum(storages.values())
