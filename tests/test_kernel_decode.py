"""The decode kernels: in Triton's interpreter against `reference.attend`, compiled for every target, and on CUDA.

Triton reads TRITON_INTERPRET when it is imported, and 3.6 lets one target's conversions leak into the next, so this
file runs itself: `python tests/test_kernel_decode.py interpret`, and `... compile cuda:90:32`, print a line per case.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tq_cache import reference
from tq_cache.presets import FORMATS, PRESETS, Preset
from tq_cache.rotation import rotation_matrix
from tq_cache.storage import LayerStorage

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TARGETS = ["cuda:80:32", "cuda:90:32", "hip:gfx942:64"]
SLOW_TARGETS = ["cuda:75:32", "cuda:86:32", "cuda:89:32", "cuda:100:32", "cuda:120:32", "hip:gfx90a:64", "hip:gfx950:64"]


@dataclass(frozen=True)
class Case:
    """A cache and a query for it."""

    preset: str
    tokens: int = 192  # packed ones, at most
    group: int = 4
    dim: int = 64
    value_dim: int | None = None
    batch: int = 2
    heads: int = 1
    queries: int = 1
    tail: int = 0
    sinks: int = 0
    mask: str = ""  # "rows" (left padding), "full" or "float"
    options: dict = field(default_factory=dict)
    splits: int | None = 2

    def view(self, device="cpu", dtype=torch.float32):
        """What a storage holds; `tail` tokens more than whole blocks stay exact."""
        generator = torch.Generator().manual_seed(self.tokens + self.dim)
        storage = LayerStorage(_preset(self.preset), self.tail, self.sinks, "reference")
        shape = (self.batch, self.heads, self.sinks + self.tokens + self.tail)
        keys = torch.randn(*shape, self.dim, generator=generator) + 0.5
        values = torch.randn(*shape, self.value_dim or self.dim, generator=generator) - 0.5
        storage.append(keys.to(device, dtype), values.to(device, dtype))
        return storage.view()

    def query(self, device="cpu", dtype=torch.float32):
        generator = torch.Generator().manual_seed(1)
        shape = (self.batch, self.heads * self.group, self.queries, self.dim)
        return torch.randn(shape, generator=generator).to(device, dtype)

    def make_mask(self, length, device="cpu"):
        if not self.mask:
            return None
        if self.mask == "rows":
            start = 7 + 30 * torch.arange(self.batch, device=device)
            mask = torch.arange(length, device=device) >= start[:, None]
            return mask[:, None, None].expand(-1, 1, self.queries, -1)
        generator = torch.Generator().manual_seed(2)
        shape = (1, self.heads * self.group, self.queries, length)
        noise = torch.randn(shape, generator=generator).to(device)
        return noise > -0.5 if self.mask == "full" else noise

    def make_options(self, device="cpu"):
        options = dict(self.options)
        if options.pop("s_aux", False):
            options["sinks"] = torch.linspace(-1, 3, self.heads * self.group, device=device)[None, :, None]
        return options


def _preset(name):
    if name in PRESETS:
        return PRESETS[name]
    key, value = name.split("/")
    return Preset(name, FORMATS["key"][key], FORMATS["value"][value])


FEATURES = {
    "tail": Case("tq4", tail=40),
    "sinks": Case("tq3", tail=70, sinks=5),
    "padding": Case("tq4", tail=20, sinks=4, mask="rows"),
    "full mask": Case("4bit_nc", tail=20, mask="full"),
    "float mask": Case("tq3", tail=20, mask="float", queries=2),
    "soft cap": Case("tq4", tail=20, options={"softcap": 2.0}),
    "s_aux": Case("k8v4", tail=20, options={"s_aux": True}),
    "queries": Case("tq4", tail=30, queries=5),
    "queries, no tail": Case("tq2", tokens=128, queries=4),
    "all": Case("tq_k3v4", tail=30, sinks=3, queries=2, mask="full", options={"s_aux": True, "softcap": 3.0}),
    "two widths": Case("tq4", dim=96, value_dim=64, tail=10),
    "one token": Case("3bit_nc", tokens=1, splits=1),
    "many splits": Case("3bit_nc", tokens=700, splits=5, batch=1),
}
KEYS, VALUES = ("fp8_e4m3", "nc4", "tq3", "tq2"), ("fp8_e4m3", "uniform4", "uniform3", "tq4", "tq3", "tq2")
CASES = (
    {f"{key}/{value}": Case(f"{key}/{value}", tokens=130, batch=1) for key in KEYS for value in VALUES}
    | {"e5m2": Case("fp8_e5m2", tokens=130)}
    | {f"group {group}": Case("tq4", group=group, batch=1) for group in (1, 7, 16)}
    | {f"dim {dim} {preset}": Case(preset, dim=dim, tokens=130, batch=1) for dim in (80, 96, 128) for preset in ("tq4", "3bit_nc")}
    | FEATURES
)


def run_kernel(case, view, query, mask, options, **choices):
    """`decode` on a view, as the sheet of operations calls it."""
    from tq_kernels.decode import code_table, decode

    def side(states):
        scale = states.scale if states.format.scale != "per_head" else states.calibration.scale[..., 0, 0].contiguous()
        return (states.packed, scale, *([] if states.zero is None else [states.zero]))

    def code(fmt):
        if fmt.codebook is None:
            return 8, (5 if fmt.float8 == torch.float8_e5m2 else 0, 0)
        return fmt.bits, code_table(fmt.codebook.magnitudes)

    def rotation(states):
        if not states.format.rotated:
            return None
        return rotation_matrix(states.head_dim, query.device, torch.float32)

    sinks = None if view.sink_keys is None else (view.sink_keys, view.sink_values)
    return decode(
        query, side(view.key), side(view.value), view.keys, view.values, packed_length=view.packed_length,
        scaling=query.shape[-1] ** -0.5, key_code=code(view.key.format), value_code=code(view.value.format), sinks=sinks,
        rotations=(rotation(view.key), rotation(view.value)), smooth=view.key.calibration.smooth,
        centers=(view.key.calibration.center, view.value.calibration.center), mask=mask,
        softcap=options.get("softcap"), s_aux=options.get("sinks"), splits=case.splits, **choices,
    )  # fmt: skip


def errors(out, lse, expected, expected_lse):
    relative = (out.double() - expected).norm() / expected.norm()
    return relative.item(), (lse.double() - expected_lse).abs().max().item()


def compare(case, device="cpu", dtype=torch.float32, **choices):
    """Relative error of the output, and largest error of the log-sum-exp, against the reference in float64."""
    view, query = case.view(device, dtype), case.query(device, dtype)
    mask, options = case.make_mask(view.length, device), case.make_options(device)
    scaling = query.shape[-1] ** -0.5
    expected = reference.attend(query.double(), view, mask, scaling, **options)
    return errors(*run_kernel(case, view, query, mask, options, **choices), *expected)


def interpret(*names):
    from tq_kernels.decode import Path as KernelPath

    torch.set_num_threads(1)
    for name, case in CASES.items():
        if names and name not in names:
            continue
        computes = (torch.float32, torch.float16) if name in ("tail", "e5m2", "tq3/tq3", "all") else (torch.float32,)
        for compute in computes:
            error = compare(case, path=KernelPath(compute))
            print(json.dumps([name, str(compute), *error]), flush=True)


# --- Compiled ---------------------------------------------------------------------------------------------------------

POINTERS = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}


def compile_all(target):
    from triton.backends.compiler import GPUTarget
    from tq_kernels import decode

    backend, arch, warp = target.split(":")
    arch = int(arch) if backend == "cuda" else arch
    target = GPUTarget(backend, arch, int(warp))
    table = decode.code_table((9 / 128, 13 / 64, 11 / 32, 1 / 2, 11 / 16, 7 / 8, 9 / 8, 3 / 2))
    small = decode.code_table((3 / 16, 9 / 16, 1.0, 13 / 8))
    codes = {8: (8, (0, 0)), 5: (8, (5, 0)), 4: (4, table), 3: (3, small), 2: (2, small)}
    for dtype in DTYPES:
        for pair in ((8, 8), (5, 5), (8, 4), (4, 4), (3, 3), (2, 2)):
            _compile(decode, target, dtype, codes[pair[0]], codes[pair[1]], pair[0])


def _compile(decode, target, dtype, key, value, name):
    """All three kernels, with everything switched on."""
    import triton.language as tl

    cuda = target.backend == "cuda"
    fp8 = cuda and target.arch >= 89 and dtype != "fp32"
    compute = tl.float8e4nv if fp8 else tl.float32 if dtype == "fp32" else tl.float16
    precision = "tf32x3" if cuda and target.arch >= 80 else "ieee"
    config = decode.choose(value[0], fp8)
    shared = dict(DIMS=(128, 128), GROUP=4, QUERIES=2, COLUMNS=8 if fp8 else 16, TERMS=2 if fp8 else 1)
    x, i64, flags = POINTERS[dtype], "i64", (True, True, decode.FULL_MASK.value)
    operand = {tl.float8e4nv: "*fp8e4nv", tl.float16: "*fp16", tl.float32: "*fp32"}[compute]
    scale = ["*fp32" if code[0] == 8 else "*fp16" for code in (key, value)]
    prepare = [x, scale[0], "*fp32", "*fp32", "*fp32", x, x, (x, x), "*u8", operand, "*fp32", "*fp32", "*fp32"]
    prepare += [("i32",) * 6, ("fp32",) * 2, ((i64,) * 3,) * 5 + ((i64,) * 4,)]
    split = [operand, "*fp32", ("*u8", scale[0]), ("*u8", scale[1]) + (("*fp16",) if value[0] == 4 else ())]
    split += ["*u8", "*i32", "*fp32", "*fp32", ("i32",) * 5, "fp32", ((i64,) * 2,) * 4 + ((i64,) * 4,)]
    merge = ["*fp32", "*fp32", "*fp32", "*fp32", "*fp32", x, "*fp32", ("i32",) * 3, (i64,) * 3]
    options = dict(num_warps=config.warps, num_stages=config.stages)
    constants = dict(KEY=key, VALUE=value, FLAGS=flags, COMPUTE=compute, PTX=fp8, PRECISION=precision, LAUNCH=(config.tile, config.warps, False))
    text = _build(decode._decode_split_kernel, target, split, constants | shared, options)
    constants = dict(BITS=key[0], UNIT=1.0, FLAGS=flags, PRECISION=precision)
    _build(decode._decode_prepare_kernel, target, prepare, constants | shared, {"num_warps": 4})
    _build(decode._decode_merge_kernel, target, merge, dict(DIM=128, GROUP=4, QUERIES=2, SPLITS=32), {"num_warps": 4})
    print(json.dumps([dtype, name, value[0], "wgmma" in text and "e4m3" in text]), flush=True)


def _build(kernel, target, signature, constants, options):
    import triton
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = dict(zip(names, signature, strict=False)) | dict.fromkeys(constants, "constexpr")
    attributes = {}
    for index, name in enumerate(names):
        if isinstance(signature[name], str) and signature[name].startswith("*"):
            attributes[index,] = [["tt.divisibility", 16]]
        for place, item in enumerate(signature[name] if isinstance(signature[name], tuple) else ()):
            if isinstance(item, str) and item.startswith("*"):
                attributes[index, place] = [["tt.divisibility", 16]]
            for inner in range(len(item) - 1 if isinstance(item, tuple) else 0):
                attributes[index, place, inner] = [["tt.divisibility", 16]]
    constants = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options).asm.get("ptx", "")


# --- Tests ------------------------------------------------------------------------------------------------------------


def run_self(*arguments, **environment):
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()], done


@pytest.fixture(scope="module")
def interpreted():
    pytest.importorskip("triton")
    lines, done = run_self("interpret", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: [line[1:] for line in lines if line[0] == name] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_interpreter_gives_what_the_reference_gives(interpreted, name):
    assert interpreted[name]
    for compute, error, lse_error in interpreted[name]:
        limit = 1e-5 if compute == "torch.float32" else 2e-3
        assert error < limit and lse_error < 2 * limit, (compute, error, lse_error)


@pytest.mark.parametrize("target", [*TARGETS, *(pytest.param(t, marks=pytest.mark.slow) for t in SLOW_TARGETS)])
def test_compiles(target):
    pytest.importorskip("triton")
    lines, done = run_self("compile", target)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(lines) == 6 * len(DTYPES)
    if target == "cuda:90:32":  # 16-bit queries go to the fp8 tensor cores
        assert all(native == (dtype != "fp32") for dtype, _, _, native in lines)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_error_budget_on_cuda(name, dtype):
    """At most twice the error that plain attention in the query's dtype makes, and 1e-3 for the two e4m3 terms."""
    error, lse_error, budget = budget_on_cuda(CASES[name], DTYPES[dtype])
    assert error < budget, (error, budget)
    assert lse_error < (1e-4 if dtype == "fp32" else 1e-2)


