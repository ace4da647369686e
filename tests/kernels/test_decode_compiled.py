"""The decode kernels, compiled for GPUs that are not there.

`python test_decode_compiled.py TARGET DTYPE ...` prints a line per pair of formats; with `few` in place of dtypes, one
for the commonest launches.
"""

import re
import sys

import pytest
import torch
from kernel_harness import DTYPES, TARGETS, compile_launch, device_of, empty_states, print_line, run_script

from tq_cache.formats.presets import FORMATS

PAIRS = (("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2"), ("fp8_e4m3", "uniform4"), ("nc4", "uniform4"),
         ("nc3", "uniform3"), ("tq2", "tq2"))  # fmt: skip


def compile_all(target, *dtypes):
    if dtypes == ("few",):
        key, value = PAIRS[3]
        print_line(*_compile(target, list(problems(target, "bf16", FORMATS["key"][key], FORMATS["value"][value]))[::3]))
        return
    for dtype in dtypes:
        # One architecture of each way to compute meets every pair of formats; the others meet one per dtype.
        every = dtype == "bf16" and len(dtypes) > 1 and target in ("sm_80", "sm_90", "gfx942")
        own = {"bf16": PAIRS[2:3], "fp16": PAIRS[4:5], "fp32": PAIRS[0:1]}[dtype]
        for key, value in PAIRS if every else own:
            found = _compile(target, problems(target, dtype, FORMATS["key"][key], FORMATS["value"][value]))
            print_line(dtype, key, value, *found)


def problems(target, dtype, key, value):
    """Decode problems that switch on everything between them: growing, preallocated (with a rotation by a matrix, if
    there is one), and nothing packed, growing and preallocated; all with sink tokens."""
    from tq_kernels.decode.problem import Problem

    def empty(*shape, dtype=DTYPES[dtype]):
        return torch.empty(shape, dtype=dtype, device="meta")

    def problem(dim, queries, tail, packed=256, **options):
        states = (empty_states(role, fmt, dim) for role, fmt in (("key", key), ("value", value)))
        states = states if packed else (None, None)
        # Narrow tiles of queries, and wider ones.
        query = empty(2, 2 * (2 if value.bits == 4 else 4), queries, dim)
        kv = empty(2, 2, tail, dim), empty(2, 2, tail, dim)
        return Problem(device_of(target), query, *states, *kv, packed, 0.1, **options)

    def more(queries, dim=128):
        heads = 2 * (2 if value.bits == 4 else 4)
        return sinks(4, dim) | dict(softcap=2.0, sink_logits=empty(1, heads, queries))

    def sinks(count, dim):
        return dict(sink_tokens=(empty(2, 2, count, dim), empty(2, 2, count, dim)))

    def counted(residual_length):
        mask, count = empty(2, 1, 1, 448, dtype=torch.bool), empty(dtype=torch.int64)
        return dict(mask=mask, num_tokens=count, residual_length=residual_length, max_length=448)

    yield problem(
        128, 2, 40, **more(2), mask=empty(1, 1, 2, 300, dtype=torch.bool), lengths=empty(2, dtype=torch.int32)
    )
    yield problem(96, 1, 192, **counted(128), **sinks(4, 96))
    yield problem(128, 2, 1000, packed=0, **more(2))  # causal
    yield problem(128, 1, 448, packed=0, **counted(448), **sinks(1, 128))  # an integer of 1 becomes a constant


def _compile(target, given):
    """Of every kernel that the problems launch: name, warps, limit of registers; and whether packed tokens go through
    the fp8 tensor cores."""
    from tq_kernels.decode.plan import prepare

    compiled, fp8 = [], False
    for problem in given:
        for launch in prepare(problem)[0]:
            made = compile_launch(launch, target)
            name, limit = launch.program.kernel.__name__, None
            if target.startswith("sm"):
                limit = re.search(r"\.maxnreg (\d+)", made.asm["ptx"])
            compiled.append((name, made.metadata.num_warps, limit and int(limit[1])))
            if name == "decode_kernel" and target.startswith("sm"):
                fp8 = fp8 or re.search(r"mma\S*\.e4m3", made.asm["ptx"]) is not None
                if launch.program.constants["ARITHMETIC"].ptx:
                    bits = min(problem.key.coding.bits, problem.value.coding.bits)
                    assert check_neighbours(made.asm["ttgir"]) >= (bits < 8)
    return compiled, fp8


def check_neighbours(ttgir):
    """Assert that codes are decoded four neighbours of a row at a time; returns in how many layouts they are.

    The assembly of `bits` looks at four bytes at once, those in registers 0 to 3 of a layout.
    """
    decoded = [line for line in ttgir.splitlines() if "elementwise_inline_asm" in line and "prmt" in line]
    names = {re.search(r"-> tensor<\d+x\d+xi8, (#\w+)>", line)[1] for line in decoded}
    definitions = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    for layout in map(definitions.__getitem__, names):
        blocked = re.search(r"sizePerThread = \[1, (\d+)\].* order = \[1, 0\]", layout)
        assert "register = [[0, 1], [0, 2]" in layout or int(blocked[1]) % 4 == 0, layout
    return len(names)


def check_compiled(target, *dtypes):
    lines = run_script(__file__, target, *dtypes)
    assert {line[0] for line in lines} == set(dtypes)
    names = {name for line in lines for name, *_ in line[3]}
    assert names == {"rotate_query_kernel", "decode_kernel", "decode_exact_kernel", "decode_merge_kernel"}
    if target == "sm_90":  # 16-bit queries go to the fp8 tensor cores
        assert all(fp8 == (dtype != "fp32") for dtype, key, _, _, fp8 in lines if "e5" not in key)
        for dtype, *_, compiled, _ in lines:
            limits = {limit for name, _, limit in compiled if name == "decode_kernel"}
            assert (None in limits) == (dtype == "fp32")  # `tuning.Config.registers`
            warps = {warps for name, warps, _ in compiled if name == "decode_exact_kernel"}
            assert warps == {8 if dtype == "fp32" else 4}  # `tuning.exact_warps`


def test_compiles():
    """For Hopper, what a growing cache launches: through the fp8 tensor cores, with the limit of registers; and what a
    preallocated one does where nothing is packed."""
    ((compiled, fp8),) = run_script(__file__, "sm_90", "few")
    assert fp8
    assert compiled == [
        ["decode_kernel", 4, 112], ["decode_merge_kernel", 1, None],
        ["decode_exact_kernel", 4, None], ["decode_merge_kernel", 1, None],
    ]  # fmt: skip


@pytest.mark.slow
def test_sink_tokens_compile_for_amd():
    """Triton 3.6 takes no pointer there that was chosen between two tensors, nor one that leaves a branch."""
    ((compiled, _),) = run_script(__file__, "gfx942", "few")
    assert {name for name, *_ in compiled} == {"decode_kernel", "decode_exact_kernel", "decode_merge_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for_every_dtype_and_format(target):
    check_compiled(target, *DTYPES)


def test_the_arithmetic_is_that_of_the_architecture_table():
    pytest.importorskip("triton")
    import triton.language as tl
    from tq_kernels.tuning import decode_arithmetic

    from tq_cache.backends.hardware import ARCHITECTURES, FP8_DOT

    for name in TARGETS:
        operand = decode_arithmetic(torch.bfloat16, device_of(name)).operand
        assert (operand == tl.float8e4nv) == (ARCHITECTURES[name].decode_path == FP8_DOT), name
    assert set(TARGETS) == set(ARCHITECTURES) - {"cpu"}


if __name__ == "__main__":
    compile_all(*sys.argv[1:])
