"""What the command line prints with --json: results as plain objects.  `tables` has the same for people."""

import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import transformers

from ..backends import describe
from ..backends.hardware import ARCHITECTURES, Architecture
from ..checkpoint.declaration import find_folder, read_declaration
from ..formats.presets import PRESETS, Preset
from ..planning.geometry import LayerGeometry
from ..planning.layers import LayerPlan
from ..planning.memory import EXACT, MemoryPlan
from .runs import Generated
from .tasks import Case

TABLE_HEAD_DIM = 128


def generated_record(run: Generated) -> dict[str, Any]:
    return asdict(run) | {"ratio": run.ratio, "bits_per_element": run.bits_per_element}


def demo_record(case: Case, runs: Sequence[Generated], device: torch.device) -> dict[str, Any]:
    """The first run is what the others are compared with."""
    told = [generated_record(run) | {"agreement": run.agreement(runs[0])} for run in runs]
    return dict(prompt_tokens=case.length, answer=case.answer, computed_by=describe(device), runs=told)


def machine_record(device: torch.device, row: Architecture) -> dict[str, Any]:
    """Where and with what this runs."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    versions = {package: _version(package) for package in ("triton", "tq-cache")}
    return dict(
        device=device.type, name=name, cpu_threads=torch.get_num_threads(), computed_by=describe(device),
        architecture=asdict(row), python=sys.version.split()[0], system=platform.platform(),
        torch=torch.__version__, transformers=transformers.__version__, **versions,
    )  # fmt: skip


def preset_record(preset: Preset) -> dict[str, Any]:
    """With the bytes of vectors of `TABLE_HEAD_DIM` elements."""
    return dict(
        name=preset.name, keys=preset.key.name, values=preset.value.name, center=list(preset.center),
        smooth=preset.smooth, head_dim=TABLE_HEAD_DIM, bytes=preset.token_bytes(TABLE_HEAD_DIM, TABLE_HEAD_DIM),
    )  # fmt: skip


def info_record(machine: Mapping[str, Any], config: Any | None) -> dict[str, Any]:
    """This machine, all presets and architectures; of a checkpoint, what it says about float8 scales."""
    presets = [preset_record(preset) for preset in PRESETS.values()]
    said = dict(machine=machine, presets=presets, architectures=[asdict(row) for row in ARCHITECTURES.values()])
    if config is not None:
        folder = find_folder(config)
        declaration = read_declaration(config, folder)
        said["checkpoint"] = dict(
            folder=str(folder), has_fp8_scales=declaration.has_fp8_scales, reason=declaration.reason
        )
    return said


def stored(layer: LayerGeometry, plan: LayerPlan) -> str:
    """What a layer of a planned cache stores: "packed" as the preset of the row, another preset, "16-bit", or "-"."""
    if plan.preset is not None:
        return plan.preset.name if plan.reason else "packed"
    return EXACT if layer.num_kv_heads else "-"


def plan_record(plan: MemoryPlan) -> dict[str, Any]:
    """Layers one by one, and a row per cache."""
    pairs = zip(plan.geometry.layers, plan.layer_plans, strict=True)
    layers = [asdict(layer) | dict(stored=stored(layer, own), reason=own.reason) for layer, own in pairs]
    return dict(
        model_type=plan.geometry.model_type, notes=plan.geometry.notes, layers=layers, memory=plan.memory,
        settings=asdict(plan.settings), rows=[asdict(row) for row in plan.rows],
        prefill_bytes=plan.prefill_bytes, prefill_unknown=plan.prefill_unknown, weights_bytes=plan.weights_bytes,
        positions=plan.positions,
    )  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
