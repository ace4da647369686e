"""What the tests of kernels share: processes of their own, compiling for GPUs that are not there.

Triton reads TRITON_INTERPRET when it is imported, and 3.6 lets conversions of one target leak into the next, so a test
file runs itself as a script, once per target, and prints one JSON line per case.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tq_cache.formats.presets import Format

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Triton's backend, architecture, warp size of every row of `tq_cache.backends.hardware.ARCHITECTURES` with kernels.
TARGETS = {f"sm_{arch}": ("cuda", arch, 32) for arch in (70, 75, 80, 86, 87, 89, 90, 100, 120)} | {
    arch: ("hip", arch, 64) for arch in ("gfx90a", "gfx942", "gfx950")
}

# Bytes of shared memory that a program may have.
SHARED = dict.fromkeys(("sm_86", "sm_89", "sm_120"), 99 << 10) | dict.fromkeys(("sm_80", "sm_87"), 163 << 10)
SHARED |= {"sm_70": 96 << 10, "sm_75": 64 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
SHARED |= {"gfx90a": 64 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}


def run_script(file: str, *arguments: str, interpret: bool = False) -> list[Any]:
    """The JSON lines that `file`, run as a script, prints; fails with the end of its output if it fails.

    Skips the test where Triton is not installed.
    """
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests")))}
    environment |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1" if interpret else "0"}
    done = subprocess.run([sys.executable, file, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def print_line(*line: Any) -> None:
    print(json.dumps(line), flush=True)


def device_of(target: str) -> Any:
    """A GPU of `TARGETS`, as the launchers see one."""
    from tq_kernels.device import Device

    backend, arch, _ = TARGETS[target]
    reserved = 1024 if isinstance(arch, int) and arch >= 80 else 0  # of a multiprocessor's, for the system
    return Device(backend, arch, 132, SHARED[target] + reserved, SHARED[target], 0)


def compile_launch(launch: Any, target: str, fits: bool = True) -> Any:
    """What Triton compiles for a `Launch`, prepared for `device_of(target)`, when that GPU is there: with `asm`.

    Arguments are bound as at a launch: tensors may be on the CPU or the "meta" device.  Asserts that the target has the
    shared memory it needs, unless not `fits`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    program = launch.program
    kernel, gpu = program.kernel, GPUTarget(*TARGETS[target])
    assert program.device == device_of(target)
    backend, given = make_backend(gpu), program.constants | program.options
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    options, signature, constants, attributes = kernel._pack_args(backend, given, *bind(*launch.arguments, **given))
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=gpu, options=options.__dict__)
    needed = compiled.metadata.shared
    assert not fits or needed <= SHARED[target], f"{needed} bytes of shared memory, {target} has {SHARED[target]}"
    assert compiled.asm["cubin" if target.startswith("sm") else "hsaco"]
    return compiled


@contextmanager
def recorded_launches() -> Iterator[list[Any]]:
    """Launches are noted in the list, not made."""
    from tq_kernels.launch import Launch

    launches: list[Any] = []
    run = Launch.run
    Launch.run = lambda launch: launches.append(launch)
    try:
        yield launches
    finally:
        Launch.run = run


def empty_states(
    role: str, fmt: Format, dim: int, tokens: int = 256, calibrated: bool = True, batch: int = 2, heads: int = 2,
    dtype: torch.dtype = torch.bfloat16, device: str = "meta",
) -> Any:  # fmt: skip
    """Packed states, without memory, for launches compiled alone: centred, keys smoothed, exact ones in `dtype`."""
    from tq_kernels.states import States

    from tq_cache.backends.triton import coding_of

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    head_scale, vectors = fmt.scale == "per_head", [empty(torch.float32, batch, heads, 1, dim) for _ in range(2)]
    packed, block = (dtype, 64 * dim) if fmt.exact else (torch.uint8, 8 * dim * fmt.bits)
    return States(
        empty(packed, batch, heads, tokens // 64, block),
        None if head_scale or fmt.exact else empty(torch.float16, batch, heads, tokens),
        empty(torch.float16, batch, heads, tokens) if fmt.has_zero else None,
        vectors[0] if calibrated else None,
        vectors[1] if calibrated and role == "key" else None,
        empty(torch.float32, batch, heads, 1, 1) if head_scale else None,
        empty(torch.float32, dim, dim) if fmt.rotated else None,
        coding_of(fmt),
    )
