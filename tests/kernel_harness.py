"""What the tests of kernels share: processes of their own, compiling for GPUs that are not there.

Triton reads TRITON_INTERPRET when it is imported, and 3.6 lets conversions of one target leak into the next, so a test
file runs itself as a script, once per target, and prints one JSON line per case.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Triton's backend, architecture and warp size of every row of `tq_cache.hardware.ARCHITECTURES` that runs kernels.
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


def compile_kernel(
    kernel: Any, target: str, signature: dict[str, Any], constants: dict, stage: str | None = None, fits: bool = True,
    **options: Any,
) -> str:  # fmt: skip
    """Compile for a target of `TARGETS`; the PTX or AMD assembly, or the text of another stage ("ttgir").

    Asserts that the target has the shared memory it needs, unless not `fits`.

    signature: type of each argument that is no constant: "*bf16", "i32", "fp32", ..., or a (nested) tuple of types;
               None stands for the constant None.  Pointers are taken to be aligned, and so are sizes of type "i64".
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    place, attributes = kernel.arg_names.index, {}
    values = {(place(name),): value for name, value in constants.items()}
    for name, kind in signature.items():
        for path, leaf in _leaves(kind, (place(name),)):
            if leaf is None:
                values[path] = None
            elif leaf[0] == "*" or leaf == "i64":
                attributes[path] = [["tt.divisibility", 16]]
    kinds = {name: _with_constants(kind) for name, kind in signature.items()} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature=kinds, constexprs=values, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    assembly, needed = compiled.asm, compiled.metadata.shared
    assert not fits or needed <= SHARED[target], f"{needed} bytes of shared memory, {target} has {SHARED[target]}"
    assert assembly["cubin" if target.startswith("sm") else "hsaco"]
    return assembly[stage or ("ptx" if target.startswith("sm") else "amdgcn")]


def _with_constants(kind: Any) -> Any:
    """A type with "constexpr" for every None."""
    if isinstance(kind, tuple):
        return tuple(_with_constants(item) for item in kind)
    return "constexpr" if kind is None else kind


def _leaves(kind: Any, path: tuple[int, ...]) -> Any:
    if isinstance(kind, tuple):
        for index, item in enumerate(kind):
            yield from _leaves(item, (*path, index))
    else:
        yield path, kind
