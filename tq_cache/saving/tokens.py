"""The tokens of a packed layer as numbers and tensors, and back; growing and preallocated ones look the same.

tail.keys, tail.values              [B, H_kv, n, D] in the model's dtype; of latents (MLA), latents and rotary keys
sinks.keys, sinks.values            likewise, the first tokens, if they are apart from the tail
key.packed, .scales, .zeros         as `formats.states.PackedStates`, whole blocks; value likewise
key.center, .smooth, .scale         as `formats.states.Calibration`; value likewise
first.calibrated, .starts, ...      what `storage.first_tokens` knows, until all sequences are calibrated
"""

from dataclasses import fields
from typing import Any

import torch

from ..formats.packing import BLOCK_TOKENS, packed_bytes
from ..formats.presets import Format, Preset, Role
from ..formats.states import Calibration, KVView, PackedStates
from ..storage.base import LayerStorage, round_up, trimmed
from .folder import Reader, expect, is_count, own_copy

COUNTS = ("batch", "heads", "sinks", "packed", "tail")
FIRST = ("done", "queries", "observed", "unseen")

Numbers = dict[str, Any]
Tensors = dict[str, torch.Tensor]


def describe_tokens(storage: LayerStorage) -> tuple[Numbers, Tensors]:
    view, calibration = trimmed(storage.view()), storage.calibration
    first, tensors = storage.first_tokens.state()
    batch, heads, tail, key_dim = view.tail_keys.shape
    said: Numbers = dict(
        tokens=dict(batch=batch, heads=heads, sinks=view.sink_length, packed=view.packed_length, tail=tail), first=first
    )
    held: dict[str, torch.Tensor | None] = {"tail.keys": view.tail_keys, "tail.values": view.tail_values}
    held |= {"sinks.keys": view.sink_keys, "sinks.values": view.sink_values}
    if view.packed_length == 0 and not storage.first_tokens.done:
        calibration = None  # a passing one
    for number, (name, states) in enumerate((("key", view.key), ("value", view.value))):
        if states is not None:
            held |= {f"{name}.packed": states.packed, f"{name}.scales": states.scale, f"{name}.zeros": states.zero}
        if calibration is not None:
            held |= {f"{name}.{f.name}": getattr(calibration[number], f.name) for f in fields(Calibration)}
    if storage.packs:
        said["widths"] = dict(key=key_dim, value=view.tail_values.shape[3])
    named = {name: tensor for name, tensor in held.items() if tensor is not None}
    return said, named | {f"first.{name}": tensor for name, tensor in tensors.items()}


def restore_tokens(
    storage: LayerStorage, said: Numbers, reader: Reader, prefix: str, length: int, device: torch.device, where: str
) -> None:
    counts, first = said["tokens"], said.get("first")
    right = isinstance(counts, dict) and set(counts) == set(COUNTS) and all(is_count(x) for x in counts.values())
    expect(right and counts["batch"] * counts["heads"] > 0, f"counts {COUNTS}", counts, where)
    total = counts["sinks"] + counts["packed"] + counts["tail"]
    expect(total == reader.header["length"], f"{reader.header['length']} tokens", total, where)
    right = isinstance(first, dict) and set(first) == set(FIRST) and all(is_count(x) for x in first.values())
    expect(right, f"numbers {FIRST}", first, where)
    assert first is not None
    names = {x for x in reader.names(prefix) if x.partition(".")[0] in ("tail", "sinks", "key", "value", "first")}
    _check_tokens(storage.preset, counts, first, names, reader, prefix, where)
    tensors = {name: reader.read(prefix + name) for name in names}
    _check_calibration(tensors, where)
    sinks = min(length, counts["sinks"])
    packed = min(length - sinks, counts["packed"])
    view, calibration = _make_view(storage, tensors, (sinks, packed, length - sinks - packed), device)
    own = {name.removeprefix("first."): x.clone() for name, x in tensors.items() if name.startswith("first.")}
    if packed and "calibrated" not in own:
        first = first | {"done": 1}  # packed by a provisional calibration, which the next update would accept
    storage.first_tokens.restore(first, own)
    storage.first_tokens.place(device, slice(None))
    storage.adopt(view, calibration)


