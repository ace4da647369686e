"""Reading a cache from a folder: all of it is checked, and nothing is taken from the folder but numbers and tensors."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from .folder import CacheFileError, Reader, expect, is_count
from .identity import check_codes, check_model
from .layers import restore
from .save import FORMAT, LAYOUT, tracked
from .weights import is_record

Place = torch.device | str | Mapping[int, torch.device | str] | None
KINDS = dict(options=dict, model=dict, weights=dict, codes=dict, layers=list, written_by=str)


@torch.inference_mode(False)  # what is made in inference mode can be written there alone
@torch.no_grad()
def load(
    make: Callable[..., Any],
    folder: Path,
    config: PreTrainedConfig | torch.nn.Module,
    input_ids: torch.Tensor | None,
    length: int | None,
    device: Place,
    any_weights: bool,
    progress: bool,
    options: Mapping[str, Any],
) -> Any:
    """See `TurboQuantCache.from_pretrained`; make: the class; options: those that are not saved."""
    model = config if isinstance(config, torch.nn.Module) else None
    own: Any = config if model is None else model.config
    with Reader(folder) as reader:
        header = check_header(reader.header, str(folder))
        check_model(header, own, model, any_weights)
        length = _wanted(reader, input_ids, length)
        cache = _make(make, own, reader, options)
        if len(cache.layers) != len(header["layers"]):
            raise CacheFileError(f"expected {len(cache.layers)} layers, got {len(header['layers'])}")
        _meet_widths(cache, reader)
        check_codes(header, {plan.index: plan.preset for plan in cache.plans})
        cache.caller.seen = header.get("reads_bits")  # so that tokens that wait for queries go on waiting
        if length:
            layers = tracked(enumerate(cache.layers), len(cache.layers), "loading", progress)
            for index, layer in layers:
                where = f"layer {index} of {str(folder)!r}"
                at = _device(device, index, model)
                reader.read_ahead(f"layers.{index}.")
                reader.read_ahead(f"layers.{index + 1}.")  # while this one's go to their device
                restore(layer, header["layers"][index], reader, f"layers.{index}.", length, at, where)
            cache._loaded()
    return cache


def check_header(header: dict[str, Any], where: str) -> dict[str, Any]:
    """Raise CacheFileError unless this version can read what a header describes."""
    if header.get("format") != FORMAT:
        raise CacheFileError(f"expected a folder in the format {FORMAT!r}, got {header.get('format')!r} in {where}")
    if header.get("layout") != LAYOUT:
        raise CacheFileError(
            f"expected layout {LAYOUT}, got {header.get('layout')!r}, written by {header.get('written_by')}; load it "
            "with that version of tq_cache, or save it again"
        )
    expect(is_count(header.get("length")) and header["length"] > 0, "a length", header.get("length"), where)
    for name, kind in KINDS.items():
        expect(isinstance(header.get(name), kind), f"{name} as {kind.__name__}", header.get(name), where)
    expect(is_record(header["weights"]), "weights", header["weights"], where)
    expect(header.get("reads_bits") in (None, True, False), "reads_bits", header.get("reads_bits"), where)
    for layer in header["layers"]:
        expect(isinstance(layer, dict) and {"kind", "preset"} <= set(layer), "layers as objects", layer, where)
        widths = layer.get("widths", {})
        right = isinstance(widths, dict) and all(is_count(x) and x <= 4096 for x in widths.values())
        expect(right and set(widths) <= {"key", "value"}, "widths of keys and values", widths, where)
    return header


def _wanted(reader: Reader, input_ids: torch.Tensor | None, length: int | None) -> int:
    """How many tokens to load."""
    saved = reader.header["length"]
    if length is not None and not (isinstance(length, int) and 0 <= length <= saved):
        raise ValueError(f"expected a length from 0 to {saved}, the tokens saved, got {length!r}")
    most = saved if length is None else length
    if input_ids is None:
        return most
    if "input_ids" not in reader.tensors:
        raise ValueError("expected a cache saved with input_ids=, got one without; give length= instead")
    ids, given = reader.read("input_ids"), torch.as_tensor(input_ids).cpu()
    given = given[None] if given.dim() == 1 else given
    if given.dim() != 2 or ids.shape[0] != given.shape[0] or not given.shape[1]:
        raise ValueError(
            f"expected input_ids [B, T] of batch {ids.shape[0]}, as saved, and T at least 1, got {list(given.shape)}"
        )
    count = min(ids.shape[1], given.shape[1])
    same = (ids[:, :count] == given[:, :count]).all(dim=0)
    return min(int(same.int().cumprod(0).sum()), given.shape[1] - 1, most)  # the last one is for the model to read


def _make(make: Callable[..., Any], config: Any, reader: Reader, options: Mapping[str, Any]) -> Any:
    """An empty cache with the options that were saved."""
    saved = dict(reader.header["options"])
    scales: dict[str, list[Any]] = {}
    for name in sorted(reader.names("scales.")):
        role, _, index = name.partition(".")
        expect(role in ("key", "value", "rotary") and index.isdigit(), "scales.ROLE.LAYER", name, str(reader.folder))
        argument, total = "v_scale" if role == "value" else "k_scale", len(reader.header["layers"])
        expect(int(index) < total, f"a layer below {total}", name, str(reader.folder))
        scales.setdefault(argument, [None] * total)[int(index)] = reader.read(f"scales.{name}")
    expect(not set(saved) & set(options), f"options without {sorted(options)}", sorted(saved), str(reader.folder))
    try:
        saved["layer_presets"] = dict(saved.get("layer_presets") or []) or None
        return make(config, **saved, **scales, **options)
    except Exception:
        try:
            make(config, **saved, **scales)
        except Exception as error:
            raise CacheFileError(
                f"expected options that this version of tq_cache takes in {str(reader.folder)!r}, got {saved}: "
                f"{error}; load it with the version that wrote it ({reader.header['written_by']}), or save it again"
            ) from error
        raise  # what the caller asked for


def _meet_widths(cache: Any, reader: Reader) -> None:
    """Tell a cache the widths of layers that were not packed, as their first keys did, which a config may not say."""
    for index, said in enumerate(reader.header["layers"]):
        shapes = [reader.tensors.get(f"layers.{index}.tail.{name}", {}).get("shape", []) for name in ("keys", "values")]
        if said["preset"] is None and all(len(shape) == 4 for shape in shapes):
            cache._meet_widths(index, shapes[0][3], shapes[1][3])


def _device(device: Place, index: int, model: torch.nn.Module | None) -> torch.device:
    """Of one layer."""
    if isinstance(device, Mapping):
        return torch.device(device[index])
    if device is not None:
        return torch.device(device)
    if model is None:
        return torch.device("cpu")
    layers = getattr(getattr(model, "get_decoder", lambda: None)(), "layers", None)
    module = layers[index] if isinstance(layers, torch.nn.ModuleList) and index < len(layers) else model
    found = next((x.device for x in module.parameters() if not x.is_meta), None)
    return torch.device("cpu") if found is None else found
