"""The prefill kernels, compiled for every target.

`python test_prefill_compiled.py TARGET FULL` prints a line per case.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from kernel_harness import (
    DTYPES,
    TARGETS,
    compile_launch,
    device_of,
    empty_states,
    print_line,
    recorded_launches,
    run_script,
)

from tq_cache.formats.presets import resolve_preset

# Preset, dtype, and what is asked for; in float32 everything.  The first ones are all kernels.
COMPILED = [("tq4", "bf16", dict(mask=True)), ("3bit_nc", "bf16", dict(segments=True))]
ALL_COMPILED = [
    *COMPILED,
    ("4bit_nc", "bf16", {}),
    ("tq4", "fp32", dict(mask=True, softcap=3.0, sink_logits=True)),
    ("tq4", "fp16", dict(softcap=3.0)),
    ("3bit_nc", "fp16", {}),
    ("tq2", "fp32", {}),
    ("fp8_e4m3", "bf16", dict(sink_logits=True)),
    ("fp8_e5m2", "fp32", {}),
    *((preset, "bf16", dict(segments=True)) for preset in ("k8v4", "tq2", "fp8_e5m2")),
]


def compile_all(target: str, full: str) -> None:
    """What a target can convert and multiply does not depend on the size of heads, and what compiling takes does."""
    dim = 128 if (target, full) == ("sm_90", "full") else 32
    for preset, dtype, options in ALL_COMPILED if full == "full" else COMPILED:
        names = _compile(target, resolve_preset(preset), DTYPES[dtype], dim, **options)
        print_line(preset, dtype, list(options), names)


def _compile(target, preset, dtype, dim, mask=False, softcap=None, sink_logits=False, segments=False) -> list[str]:
    """Compiles all that a prefill launches, and returns the names."""
    from tq_kernels.prefill.attend import attend
    from tq_kernels.prefill.problem import Problem

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    queries, packed = 100, 2112 if segments else 256
    key, value = (
        empty_states(role, fmt, dim, packed, preset.center)
        for role, fmt in (("key", preset.key), ("value", preset.value))
    )
    exact, num_sinks = empty(2, 2, queries + 20, dim), 4 if mask else 0
    given = empty(2, 8, queries, packed + queries + 20, dtype=torch.uint8) if mask else None
    problem = Problem(
        device_of(target), empty(2, 8, queries, dim), key, value, exact, exact, packed, num_sinks, queries, 0.1,
        softcap, given, empty(1, 8, 1) if sink_logits else None,
    )  # fmt: skip
    with recorded_launches() as launches, without_cudnn():
        attend(problem, segments)
    for launch in launches:
        compile_launch(launch, target)
    return [launch.program.kernel.__name__ for launch in launches]


@contextmanager
def without_cudnn() -> Iterator[None]:
    """cuDNN's attention gives what it would, but for the numbers."""
    from tq_kernels.prefill import segments
    from tq_kernels.prefill.arguments import Attended

    def no_attention(query, keys, values):
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        return Attended(query.new_empty(*query.shape[:3], values.shape[3]), lse)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_cudnn_attention", no_attention)
        yield


@pytest.mark.parametrize("target", ["sm_90"])
def test_compiles(target):
    check_compiled(target, "few")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for_every_target(target):
    check_compiled(target, "full")


def check_compiled(target, full) -> None:
    lines = run_script(__file__, target, full)
    assert {name for *_, names in lines for name in names} == {
        "prefill_query_kernel", "_prefill_packed_kernel", "dequantize_segment_kernel", "prefill_merge_kernel",
        "_prefill_exact_kernel", "_mask_tiles_kernel",
    }  # fmt: skip


if __name__ == "__main__":
    compile_all(*sys.argv[1:])
