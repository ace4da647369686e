"""Which weights a saved cache belongs to: samples of parameters in memory, or of the files that a config names.

Models of one shape, a base and what was trained from it, differ in nothing else, and their caches do not fit.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..checkpoint.declaration import find_folder
from .folder import FILE_NAME

PLACES, BYTES = 64, 64  # of a file of weights
ELEMENTS = 32  # of a parameter
COMPILED = "_orig_mod."  # what torch.compile puts before names


def weights_record(config: PreTrainedConfig, model: torch.nn.Module | None) -> dict[str, Any]:
    """What is known of a model's weights, as JSON: name, files and parameters, each of which may be None."""
    name = str(getattr(config, "_name_or_path", "") or "")
    return dict(name=name, files=of_files(config), parameters=None if model is None else of_model(model))


def is_record(value: Any) -> bool:
    """Whether this can be what `weights_record` gave."""
    if not isinstance(value, dict) or not {"name", "files", "parameters"} <= set(value):
        return False
    held = value["parameters"]
    right = held is None or isinstance(held, dict) and set(held) == {"samples", "adapters"}
    return right and isinstance(value["name"], str) and (held is None or isinstance(held["samples"], dict))


def of_files(config: PreTrainedConfig) -> str | None:
    """Of the checkpoint that a config names, from 64 places of each file; None where there are no files."""
    folder = find_folder(config)
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    files = [file for file in files if not FILE_NAME.fullmatch(file.name)]  # a cache may lie beside them
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size} ".encode())
        with file.open("rb") as opened:
            for place in range(PLACES):
                opened.seek(size * place // PLACES)
                digest.update(opened.read(BYTES))
    return digest.hexdigest()


def of_model(model: torch.nn.Module) -> dict[str, Any]:
    """By name, of every parameter in memory, a digest of up to 32 elements; and which adapters are active.

    None for parameters that are not here, or not all of them: those that accelerate keeps elsewhere or tensor
    parallelism cut.
    """
    samples: dict[str, str | None] = {}
    taken: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        name = name.replace(COMPILED, "")
        samples[name] = None
        if type(parameter.data).__name__ != "DTensor" and not parameter.is_meta and parameter.numel():
            flat = parameter.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS]
            taken.setdefault(flat.device, {})[name] = sample.to(torch.float32).nan_to_num()
    for named in taken.values():
        together = torch.cat(list(named.values())).cpu()  # one wait for each device
        for name, sample in zip(named, together.split([len(x) for x in named.values()]), strict=True):
            samples[name] = hashlib.sha256(sample.numpy().tobytes()).hexdigest()[:16]
    return dict(samples=samples, adapters=_active_adapters(model))


def difference(saved: Mapping[str, Any], config: PreTrainedConfig, model: torch.nn.Module | None) -> str | None:
    """What shows that these are other weights than those of a record; None where nothing does.

    Parameters say more than files, of which adapters are not.
    """
    if model is not None and saved["parameters"] is not None:
        here, there = of_model(model), saved["parameters"]
        if here["adapters"] != there["adapters"]:
            return f"adapters {there['adapters']}, here {here['adapters']}"
        own, others = here["samples"], there["samples"]
        if alone := sorted(set(own) ^ set(others)):
            return f"the parameter {alone[0]} is in one alone"
        known = [name for name in sorted(own) if own[name] is not None and others[name] is not None]
        if known:
            return next((f"the parameter {name}" for name in known if own[name] != others[name]), None)
    files = None if saved["files"] is None else of_files(config)
    return None if files is None or files == saved["files"] else f"the files of {str(config._name_or_path)!r}"


def _active_adapters(model: torch.nn.Module) -> list[str]:
    """Names of the adapters (peft's) that change what the model computes."""
    found = set()
    for module in model.modules():
        if hasattr(module, "lora_A") or hasattr(module, "base_layer"):
            active = getattr(module, "active_adapters", None) or []
            if not getattr(module, "disable_adapters", False) and not getattr(module, "merged", False):
                found |= {active} if isinstance(active, str) else {str(name) for name in active}
    return sorted(found)
