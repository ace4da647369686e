"""The decode kernels: in Triton's interpreter against `reference.attend`, compiled for every target, and on CUDA.

`python tests/test_kernel_decode.py interpret NAME ...` and `... compile TARGET FULL` print a line per case.
"""

import re
import sys
from dataclasses import dataclass, field, replace

import pytest
import torch
from error_budget import Roundings, assert_within, attention, exact_parts, ratios, relative_error, seeded
from kernel_harness import (
    DTYPES,
    TARGETS,
    compile_launch,
    device_of,
    empty_states,
    print_line,
    run_script,
)

from tq_cache.backends import reference
from tq_cache.formats.presets import FORMATS, PRESETS, Preset
from tq_cache.formats.states import KVView, map_tensors
from tq_cache.storage.growing import GrowingStorage
from tq_cache.storage.preallocated import PreallocatedStorage


@dataclass(frozen=True)
class Case:
    """A cache and a query for it."""

    preset: str  # or "key format/value format"
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
        generator = seeded(self.tokens + self.dim)
        storage = GrowingStorage(_preset(self.preset), self.tail, self.sinks, "reference")
        shape = (self.batch, self.heads, self.sinks + self.tokens + self.tail)
        keys = torch.randn(*shape, self.dim, generator=generator) + 0.5
        values = torch.randn(*shape, self.value_dim or self.dim, generator=generator) - 0.5
        storage.append(keys.to(device, dtype), values.to(device, dtype))
        return storage.view()

    def query(self, device="cpu", dtype=torch.float32):
        generator = seeded(1)
        shape = (self.batch, self.heads * self.group, self.queries, self.dim)
        return torch.randn(shape, generator=generator).to(device, dtype)

    def make_mask(self, length, device="cpu"):
        if not self.mask:
            return None
        if self.mask == "rows":
            start = 7 + 30 * torch.arange(self.batch, device=device)
            mask = torch.arange(length, device=device) >= start[:, None]
            return mask[:, None, None].expand(-1, 1, self.queries, -1)
        generator = seeded(2)
        shape = (1, self.heads * self.group, self.queries, length)
        noise = torch.randn(shape, generator=generator).to(device)
        return noise > -0.5 if self.mask == "full" else noise

    def make_options(self, device="cpu"):
        options = dict(self.options)
        if options.pop("s_aux", False):
            options["sink_logits"] = torch.linspace(-1, 3, self.heads * self.group, device=device)[None, :, None]
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
    "16 queries": Case("4bit_nc", tail=7, queries=16, group=3),
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
    | {f"dim {dim} {preset}": Case(preset, dim=dim, tokens=130, batch=1)
       for dim in (80, 96, 128, 256) for preset in ("tq4", "3bit_nc", "k8v4")}
    | FEATURES
)  # fmt: skip
# In the interpreter: every number of bits, and every feature, once.
FAST = ("e5m2", "nc4/uniform4", "tq3/uniform3", "tq2/tq2", "fp8_e4m3/tq3", "padding", "all", "queries", "one token")


def run_kernel(case, view, query, mask, options, **choices):
    """`decode` on a view, as the sheet of operations calls it, with other choices."""
    from tq_kernels.decode.plan import decode

    from tq_cache.backends.triton import states_of

    return decode(
        query,
        states_of(view.key),
        states_of(view.value),
        view.tail_keys,
        view.tail_values,
        packed_length=view.packed_length,
        scaling=query.shape[-1] ** -0.5,
        sinks=None if view.sink_keys is None else (view.sink_keys, view.sink_values),
        mask=mask,
        softcap=options.get("softcap"),
        s_aux=options.get("sink_logits"),
        **{"splits": case.splits} | choices,
    )


def expect(case, view, query, mask, options, roundings):
    """Attention in float64 and its error budgets."""
    if mask is None and case.queries > 1:
        mask = torch.ones(case.queries, view.length, dtype=torch.bool, device=query.device)
        mask = mask.tril(view.length - case.queries)[None, None]
    return attention(query, *exact_parts(view), mask, query.shape[-1] ** -0.5, roundings, **options)


def compare(case, compute):
    """Shares of the error budgets that the kernels take when they compute in so and so, from float32."""
    from tq_kernels.decode.plan import Path

    view, query = case.view(), case.query()
    mask, options = case.make_mask(view.length), case.make_options()
    roundings = replace(Roundings.of_reference(torch.float32), operand=torch.finfo(compute).eps / 2)
    out, lse = run_kernel(case, view, query, mask, options, path=Path(compute))
    return ratios(out, lse, expect(case, view, query, mask, options, roundings))