def _check_tokens(
    preset: Preset, counts: Numbers, first: Numbers, names: set[str], reader: Reader, prefix: str, where: str
) -> None:
    """Raise CacheFileError unless there are the tensors, in the shapes and dtypes, that such counts have."""
    batch, heads, blocks = counts["batch"], counts["heads"], -(-counts["packed"] // BLOCK_TOKENS)
    entries = {name: reader.tensors[prefix + name] for name in names}
    tails = [entries.get(f"tail.{name}") for name in ("keys", "values")]
    right = all(x is not None and len(x["shape"]) == 4 for x in tails)
    expect(right, "tail.keys and tail.values", sorted(names), where)
    dims, dtypes = [x["shape"][3] for x in tails], [x["dtype"] for x in tails]  # type: ignore[index]
    expect(not {"uint8", "bool", "int64"} & set(dtypes), "tail.keys, tail.values in dtypes of models", dtypes, where)
    wanted: dict[str, tuple[list[int], str]] = {}
    formats: tuple[tuple[Role, Format], ...] = ((preset.roles[0], preset.key), (preset.roles[1], preset.value))
    for name, dim, dtype, (role, fmt) in zip(("key", "value"), dims, dtypes, formats, strict=True):
        wanted[f"tail.{name}s"] = [batch, heads, counts["tail"], dim], dtype
        if counts["sinks"]:
            wanted[f"sinks.{name}s"] = [batch, heads, counts["sinks"], dim], dtype
        if blocks:
            row = dim if fmt.exact else packed_bytes(dim, fmt.bits)
            wanted[f"{name}.packed"] = [batch, heads, blocks, BLOCK_TOKENS * row], dtype if fmt.exact else "uint8"
        if blocks and fmt.scale not in ("per_head", "exact"):
            wanted[f"{name}.scales"] = [batch, heads, blocks * BLOCK_TOKENS], "float16"
        if blocks and fmt.has_zero:
            wanted[f"{name}.zeros"] = [batch, heads, blocks * BLOCK_TOKENS], "float16"
        if blocks or f"{name}.center" in names or f"{name}.smooth" in names or f"{name}.scale" in names:
            if role in preset.center:
                wanted[f"{name}.center"] = [batch, heads, 1, dim], "float32"
            if preset.smooth and name == "key":
                wanted[f"{name}.smooth"] = [batch, heads, 1, dim], "float32"
            if fmt.scale == "per_head":
                wanted[f"{name}.scale"] = [batch, heads, 1, 1], "float32"
    if "first.calibrated" in names:
        wanted["first.calibrated"] = [batch], "bool"
    if "first.starts" in names:
        wanted["first.starts"] = [batch], "int64"
    if "first.squares" in names or "first.seen" in names:
        wanted["first.squares"] = [batch, heads, 1, dims[0]], "float32"
        wanted["first.seen"] = [batch, 1, 1, 1], "int64"
    expect(set(wanted) == names, f"tensors {sorted(wanted)}", sorted(names), where)
    for name, (shape, kind) in wanted.items():
        found = entries[name]["shape"], entries[name]["dtype"]
        expect(found == (shape, kind), f"{name} {shape} in {kind}", found, where)


def _check_calibration(tensors: Tensors, where: str) -> None:
    for name, x in tensors.items():
        if name.endswith((".center", ".smooth", ".scale", ".squares")):
            right = bool(x.isfinite().all()) and (name.endswith((".center", ".squares")) or bool((x > 0).all()))
            expect(right, f"{name} finite, and of factors positive", "others", where)


def _make_view(
    storage: LayerStorage, tensors: Tensors, counts: tuple[int, int, int], device: torch.device
) -> tuple[KVView, tuple[Calibration, Calibration] | None]:
    """The view of so many sinks, packed tokens and tail, and the calibration."""
    sinks, packed, tail = counts
    preset, blocks, room = storage.preset, -(-packed // BLOCK_TOKENS), round_up(packed)
    calibrations = [
        Calibration(**{
            f.name: own_copy(tensors[f"{name}.{f.name}"], device)
            for f in fields(Calibration)
            if f"{name}.{f.name}" in tensors
        })
        for name in ("key", "value")
    ]  # fmt: skip
    states: list[PackedStates | None] = [None, None]
    if packed:
        formats = (preset.key, preset.value)
        for number, name in enumerate(("key", "value")):
            cut = {
                part: None if (x := tensors.get(f"{name}.{part}")) is None else own_copy(x[:, :, :size], device)
                for part, size in (("packed", blocks), ("scales", room), ("zeros", room))
            }
            dim = tensors[f"tail.{name}s"].shape[3]
            assert cut["packed"] is not None
            states[number] = PackedStates(
                preset.roles[number], formats[number], dim, cut["packed"], cut["scales"], cut["zeros"],
                calibrations[number],
            )  # fmt: skip
    exact = {
        name: own_copy(tensors[name][:, :, :size], device)
        for name, size in (("tail.keys", tail), ("tail.values", tail), ("sinks.keys", sinks), ("sinks.values", sinks))
        if name in tensors
    }
    view = KVView(
        exact["tail.keys"], exact["tail.values"], packed, states[0], states[1],
        exact.get("sinks.keys") if sinks else None, exact.get("sinks.values") if sinks else None, storage.backend,
    )  # fmt: skip
    measured = any(x is not None for c in calibrations for x in (c.center, c.smooth, c.scale))
    return view, (calibrations[0], calibrations[1]) if measured or packed else None
