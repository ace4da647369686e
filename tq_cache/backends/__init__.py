"""The sheet of operations, and the one place that chooses who computes them.

calibrate(x, format, center, smooth, counts) -> Calibration   measured on the first tokens
store_pair(key, value, keys, values, start)                   quantise, pack, write in place
append(keys, values, tail_keys, tail_values, start)           copy new tokens into the tail
dequantize(states, length, dtype) -> [B, H_kv, length, D]
attend(query, view, mask, scaling, ...) -> (out, lse)         decode and prefill from the packed bits
takes_exact(query, view) -> bool                              whether `attend` is to be taken where all tokens are exact
update_static(parts, keys, values), attend_static(...)        one token of a preallocated layer
"""

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from ..formats.presets import Preset
from . import hardware, reference

BACKENDS = ("auto", "reference", "triton")
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_KERNEL_HEAD_DIM = 256


def check_backend(backend: str) -> None:
    """Raise ValueError unless there is such a backend."""
    if backend not in BACKENDS:
        raise ValueError(f"expected a backend of {list(BACKENDS)}, got {backend!r}")


def backend_for(preset: Preset, backend: str) -> str:
    """The backend for a preset: the kernels have no float8 scales per token, for which `triton` raises."""
    if "per_token" not in (preset.key.scale, preset.value.scale):
        return backend
    if backend == "triton":
        raise NotImplementedError("the kernels have no float8 scales per token; use backend='auto'")
    return "reference"


def implementation(backend: str, keys: torch.Tensor, values: torch.Tensor) -> ModuleType:
    """The module that computes the operations for such keys and values, [B, H_kv, T, D].

    `auto` takes the kernels wherever they run, else the reference; `triton` raises RuntimeError where they do not.
    While torch.compile traces it is the reference, which it can follow: kernels are in its graphs as the operations of
    `compiled`, and what is left are layers of transformers' own that sdpa cannot compute.
    """
    if torch.compiler.is_compiling():
        return reference
    return _implementation(backend, keys.device, keys.dtype, max(keys.shape[-1], values.shape[-1]))


@lru_cache
def _implementation(backend: str, device: torch.device, dtype: torch.dtype, widest: int) -> ModuleType:
    if backend == "reference":
        return reference
    problem = _no_kernels(device) or _not_for_kernels(dtype, widest)
    if problem is None:
        return _kernels()
    if backend == "triton":
        raise RuntimeError(f"backend='triton' cannot run here: {problem}; use backend='auto' or 'reference'")
    return reference


def path(device: torch.device | str) -> str:
    """Who computes on `device` with backend='auto', in words."""
    device = torch.device(device)
    problem = _no_kernels(device)
    return f"{hardware.REFERENCE} ({problem})" if problem else f"Triton kernels, {hardware.detect(device).decode_path}"


def _not_for_kernels(dtype: torch.dtype, widest: int) -> str | None:
    if widest > MAX_KERNEL_HEAD_DIM:
        return f"the kernels take a head_dim up to {MAX_KERNEL_HEAD_DIM}, got {widest}"
    if dtype not in KERNEL_DTYPES:
        return f"the kernels take bfloat16, float16 or float32, got {dtype}"
    return None


@lru_cache
def _no_kernels(device: torch.device) -> str | None:
    """Why there are no kernels for a device, or None if there are."""
    row = hardware.detect(device)
    if row.decode_path == hardware.REFERENCE:
        return row.reason
    return None if find_spec("triton") else "Triton is not installed (pip install triton)"


@lru_cache
def _kernels() -> ModuleType:
    """Imported when first used: importing the package needs neither Triton nor a GPU."""
    return import_module(".triton", __package__)
