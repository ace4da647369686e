"""What a checkpoint says about float8 scales for its keys and values, without loading weights.

    format              says it in
    compressed-tensors  kv_cache_scheme: 8-bit float, static; null or absent: none
    fp8 (AutoFP8)       kv_cache_scheme: "static", or nothing but the names of its tensors
    ModelOpt            kv_cache_scheme (config.json), kv_cache_quant_algo: FP8 (hf_quant_config.json)
    NVFP4               as the tool that made it, compressed-tensors or ModelOpt
    Quark               kv_cache_quant_config, or export.kv_cache_group with layer_quant_config
    not quantised       nothing but the names of its tensors
    all others          nothing: AWQ, GPTQ, bitsandbytes and their like quantise weights only

A field may stand in the config in memory, in config.json, of which transformers drops what it does not know, or in
hf_quant_config.json.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import safe_open
from transformers import PreTrainedConfig

from ..formats.presets import Role

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
NOT_QUANTIZED = "none"
# Formats without a config field for KV scales, but with tensors: their names have to say it.
SAID_BY_TENSORS = (NOT_QUANTIZED, "fp8")
# model.layers.3.self_attn.k_scale, .attn.k_scale, .k_proj.k_scale, .qkv_proj.k_scale, .k_proj.output_scale, .kv_scale
# (likewise where latents are cached, whose scale that of keys is: no tensor is named for them)
ENDINGS: dict[str, tuple[Role, ...]] = {
    ".k_scale": ("key",),
    ".v_scale": ("value",),
    ".k_proj.output_scale": ("key",),
    ".v_proj.output_scale": ("value",),
    ".kv_scale": ("key", "value"),
}
LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks)\.(\d+)\.")
# Layers that are numbered like those of the decoder and are not.
NOT_OF_THE_DECODER = re.compile(r"(?:^|\.)(?:vision|visual|audio|encoder|mtp)")


@dataclass(frozen=True)
class Declaration:
    """What a checkpoint says about its KV cache.

    method:         how it is quantised, in its own word, or "none"
    has_fp8_scales: it ships scales for float8 (e4m3) keys and values
    field:          the config field, with its file, or the tensor that speaks of the KV cache; "" if nothing does
    detail:         what that says, in words
    """

    method: str
    has_fp8_scales: bool
    field: str
    detail: str

    @property
    def reason(self) -> str:
        """The whole of it in one phrase."""
        return f"{self.field}: {self.detail}" if self.field else self.detail


@dataclass(frozen=True)
class ScaleTensor:
    """A tensor of scales: its name, and the safetensors file that holds it."""

    name: str
    file: Path


def read_declaration(config: PreTrainedConfig, folder: Path | None) -> Declaration:
    """What the checkpoint of this config says; `folder` is where it lies (`find_folder`), or None.

    The first field that speaks of the KV cache counts.  Raises ValueError on files that are not JSON.
    """
    found = list(_quantization_configs(config, folder))
    method = next((method for _, quantization in found if (method := _method(quantization))), NOT_QUANTIZED)
    for place, quantization in found:
        for reader in (_scheme, _algorithm, _quark):
            if said := reader(quantization):
                field, has_fp8_scales, detail = said
                return Declaration(method, has_fp8_scales, place.replace("{}", field, 1), detail)
    if folder is not None and method in SAID_BY_TENSORS and (tensors := scale_tensors(folder)):
        first = next(iter(tensors.values()))
        return Declaration(method, True, f"{first.name} in {first.file}", "the checkpoint holds scales")
    kind = "not quantised" if method == NOT_QUANTIZED else f"quantised by {method}"
    return Declaration(method, False, "", f"the checkpoint ({kind}) has no scales for keys and values")


def find_folder(config: PreTrainedConfig) -> Path | None:
    """The folder of a config's checkpoint: `config.name_or_path` if that is one, else its snapshot in the hub's cache.

    Nothing is downloaded.
    """
    name = str(getattr(config, "name_or_path", None) or "")
    path = Path(name)
    if not name or path.is_dir():
        return path if name else None
    if path.is_file():
        return path.parent
    try:
        cached = try_to_load_from_cache(name, "config.json", revision=getattr(config, "_commit_hash", None))
    except HFValidationError:  # a path that is gone
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def scale_tensors(folder: Path) -> dict[tuple[Role, int], ScaleTensor]:
    """The tensors of KV scales in a checkpoint, by role and layer, from the index or the single file's header.

    Raises ValueError where two tensors could be meant.
    """
    separate: dict[tuple[Role, int], ScaleTensor] = {}
    common: dict[tuple[Role, int], ScaleTensor] = {}
    endings = tuple(ENDINGS)
    for name, file in _tensor_files(folder):
        if not name.endswith(endings):
            continue
        layer = LAYER.search(name)
        if layer is None or NOT_OF_THE_DECODER.search(name):
            continue
        roles = next(roles for ending, roles in ENDINGS.items() if name.endswith(ending))
        found = separate if len(roles) == 1 else common
        for role in roles:
            known = found.setdefault((role, int(layer[1])), ScaleTensor(name, folder / file))
            if known.name != name:
                raise ValueError(
                    f"expected one tensor of {role} scales for layer {layer[1]}, got {known.name} and {name} "
                    f"in {folder}; pass k_scale= and v_scale="
                )
    return common | separate


# --------------------------------------------------------------------------------------------------- config fields

# Field, whether it declares static float8 e4m3 scales, and what it says in words.
_Said = tuple[str, bool, str]


def _scheme(quantization: dict[str, Any]) -> _Said | None:
    """compressed-tensors, ModelOpt's config.json, AutoFP8 (a word)."""
    scheme = quantization.get("kv_cache_scheme")
    if scheme is None:
        return None
    if not isinstance(scheme, dict):
        return "kv_cache_scheme", scheme == "static", f"{scheme}"
    bits, kind = scheme.get("num_bits", 8), scheme.get("type", "int")  # compressed-tensors' own defaults
    dynamic, symmetric = bool(scheme.get("dynamic")), scheme.get("symmetric") is not False
    detail = f"{bits}-bit {kind}, {'dynamic' if dynamic else 'static'}{'' if symmetric else ', asymmetric'}"
    return "kv_cache_scheme", (bits, kind, dynamic, symmetric) == (8, "float", False, True), detail


