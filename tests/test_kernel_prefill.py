"""The prefill kernels: in Triton's interpreter against `reference.attend`, compiled for every target, and on CUDA.

`python tests/test_kernel_prefill.py interpret NAME ...` and `... compile TARGET FULL` print a line per case.
"""

import math
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from error_budget import Expected, Roundings, assert_within, attention, exact_parts, ratios, seeded
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

from tq_cache.backends import quantizers
from tq_cache.backends.calibration import calibrate
from tq_cache.formats.presets import resolve_preset
from tq_cache.formats.states import KVView, PackedStates

FORMATS = ("fp8_e4m3", "fp8_e5m2", "k8v4", "4bit_nc", "k3v4_nc", "3bit_nc", "tq4", "tq3", "tq2")


@dataclass(frozen=True)
class Case:
    """A view of a cache, queries for it, and what attention is asked to do."""

    preset: str = "tq4"
    packed: int = 100
    exact: int = 25
    sinks: int = 0
    queries: int = 18
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    value_dim: int | None = None
    mask: str = ""  # "bool" or "float", random; or "padding" or "float padding", causal
    softcap: float | None = None
    s_aux: bool = False
    causal: bool = True
    segments: bool | None = None
    tokens: int | None = None  # of a tile of packed tokens
    splits: int | None = None

    def view(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> KVView:
        generator = seeded(self.packed, device)

        def random(tokens, width):
            x = torch.randn(self.batch, self.kv_heads, tokens, width, generator=generator, device=device)
            return (x * (1 + torch.arange(width, device=device) / width) + 0.5).to(dtype)

        chosen, widths, states = resolve_preset(self.preset), (self.dim, self.value_dim or self.dim), (None, None)
        if self.packed:
            states = [
                self._pack(role, chosen, random(self.packed, width).float())
                for role, width in zip(("key", "value"), widths, strict=True)
            ]
        ends = [random(tokens, width) for tokens in (self.exact, self.sinks) for width in widths]
        return KVView(*ends[:2], self.packed, *states, *(ends[2:] if self.sinks else (None, None)))

    def _pack(self, role, chosen, x):
        fmt, smooth = (chosen.key, chosen.smooth) if role == "key" else (chosen.value, 0.0)
        counts = torch.ones(self.batch, 1, self.packed, 1, dtype=torch.bool, device=x.device)
        calibration = calibrate(x, fmt, chosen.center, smooth, counts)
        states = PackedStates.empty(role, fmt, x, -(-self.packed // 64) * 64, calibration)
        quantizers.store(states, x, 0)
        return states

    def query(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
        shape = (self.batch, self.heads, self.queries, self.dim)
        return torch.randn(shape, generator=seeded(1, device), device=device).to(dtype)

    def options(self, length: int, device: str = "cpu") -> dict:
        """Keywords of `reference.attend`; with a mask, some queries see no packed token, or no token at all."""
        generator, mask, s_aux = seeded(2, device), None, None
        if self.mask == "bool":
            mask = torch.randn(self.batch, 1, self.queries, length, generator=generator, device=device) > -0.5
            mask[0, 0, 0], mask[0, 0, 1, : self.sinks + self.packed] = False, False
        elif self.mask == "float":
            mask = torch.randn(1, self.heads, self.queries, length, generator=generator, device=device)
        elif self.mask:
            token = torch.arange(length, device=device)
            starts = torch.linspace(0, length - self.queries // 2, self.batch, device=device)
            mask = (token <= token[-self.queries :, None]) & (token >= starts[:, None, None, None])
            mask = torch.where(mask, 0.0, -torch.inf) if self.mask == "float padding" else mask
        if self.s_aux:
            s_aux = torch.linspace(-1, 3, self.heads, device=device)[None, :, None]
        return dict(mask=mask, softcap=self.softcap, sink_logits=s_aux, is_causal=self.causal)


CASES = {
    "everything": Case(dim=80, packed=70, sinks=4, mask="bool", softcap=5.0, s_aux=True),
    "float8": Case("fp8_e4m3", packed=70),
    "splits": Case("k8v4", packed=200, splits=2),
    "segments": Case("4bit_nc", packed=200, segments=True),
    "many segments, centre": Case("tq3", packed=842, batch=1, segments=True, sinks=2, s_aux=True),
    "e5m2": Case("fp8_e5m2", mask="float", softcap=2.0),
    "two blocks": Case("3bit_nc", packed=150, causal=False, tokens=128),
    "widths": Case("tq_k3v2", dim=96, value_dim=64, sinks=4, mask="float", tokens=128),
    "four blocks": Case("tq2", packed=300, s_aux=True, tokens=256),
    "wide": Case("tq4", packed=64, dim=144, value_dim=256, batch=1, heads=2, kv_heads=1),
    "padding": Case("4bit_nc", packed=200, exact=30, sinks=2, queries=20, batch=3, heads=2, kv_heads=1, mask="padding"),
    "float padding": Case("tq4", packed=130, queries=25, batch=3, mask="float padding", splits=2, dim=48),
    "nothing packed": Case("tq4", packed=0, sinks=3),
    "one token": Case("k3v4_nc", packed=1, queries=1, exact=1, heads=7, kv_heads=1),
}
FAST = ("everything", "float8", "segments", "padding", "nothing packed")


def run_kernel(case: Case, query: torch.Tensor, view: KVView, *, mask, softcap, sink_logits, is_causal):
    """`prefill` on a view, as the sheet of operations calls it."""
    from tq_kernels.prefill.problem import prefill

    from tq_cache.backends.triton import states_of

    return prefill(
        query,
        *(None if states is None else states_of(states) for states in (view.key, view.value)),
        view.tail_keys,
        view.tail_values,
        packed_length=view.packed_length,
        scaling=query.shape[-1] ** -0.5,
        sinks=None if view.sink_keys is None else (view.sink_keys, view.sink_values),
        mask=mask,
        softcap=softcap,
        s_aux=sink_logits,
        causal=is_causal,
        segments=case.segments,
    )


def expect(query: torch.Tensor, view: KVView, *, mask, softcap, sink_logits, is_causal) -> Expected:
    """Attention in float64 and its error budgets."""
    if mask is None and is_causal:
        mask = torch.ones(query.shape[2], view.length, dtype=torch.bool, device=query.device)
        mask = mask.tril(view.length - query.shape[2])[None, None]
    roundings = Roundings.of_kernels(query.dtype)
    return attention(query, *exact_parts(view), mask, query.shape[-1] ** -0.5, roundings, softcap, sink_logits)


# --- Interpreted ------------------------------------------------------------------------------------------------------


def interpret(*names: str) -> None:
    """Prints the shares of the error budgets that the kernels take, in float32."""
    from tq_kernels.prefill import problem as prefill

    torch.set_num_threads(1)
    prefill.SEGMENT, prefill.SEGMENT_UNIT, prefill.QUERY_UNIT = 128, 64, 16
    prefill._cudnn_attention = _plain_attention
    choose_splits = prefill._choose_splits
    for name in names:
        case = CASES[name]
        prefill._choose_packed = lambda _, tokens=case.tokens: prefill.Config(16, tokens or 64, 4)
        prefill._choose_splits = (lambda *_, splits=case.splits: splits) if case.splits else choose_splits
        query, view = case.query(), case.view()
        options = case.options(view.length)
        print_line(name, *ratios(*run_kernel(case, query, view, **options), expect(query, view, **options)))


def _plain_attention(query, keys, values):
    """What `prefill._cudnn_attention` computes."""
    scores = query.unflatten(1, (keys.shape[1], -1)) @ keys[:, :, None].mT * math.log(2)
    return (scores.softmax(-1) @ values[:, :, None]).flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)


def check_interpreted(names) -> None:
    lines = run_script(__file__, "interpret", *names, interpret=True)
    assert {line[0] for line in lines} == set(names)
    for name, *shares in lines:
        assert all(share <= 1 for share in shares), (name, *shares)


def test_interpreted_equals_reference():
    check_interpreted(FAST)


@pytest.mark.slow
def test_interpreted_equals_reference_in_all_cases():
    check_interpreted([name for name in CASES if name not in FAST])


# --- Compiled ---------------------------------------------------------------------------------------------------------


# Preset, dtype, and what is asked for; in float32 everything.
COMPILED = [("4bit_nc", "bf16", {}), ("tq4", "bf16", dict(mask=True)), ("3bit_nc", "bf16", dict(segments=True))]
ALL_COMPILED = [
    *COMPILED,
    ("tq4", "fp32", dict(mask=True, softcap=3.0, s_aux=True)),
    ("tq4", "fp16", dict(softcap=3.0)),
    ("3bit_nc", "fp16", {}),
    ("tq2", "fp32", {}),
    ("fp8_e4m3", "bf16", dict(s_aux=True)),
    ("fp8_e5m2", "fp32", {}),
    *((preset, "bf16", dict(segments=True)) for preset in ("k8v4", "tq2", "fp8_e5m2")),
]


def compile_all(target: str, full: str) -> None:
    for preset, dtype, options in ALL_COMPILED if full == "full" else COMPILED:
        names = _compile(target, resolve_preset(preset), DTYPES[dtype], **options)
        print_line(preset, dtype, list(options), names)


def _compile(target, preset, dtype, mask=False, softcap=None, s_aux=False, segments=False) -> list[str]:
    """Compiles all that a prefill launches, and returns the names; on GPUs other than an H200 with small heads.

    What a target can convert and multiply does not depend on the size of heads, and what compiling takes does.
    """
    from tq_kernels.prefill import problem as prefill

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    dim, queries, packed = 128 if target == "sm_90" else 32, 100, 2112 if segments else 256
    states = (empty_states(role, fmt, dim, packed, preset.center) for role, fmt in
              (("key", preset.key), ("value", preset.value)))  # fmt: skip
    tail, sinks = empty(2, 2, queries + 20, dim), 4 if mask else 0
    given = empty(2, 8, queries, packed + queries + 20, dtype=torch.uint8) if mask else None
    problem = prefill.Problem(
        device_of(target), empty(2, 8, queries, dim), *states, tail, tail, packed, sinks, queries, 0.1, softcap, given
    )
    plain, prefill._cudnn_attention = prefill._cudnn_attention, _no_attention
    with recorded_launches() as launches:
        prefill.attend(problem, empty(1, 8, 1) if s_aux else None, True, segments)
    prefill._cudnn_attention = plain
    for launch in launches:
        compile_launch(launch, target)
    return [launch.program.kernel.__name__ for launch in launches]


def _no_attention(query, keys, values):
    """What `prefill._cudnn_attention` returns, but for the numbers."""
    return query.new_empty(*query.shape[:3], values.shape[3]), query.new_empty(query.shape[:3], dtype=torch.float32)


@pytest.mark.parametrize("target", ["sm_90"])
def test_compiles(target):
    check_compiled(target, "few")


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for_every_target(target):
    check_compiled(target, "full")


def check_compiled(target, full) -> None:
    lines = run_script(__file__, "compile", target, full)
    assert {name for *_, names in lines for name in names} == {
        "prefill_query_kernel", "_prefill_packed_kernel", "unpack_kernel", "prefill_merge_kernel",
        "_prefill_exact_kernel", "_mask_tiles_kernel",
    }  # fmt: skip


# --- Refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(exact=10), "expected the 18 tokens of the queries among the exact ones, got 10"),
        (dict(dim=272), "expected a head_dim of at most 256, got 272"),
        (dict(heads=3), "H_q a multiple of H_kv"),
    ],
)
def test_refuses_shapes(changes, message):
    pytest.importorskip("triton")
    case = replace(Case(), **changes)
    view = case.view()
    with pytest.raises(ValueError, match=message):
        run_kernel(case, case.query(), view, **case.options(view.length))


def test_refuses_what_does_not_fit():
    pytest.importorskip("triton")
    case = Case(packed=64)
    view = case.view()
    options = case.options(view.length)
    with pytest.raises(ValueError, match="expected room for 65 tokens"):
        run_kernel(case, case.query(), replace(view, packed_length=65), **options)
    with pytest.raises(ValueError, match="expected a mask .* 18, 89 or more"):
        mask = torch.ones(1, 1, 18, 88, dtype=torch.bool)
        run_kernel(case, case.query(), view, **options | dict(mask=mask))
    with pytest.raises(ValueError, match="no softcap with segments=True"):
        run_kernel(replace(case, segments=True), case.query(), view, **options | dict(softcap=1.0))
    with pytest.raises(ValueError, match="of one dtype"):
        run_kernel(case, case.query().half(), view, **options)
    with pytest.raises(ValueError, match="expected packed keys"):
        run_kernel(case, case.query(), replace(view, key=None), **options)


# --- On CUDA ----------------------------------------------------------------------------------------------------------

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_cudnn = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs Hopper's cuDNN attention"
)
BIG = Case(heads=8, queries=300, dim=128, packed=5096, exact=400)


def check_on_gpu(case: Case, dtype: torch.dtype = torch.bfloat16) -> None:
    """The error is what the roundings of the kernels come to, against float64; no other attention is asked."""
    query, view = case.query("cuda", dtype), case.view("cuda", dtype)
    options = case.options(view.length, "cuda")
    assert_within(*run_kernel(case, query, view, **options), expect(query, view, **options))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("preset", FORMATS)
def test_tiles(preset, dtype):
    check_on_gpu(replace(BIG, preset=preset, segments=False), DTYPES[dtype])


@pytest.mark.gpu
@on_gpu
@needs_cudnn
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("preset", FORMATS)
def test_segments(preset, dtype, monkeypatch):
    monkeypatch.setattr("tq_kernels.prefill.SEGMENT", 2048)
    check_on_gpu(replace(BIG, preset=preset, segments=True), DTYPES[dtype])


@pytest.mark.gpu
@on_gpu
@needs_cudnn
def test_more_segments_than_are_merged_at_a_time(monkeypatch):
    monkeypatch.setattr("tq_kernels.prefill.SEGMENT", 2048)
    check_on_gpu(replace(BIG, packed=6 * 2048 + 70, segments=True))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    case = CASES[name]
    check_on_gpu(replace(case, queries=70, exact=90, packed=case.packed and 2348))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dim, value_dim", [(64, 64), (80, 80), (96, 64), (256, 256), (192, 128)])
@pytest.mark.parametrize("preset", ["fp8_e4m3", "4bit_nc", "tq3"])
def test_head_dims(preset, dim, value_dim):
    check_on_gpu(Case(preset, dim=dim, value_dim=value_dim, queries=300, packed=3000, exact=400))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("preset", ["fp8_e4m3", "tq3"])
def test_wide_float32(preset):
    check_on_gpu(Case(preset, dim=256, queries=40, packed=300, exact=50), torch.float32)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("heads, kv_heads", [(7, 7), (14, 2), (16, 1)])
def test_groups(heads, kv_heads):
    check_on_gpu(Case("tq4", heads=heads, kv_heads=kv_heads, dim=128, packed=3000, queries=33, exact=40))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("segments", [False, pytest.param(True, marks=needs_cudnn)])
@pytest.mark.parametrize("dim", [128, 256])
def test_runs_are_equal(dim, segments):  # a merge in place once was a race
    case = Case("tq4", dim=dim, queries=300, packed=3000, exact=400, segments=segments)
    query, view = case.query("cuda", torch.bfloat16), case.view("cuda", torch.bfloat16)
    first, *others = (run_kernel(case, query, view, **case.options(view.length, "cuda"))[0] for _ in range(10))
    assert all(torch.equal(first, other) for other in others)


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]](*sys.argv[2:])