def budget_on_cuda(case, dtype):
    from test_reference_attention import dense, exact_parts

    view, query = case.view("cuda", dtype), case.query("cuda", dtype)
    mask, options = case.make_mask(view.length, "cuda"), case.make_options("cuda")
    expected_mask = mask
    if mask is None and case.queries > 1:
        expected_mask = torch.ones(case.queries, view.length, dtype=torch.bool, device="cuda")
        expected_mask = expected_mask.tril(view.length - case.queries)[None, None]
    scaling, (keys, values) = query.shape[-1] ** -0.5, exact_parts(view)
    expected, expected_lse = dense(query.double(), keys, values, expected_mask, scaling, **options)
    own, _ = dense(query, keys.to(dtype), values.to(dtype), expected_mask, scaling, **options)
    out, lse = run_kernel(case, view, query, mask, options)
    error, lse_error = errors(out, lse, expected, expected_lse)
    return error, lse_error, 2 * errors(own, lse, expected, expected_lse)[0]


def measure(index="0", count="1"):
    """Errors and budgets on CUDA, every `count`-th case: compiling is what takes the time."""
    for name in list(CASES)[int(index) :: int(count)]:
        for dtype in DTYPES:
            try:
                error, lse_error, budget = budget_on_cuda(CASES[name], DTYPES[dtype])
                verdict = "ok" if error < budget else "OVER"
                print(f"{name:24} {dtype} {error:.2e} of {budget:.2e} lse {lse_error:.1e} {verdict}", flush=True)
            except Exception as problem:
                print(f"{name:24} {dtype} FAIL {type(problem).__name__} {str(problem)[-300:]}", flush=True)


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all, "measure": measure}[sys.argv[1]](*sys.argv[2:])