def interpret(*names):
    torch.set_num_threads(1)
    for name in names:
        for compute in (torch.float32, torch.float16)[: 1 + (name in ("e5m2", "all"))]:
            print_line(name, str(compute), *compare(CASES[name], compute))


# Preset, residual length, lengths of the chunks: packed and ring, ring alone, one that has wrapped, all exact.
STATIC = (("tq4", 64, (100,)), ("3bit_nc", 128, (60,)), ("k8v4", 64, (200, 1, 1, 90)), ("4bit_nc", 512, (300,)))


def static_storage(preset, residual_length, chunks, device="cpu", dtype=torch.float32, dim=64):
    generator = seeded(0)
    storage = PreallocatedStorage(PRESETS[preset], residual_length, 400, "reference")
    for tokens in chunks:
        keys, values = (torch.randn(2, 2, tokens, dim, generator=generator).to(device, dtype) for _ in range(2))
        storage.append(keys + 0.3, values - 0.3)
    return storage


LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}  # of the relative error, whatever the budget


def compare_static(preset, residual_length, chunks, device="cpu", dtype=torch.float32):
    """Shares of the error budget of attention over a preallocated layer, without and with a padding mask."""
    from tq_cache.backends.triton import attend_preallocated

    storage = static_storage(preset, residual_length, chunks, device, dtype)
    query = torch.randn(2, 8, 1, 64, generator=seeded(1)).to(device, dtype)
    padding = torch.arange(400, device=device) >= torch.tensor([[0], [37]], device=device)
    view, found = storage.view(), []
    for mask in (None, padding[:, None, None]):
        seen = None if mask is None else mask[..., : view.length]
        expected = attention(query, *exact_parts(view), seen, 0.125, Roundings.of_kernels(dtype, float8=True))
        out = attend_preallocated(query, storage.states, mask, 0.125)
        found += (*ratios(out, expected.lse, expected), relative_error(out, expected.out) / LIMITS[dtype])
    return found


def compare_exact(tokens, queries, device="cpu", dtype=torch.float32):
    """Shares of the error budgets of attention where nothing is packed; causal, then with a mask."""
    from tq_cache.backends.triton import attend

    generator = seeded(0)
    shapes = ((2, 8, queries, 64), (2, 2, tokens, 64), (2, 2, tokens, 48))
    query, keys, values = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    causal = torch.ones(queries, tokens, dtype=torch.bool, device=device).tril(tokens - queries)
    mask = causal & (torch.arange(tokens, device=device) >= torch.tensor([0, 3], device=device)[:, None, None, None])
    found = []
    for given, seen in ((None, causal), (mask, mask)):
        expected = attention(query, keys, values, seen, 0.125, Roundings.of_kernels(dtype))
        out, lse = attend(query, KVView(keys, values), given, 0.125)
        found += (*ratios(out, lse, expected), relative_error(out, expected.out) / LIMITS[dtype])
    return found


def compare_lengths(*lengths):
    """Shares of the error budgets of sequences of which so many packed tokens count, each by itself."""
    case = Case("tq4", batch=len(lengths), tail=20)
    view, query = case.view(), case.query()
    out, lse = run_kernel(case, view, query, None, {}, lengths=torch.tensor(lengths, dtype=torch.int32))
    found = []
    for row, length in enumerate(lengths):
        this = slice(row, row + 1)
        alone = map_tensors(view, lambda x, this=this: x[this])
        alone = replace(alone, packed_length=min(length, case.tokens))
        expected = expect(case, alone, query[this], None, {}, Roundings.of_kernels(torch.float32))
        found += ratios(out[this], lse[this], expected)
    return found


EXACT = ((1, 1), (70, 1), (70, 5))
LENGTHS = (0, 70, 999)  # of 192 tokens


def interpret_static():
    torch.set_num_threads(1)
    for case in STATIC:
        print_line(case[0], *compare_static(*case))
    for tokens, queries in EXACT:
        print_line(f"exact {tokens}", *compare_exact(tokens, queries))
    print_line("lengths", *compare_lengths(*LENGTHS))


def test_interpreted_static_layer_equals_reference():
    lines = run_script(__file__, "interpret_static", interpret=True)
    names = [case[0] for case in STATIC] + [f"exact {tokens}" for tokens, _ in EXACT] + ["lengths"]
    assert [line[0] for line in lines] == names
    assert all(share <= 1 for line in lines for share in line[1:]), lines


def check_interpreted(names):
    lines = run_script(__file__, "interpret", *names, interpret=True)
    assert {line[0] for line in lines} == set(names)
    for line in lines:
        assert all(share <= 1 for share in line[2:]), line


