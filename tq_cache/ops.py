"""The sheet of operations, and the one place that chooses who computes them.

calibrate(x, format, center, smooth, counts) -> Calibration   measured on the first tokens
store(states, x, start)                                       quantise, pack, write in place
dequantize(states, length, dtype) -> [B, H_kv, length, D]
attend(query, view, mask, scaling, ...) -> (out, lse)         decode and prefill from the packed bits
"""

from types import ModuleType

import torch

from . import reference

BACKENDS = ("auto", "reference", "triton")


def check_backend(backend: str) -> None:
    """Raise unless this backend can run."""
    if backend not in BACKENDS:
        raise ValueError(f"expected a backend of {list(BACKENDS)}, got {backend!r}")
    if backend == "triton":
        raise NotImplementedError(
            "the Triton kernels are not part of this version; use backend='auto' or 'reference' (plain PyTorch)"
        )


def implementation(backend: str, device: torch.device) -> ModuleType:
    """The module that computes the operations for tensors on `device`; `auto` takes the fastest there is."""
    check_backend(backend)
    return reference
