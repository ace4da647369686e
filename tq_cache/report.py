"""What a cache holds, per layer and in all, as data and as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import torch

from .checkpoint.scales import RoleScales
from .formats.presets import Preset, Role
from .hf.layers import PackedLayer, newest_keys
from .parallel import rank_and_world
from .planning.layers import LayerPlan


@dataclass(frozen=True)
class LayerReport:
    """One layer: what it is `stored` as (and why, where that is not the cache's preset), `tokens` it holds, `nbytes` of
    all its tensors, `bytes_16bit` the same keys and values would take.  `path` says how attention last read it, and
    why, where latents are cached.  `host_nbytes` more are in host memory (`offloading`).  `share`, with several
    processes, says which of the model's KV heads are in this one, which alone all figures are of: "2 of 8 KV heads", or
    "whole on every rank"."""

    index: int
    kind: str
    stored: str
    tokens: int
    nbytes: int
    bytes_16bit: int
    path: str = ""
    host_nbytes: int = 0
    share: str = ""

    @property
    def bits_per_element(self) -> float:
        """Bits held per key or value element, room for coming tokens included; 0 for a layer without any."""
        return 16 * (self.nbytes + self.host_nbytes) / self.bytes_16bit if self.bytes_16bit else 0.0


@dataclass(frozen=True)
class CacheReport:
    """What a cache holds, and where the scales of float8 keys and values come from; `str` gives a table.

    slot_nbytes: bytes of the device memory to which offloaded layers are copied
    peaks:       the most bytes that PyTorch has held on each CUDA device of the cache's layers since this process began
                 (or since `torch.cuda.reset_peak_memory_stats`): weights, activations and all else with the cache
    room:        of a preallocated cache, tokens per sequence that there is memory for, of how many, and why; else ""
    """

    preset: str
    layers: list[LayerReport]
    scales: tuple[RoleScales, ...] = ()
    slot_nbytes: int = 0
    peaks: Mapping[str, int] = field(default_factory=dict)
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
    def ratio(self) -> float:
        """How many times smaller than at 16 bits, wherever it is, without slots; 0 for an empty cache."""
        held = self.nbytes + self.host_nbytes - self.slot_nbytes
        return self.bytes_16bit / held if held else 0.0

    def __str__(self) -> str:
        from rich.console import Console  # here, so that importing tq_cache stays light
        from rich.table import Table

        table = Table(title=f"TurboQuantCache, preset {self.preset}")
        more = {"attention": [layer.path for layer in self.layers], "this rank": [layer.share for layer in self.layers]}
        more = {heading: texts for heading, texts in more.items() if any(texts)}
        hosts = ["on the host"] if self.host_nbytes else []
        for heading in (
            *("layer", "kind", "stored as", "tokens", "bytes", *hosts),
            *("16-bit bytes", "bits/element", *more),
        ):
            table.add_column(heading, justify="left" if heading in ("kind", "stored as", *more) else "right")
        for layer, *texts in zip(self.layers, *more.values(), strict=True):
            table.add_row(
                *[str(layer.index), layer.kind, layer.stored, f"{layer.tokens:,}", f"{layer.nbytes:,}"],
                *([f"{layer.host_nbytes:,}"] if hosts else []),
                *[f"{layer.bytes_16bit:,}", f"{layer.bits_per_element:.2f}", *texts],
            )
        table.add_section()
        if hosts:
            table.add_row("slots", "", "", "", f"{self.slot_nbytes:,}")
        sizes = [self.nbytes, *([self.host_nbytes] if hosts else []), self.bytes_16bit]
        table.add_row("all", "", f"{self.ratio:.2f}x smaller", "", *[f"{size:,}" for size in sizes])
        console = Console(file=StringIO(), width=120)
        console.print(table)
        if self.room:
            console.print(self.room, markup=False, highlight=False)
        for scales in self.scales:
            console.print(str(scales), markup=False, highlight=False)
        if self.peaks:
            sizes_on = (f"{peak / 1e9:.2f} GB on {device}" for device, peak in self.peaks.items())
            console.print(f"the process held at most {', '.join(sizes_on)} so far", markup=False, highlight=False)
        assert isinstance(console.file, StringIO)
        return console.file.getvalue().rstrip()


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
    return CacheReport(preset.name, reports, tuple(scales.values()), slot_nbytes, _peaks(layers), room)


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
    if isinstance(layer, PackedLayer):
        stored = f"{layer.storage.dtype or '-'}".removeprefix("torch.")
        if plan.preset is not None:
            first, second = ("latent", "rotary") if plan.latent else ("K", "V")
            stored = f"{first} {plan.preset.key.name}, {second} {plan.preset.value.name}"
        tokens, elements = layer.storage.length, layer.storage.num_elements
    else:
        exact = [x for x in (getattr(layer, "keys", None), getattr(layer, "values", None)) if x is not None]
        stored = f"{exact[0].dtype}".removeprefix("torch.") if exact else "-"
        tokens = exact[0].shape[-2] if exact and exact[0].numel() else 0
        elements = sum(x.numel() for x in exact)
    stored = f"{stored} ({plan.reason})" if plan.reason else stored
    path, host = getattr(layer, "path", ""), layer.storage.host_nbytes if isinstance(layer, PackedLayer) else 0
    keys = newest_keys(layer)
    share = "" if keys is None or heads is None else _share(keys.shape[1], heads)
    return LayerReport(plan.index, plan.kind, stored, tokens, held_bytes(layer), 2 * elements, path, host, share)


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
        own = [value for name, value in vars(layer).items() if name != "storage"]
        return layer.storage.nbytes + _tensor_bytes(own)
    return _tensor_bytes(list(vars(layer).values()))


def _tensor_bytes(values: list[Any]) -> int:
    flat = [x for value in values for x in (value.values() if isinstance(value, dict) else [value])]
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in flat if isinstance(x, torch.Tensor)
    }
    return sum(storages.values())