def test_interpreted_equals_reference():
    check_interpreted(FAST)


@pytest.mark.slow
def test_interpreted_equals_reference_in_all_cases():
    check_interpreted([name for name in CASES if name not in FAST])


# --- Compiled ---------------------------------------------------------------------------------------------------------

PAIRS = (("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2"), ("fp8_e4m3", "uniform4"), ("nc4", "uniform4"),
         ("nc3", "uniform3"), ("tq2", "tq2"))  # fmt: skip


def compile_all(target, *dtypes):
    for dtype in dtypes:
        # One architecture of each way to compute meets every pair of formats; the others meet one per dtype.
        every = dtype == "bf16" and len(dtypes) > 1 and target in ("sm_80", "sm_90", "gfx942")
        own = {"bf16": PAIRS[2:3], "fp16": PAIRS[4:5], "fp32": PAIRS[0:1]}[dtype]
        for key, value in PAIRS if every else own:
            print_line(dtype, key, value, *_compile(target, dtype, FORMATS["key"][key], FORMATS["value"][value]))


def problems(target, dtype, key, value):
    """Decode problems that switch on everything between them: growing, preallocated (with a rotation by a matrix, if
    there is one), and nothing packed."""
    from tq_kernels.decode.plan import Problem

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
        ends, heads = (empty(2, 2, 4, dim), empty(2, 2, 4, dim)), 2 * (2 if value.bits == 4 else 4)
        return dict(sinks=ends, softcap=2.0, s_aux=empty(1, heads, queries))

    yield problem(
        128, 2, 40, **more(2), mask=empty(1, 1, 2, 300, dtype=torch.bool), lengths=empty(2, dtype=torch.int32)
    )
    yield problem(
        96, 1, 192, mask=empty(2, 1, 1, 448, dtype=torch.bool), total=empty(dtype=torch.int64), residual_length=128
    )
    yield problem(128, 2, 1000, packed=0, **more(2))  # causal


def _compile(target, dtype, key, value):
    """Of every kernel that `problems` launch: name, warps, limit of registers; and whether packed tokens go through the
    fp8 tensor cores."""
    from tq_kernels.decode.plan import prepare

    compiled, fp8 = [], False
    for problem in problems(target, dtype, key, value):
        for launch in prepare(problem)[0]:
            made = compile_launch(launch, target)
            name, limit = launch.program.kernel.__name__, None
            if target.startswith("sm"):
                limit = re.search(r"\.maxnreg (\d+)", made.asm["ptx"])
            compiled.append((name, made.metadata.num_warps, limit and int(limit[1])))
            if name == "decode_kernel" and target.startswith("sm"):
                fp8 = fp8 or "e4m3" in made.asm["ptx"] and "mma" in made.asm["ptx"]
                if launch.program.constants["PATH"][0]:
                    assert check_neighbours(made.asm["ttgir"]) >= (min(key.bits, value.bits) < 8)
    return compiled, fp8


def check_neighbours(ttgir):
    """Assert that codes are decoded four neighbours of a row at a time; returns in how many layouts they are.

    The assembly of `primitives` looks at four bytes at once, those in registers 0 to 3 of a layout.
    """
    decoded = [line for line in ttgir.splitlines() if "elementwise_inline_asm" in line and "prmt" in line]
    names = {re.search(r"-> tensor<\d+x\d+xi8, (#\w+)>", line)[1] for line in decoded}
    definitions = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    for layout in map(definitions.__getitem__, names):
        blocked = re.search(r"sizePerThread = \[1, (\d+)\].* order = \[1, 0\]", layout)
        assert "register = [[0, 1], [0, 2]" in layout or int(blocked[1]) % 4 == 0, layout
    return len(names)


def check_compiled(target, *dtypes):
    lines = run_script(__file__, "compile", target, *dtypes)
    assert {line[0] for line in lines} == set(dtypes)
    names = {name for line in lines for name, *_ in line[3]}
    assert names >= {"decode_kernel", "decode_exact_kernel", "decode_merge_kernel"}
    if target == "sm_90":  # 16-bit queries go to the fp8 tensor cores
        assert all(fp8 == (dtype != "fp32") for dtype, key, _, _, fp8 in lines if "e5" not in key)
        for dtype, *_, compiled, _ in lines:
            limits = {limit for name, _, limit in compiled if name == "decode_kernel"}
            assert (None in limits) == (dtype == "fp32")  # `tuning.Config.registers`
            warps = {warps for name, warps, _ in compiled if name == "decode_exact_kernel"}
            assert warps == {8 if dtype == "fp32" else 4}  # `tuning.exact_warps`


