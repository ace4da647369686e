"""The kernels of latent attention, compiled for GPUs that are not there.

`python tests/kernels/test_latent_decode_compiled.py compile TARGET NAME ...` prints a line per launch.
"""

import re
import sys
from dataclasses import dataclass

import pytest
import torch
from kernel_harness import DTYPES, TARGETS, compile_launch, device_of, empty_states, print_line, run_script
from latent_store_cases import preset_of


@dataclass(frozen=True)
class Compiled:
    """A problem; `kind` is "growing", "preallocated", "chosen" or "exact", of which nothing is packed."""

    latent: str
    rotary: str
    rank: int = 512
    dim: int = 64
    dtype: str = "bf16"
    heads: int = 16
    kind: str = "growing"
    rows: bool | None = None
    splits: int | None = None

    def problem(self, target: str):
        """Everything is switched on: sinks, extra logits, soft cap, and a mask, or causality."""
        from tq_kernels.latent.problem import LatentProblem

        preset, dtype, count = preset_of(self.latent, self.rotary), DTYPES[self.dtype], self.kind == "preallocated"
        queries = 1 if count else 2

        def empty(*shape, dtype=dtype):
            return torch.empty(shape, dtype=dtype, device="meta")

        def both(tokens):
            return tuple(empty(2, 1, tokens, width) for width in (self.rank, self.dim))

        latents = empty_states("key", preset.key, self.rank, heads=1)
        rotary = empty_states("rotary", preset.value, self.dim, calibrated=False, heads=1, dtype=dtype)
        packs, options = self.kind != "exact", {}
        if self.kind in ("growing", "preallocated"):
            options["mask"] = empty(1, self.heads, queries, 448, dtype=torch.bool)
        if count:
            options |= {"num_tokens": empty(dtype=torch.int64), "residual_length": 128, "max_length": 448}
        if self.kind == "chosen":
            options["indices"] = empty(2, queries, 200, dtype=torch.int64)
        return LatentProblem(
            device_of(target),
            *(empty(2, self.heads, queries, width) for width in (self.rank, self.dim)),
            *((latents, rotary) if packs else (None, None)),
            *both(192 if count else 40),
            256 if packs else 0,
            0.1,
            sink_tokens=both(4),
            softcap=2.0,
            sink_logits=empty(1, self.heads, queries),
            rows=self.rows,
            splits=self.splits,
            **options,
        )


COMPILED = {
    "tq4": Compiled("tq4", "int8"),
    "many splits": Compiled("tq2", "exact", splits=20),
    "fp8, preallocated": Compiled("fp8_e4m3", "fp8_e4m3", kind="preallocated"),
    "tq3": Compiled("tq3", "exact", heads=20),
    "e5m2": Compiled("fp8_e5m2", "fp8_e5m2", dtype="fp16", heads=40),
    "nothing packed": Compiled("tq4", "exact", kind="exact"),
    "chosen": Compiled("nc4", "int8", kind="chosen", heads=128),
    "128 heads": Compiled("fp8_e4m3", "exact", heads=128),
    "rank 128": Compiled("tq2", "int8", 128, 32, dtype="fp16", heads=128),
    "no rotary part": Compiled("nc3", "exact", 256, 0),
    "float32": Compiled("tq4", "int8", dtype="fp32"),
    "float32, nothing packed": Compiled("tq4", "int8", dtype="fp32", kind="exact", heads=40),
}
# Where fp8 tensor cores take 64 rows at once: tokens as rows.
HOPPER = {
    "rows, e5m2": Compiled("fp8_e5m2", "fp8_e4m3", dtype="fp16", heads=20),
    "rows, preallocated": Compiled("nc4", "exact", kind="preallocated", heads=40),
    "rows, rank 128": Compiled("tq4", "int8", 128, 64, rows=True),
    "rows, rank 256": Compiled("fp8_e4m3", "exact", 256, 0, heads=5),
}
ROWS = {"tq4", "fp8, preallocated", *HOPPER}  # of these on sm_90
FAST = ("tq4", "chosen")


def compile_case(target: str, name: str) -> None:
    from tq_kernels.latent.plan import prepare_latents

    for launch in prepare_latents((COMPILED | HOPPER)[name].problem(target))[0]:
        made = compile_launch(launch, target)
        ptx = made.asm.get("ptx", "")
        found = [word for word in ("wgmma", "cp.async.bulk.tensor") if word in ptx]
        found += sorted(set(re.findall(r"mma\S*\.((?:e\dm\d|b?f16|tf32)\.(?:e\dm\d|b?f16|tf32))", ptx)))
        print_line(name, launch.program.kernel.__name__, made.metadata.shared, found)


def compiled(target, *names):
    lines = run_script(__file__, "compile", target, *names)
    attends = {"rows": "latent_rows_kernel", "exact": "latent_exact_kernel", "": "latent_kernel"}
    for name in names:
        of_case = {kernel: found for case, kernel, _, found in lines if case == name}
        exact = (COMPILED | HOPPER)[name].kind == "exact"
        rows = target == "sm_90" and name in ROWS
        expected = {attends["rows" if rows else "exact" if exact else ""], "latent_merge_kernel"}
        expected |= set() if exact else {"latent_query_kernel"}
        assert set(of_case) == expected | ({"latent_join_kernel"} if name == "many splits" else set())
        if rows:  # fp8 tensor cores read a tile that came by a descriptor
            codes = "e5m2" if (COMPILED | HOPPER)[name].latent == "fp8_e5m2" else "e4m3"
            assert {"wgmma", "cp.async.bulk.tensor", f"{codes}.e4m3"} <= set(of_case["latent_rows_kernel"]), name


def test_compiles():
    """For Hopper, both ways to attend to packed tokens."""
    compiled("sm_90", *FAST)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for_every_target(target):
    compiled(target, *COMPILED, *(HOPPER if target == "sm_90" else ()))


if __name__ == "__main__":
    for chosen in sys.argv[3:]:
        compile_case(sys.argv[2], chosen)