def _algorithm(quantization: dict[str, Any]) -> _Said | None:
    """ModelOpt."""
    algorithm = quantization.get("kv_cache_quant_algo")
    if algorithm is None:
        return None
    return "kv_cache_quant_algo", str(algorithm).upper() == "FP8", f"{algorithm}"


def _quark(quantization: dict[str, Any]) -> _Said | None:
    """Quark: one entry per projection; older versions keep them among those of all layers."""
    entries = quantization.get("kv_cache_quant_config") or {}
    field = "kv_cache_quant_config"
    if not entries:
        layers = quantization.get("layer_quant_config") or {}
        group = (quantization.get("export") or {}).get("kv_cache_group") or []
        entries = {name: layers.get(name) or {} for name in group}
        field = "export.kv_cache_group"
    if not entries:
        return None
    specs = [entry.get("output_tensors") or {} for entry in entries.values()]
    types = sorted({str(spec.get("dtype")) for spec in specs})
    dynamic = any(spec.get("is_dynamic") for spec in specs)
    detail = f"{', '.join(types)}, {'dynamic' if dynamic else 'static'}"
    return field, types == ["fp8_e4m3"] and not dynamic, detail


def _method(quantization: dict[str, Any]) -> str:
    method = quantization.get("quant_method")
    if method is not None:
        return str(getattr(method, "value", method))
    if quantization.get("load_in_4bit") or quantization.get("load_in_8bit"):
        return "bitsandbytes"  # before it named itself
    return "modelopt" if "quant_algo" in quantization else ""


def _quantization_configs(config: PreTrainedConfig, folder: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every quantisation config there is, with the place of a field {} of it."""
    for holder in (config, config.get_text_config(decoder=True)):
        held = getattr(holder, "quantization_config", None)
        held = held if held is None or isinstance(held, dict) else held.to_dict()
        yield from _with_nested("config.quantization_config.{}", held)
    if folder is None:
        return
    file = folder / "config.json"
    content = _read_json(file)
    for part, prefix in ((content, ""), (content.get("text_config"), "text_config.")):
        held = part.get("quantization_config") if isinstance(part, dict) else None
        yield from _with_nested(f"{prefix}quantization_config.{{}} in {file}", held)
    file = folder / "hf_quant_config.json"
    yield from _with_nested(f"{{}} in {file}", _read_json(file))


def _with_nested(place: str, held: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """A quantisation config, and the one that ModelOpt puts into it as "quantization"."""
    if isinstance(held, dict):
        yield place, held
        yield from _with_nested(place.replace("{}", "quantization.{}", 1), held.get("quantization"))


# ----------------------------------------------------------------------------------------------------------- files


def _tensor_files(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and file of every tensor in a folder's safetensors."""
    if (folder / WEIGHTS_INDEX).is_file():
        yield from _read_json(folder / WEIGHTS_INDEX).get("weight_map", {}).items()
    elif (folder / WEIGHTS).is_file():
        with safe_open(folder / WEIGHTS, framework="pt") as tensors:
            for name in tensors.keys():
                yield name, WEIGHTS


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except ValueError:
        raise ValueError(f"expected JSON, got {str(file)!r}, which is not") from None
    return content if isinstance(content, dict) else {}