@pytest.mark.parametrize(("target", "dtype"), [("sm_90", "fp16"), ("gfx942", "bf16")])
def test_compiles(target, dtype):
    check_compiled(target, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for_every_dtype_and_format(target):
    check_compiled(target, *DTYPES)


def test_the_path_is_that_of_the_architecture_table():
    pytest.importorskip("triton")
    from tq_kernels.decode.plan import choose_path

    from tq_cache.backends.hardware import ARCHITECTURES, FP8_DOT

    for name, (backend, arch, _) in TARGETS.items():
        path = choose_path(torch.bfloat16, divmod(arch, 10) if backend == "cuda" else None)
        assert (path.compute == torch.float8_e4m3fn) == (ARCHITECTURES[name].decode_path == FP8_DOT), name
    assert set(TARGETS) == set(ARCHITECTURES) - {"cpu"}


# --- On CUDA ----------------------------------------------------------------------------------------------------------

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_error_budget(name, dtype):
    """The error is what the roundings of the kernels come to, against float64; no other attention is asked."""
    case, dtype = CASES[name], DTYPES[dtype]
    view, query = case.view("cuda", dtype), case.query("cuda", dtype)
    mask, options = case.make_mask(view.length, "cuda"), case.make_options("cuda")
    out, lse = run_kernel(case, view, query, mask, options)
    assert_within(out, lse, expect(case, view, query, mask, options, Roundings.of_kernels(dtype, float8=True)))


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("case", STATIC, ids=lambda case: f"{case[0]}-{case[1]}")
def test_static_layer_on_cuda(case):
    assert max(compare_static(*case, "cuda", torch.bfloat16)) <= 1


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize(("tokens", "queries"), [*EXACT, (5000, 1), (40000, 16), (3000, 100)])
def test_nothing_packed_on_cuda(tokens, queries):
    assert max(compare_exact(tokens, queries, "cuda", torch.bfloat16)) <= 1


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("preset", PRESETS)
def test_finds_one_key_among_131072(preset):
    """A needle: one key that matches the query, the rest noise; its value comes out to 1e-2."""
    tokens, place, generator = 131072, 54321, seeded(0, "cuda")
    keys = torch.randn(1, 2, tokens, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    values = torch.randn(1, 2, tokens, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
    storage = GrowingStorage(PRESETS[preset], 128, 0, "reference")
    storage.append(keys, values)
    view = storage.view()
    query = 2.0 * keys[:, :, [place]].repeat_interleave(4, dim=1)
    expected, _ = reference.attend(query.double(), view, None, 128**-0.5)
    out, _ = run_kernel(Case(preset, splits=None), view, query, None, {})
    assert relative_error(out, expected) < 1e-2
    assert relative_error(expected, reference.dequantize(view.value, view.packed_length, torch.float64)[:, :, [place]]
                          .repeat_interleave(4, dim=1)) < 0.2  # the needle decides  # fmt: skip


@pytest.mark.gpu
@on_cuda
def test_offsets_beyond_32_bits():
    """Packed states of more than 2**31 bytes, of which the last sequence is looked at."""
    case = Case("fp8_e4m3", tokens=1024, dim=128, heads=8, batch=2)
    view, query = case.view("cuda", torch.bfloat16), case.query("cuda", torch.bfloat16)
    expected, _ = run_kernel(case, view, query, None, {})
    many, blocks = 1040, 2048 * 1024 // (8 * 128 * 64)
    states = []
    for part in (view.key, view.value):
        packed = part.packed.new_zeros(many, 8, 2 * blocks, 64 * 128)
        packed[-2:, :, : part.packed.shape[2]] = part.packed
        scale = part.calibration.scale.new_ones(many, 8, 1, 1)
        scale[-2:] = part.calibration.scale
        states.append(replace(part, packed=packed, calibration=replace(part.calibration, scale=scale)))
    assert states[0].packed.numel() > 2**31
    tails = (view.tail_keys.new_zeros(many, 8, 0, 128), view.tail_values.new_zeros(many, 8, 0, 128))
    wide = query.new_zeros(many, *query.shape[1:])
    wide[-2:] = query
    out, _ = run_kernel(
        case, replace(view, keys=tails[0], values=tails[1], key=states[0], value=states[1]), wide, None, {}
    )
    assert relative_error(out[-2:], expected) < 1e-2


if __name__ == "__main__":
    {"interpret": interpret, "interpret_static": interpret_static, "compile": compile_all}[sys.argv[1]](*sys.argv[2:])
