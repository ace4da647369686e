"""The prefill kernels: in Triton's interpreter and on a CUDA device against the reference, and compiled for every GPU.

`python tests/test_kernel_prefill.py interpret CASE ...` and `... compile TARGET KERNEL ...` are what the tests start:
the interpreter is chosen when Triton is imported, and each target needs a process of its own (Triton 3.6 leaks
conversions of the first target into later ones).
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "kernels"))  # where the package is not installed
TARGETS = {f"sm_{arch}": ("cuda", arch, 32) for arch in (70, 75, 80, 86, 89, 90, 100, 120)} | {
    name: ("hip", name, 64 if name.startswith("gfx9") else 32)
    for name in ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
}
PRESETS = ("fp8_e4m3", "fp8_e5m2", "k8v4", "4bit_nc", "3bit_nc", "tq4", "tq3", "tq2")

# What differs from `make_case`'s defaults, and from (16, 64, 1 warp, 1 stage, 1 split).
CASES = {
    "everything": dict(preset="tq4", dim=80, sinks=4, mask="bool", softcap=5.0, s_aux=True, packed=70),
    "float8": dict(preset="fp8_e4m3", packed=70),
    "splits": dict(preset="k8v4", packed=200, config=(16, 64, 4, 1, 3)),
    "segments": dict(preset="4bit_nc", packed=200, segments=True),
    "e5m2": dict(preset="fp8_e5m2", mask="add", softcap=2.0),
    "two blocks": dict(preset="3bit_nc", packed=150, config=(16, 128, 4, 1, 1), causal=False),
    "widths": dict(preset="tq_k3v2", dim=96, value_dim=64, sinks=4, mask="add", config=(16, 128, 4, 1, 1)),
    "four blocks": dict(preset="tq2", packed=300, config=(16, 256, 4, 1, 1), s_aux=True),
    "segments, centre": dict(preset="tq3", packed=330, segments=True, sinks=2, s_aux=True),
}
FAST = ("everything", "segments")


# -------------------------------------------------------------------------------------------------- shared by all


def make_case(
    preset="tq4", batch=2, heads=4, kv_heads=2, queries=18, dim=32, value_dim=None, packed=100, exact=25, sinks=0,
    mask=None, softcap=None, s_aux=False, causal=True, dtype=torch.float32, device="cpu", seed=0,
):  # fmt: skip
    """Arguments of `reference.attend`: query, view, mask, and keywords."""
    from tq_cache import quantizers
    from tq_cache.parts import KVView, PackedStates
    from tq_cache.presets import resolve_preset

    generator = torch.Generator(device).manual_seed(seed)
    chosen, value_dim, states = resolve_preset(preset), value_dim or dim, []

    def random(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    counts = torch.ones(batch, 1, packed, 1, dtype=torch.bool, device=device)
    for role, fmt, width, smooth in (("key", chosen.key, dim, chosen.smooth), ("value", chosen.value, value_dim, 0.0)):
        x = random(batch, kv_heads, packed, width) * (1 + torch.arange(width, device=device) / width) + 0.5
        calibration = quantizers.calibrate(x, fmt, chosen.center, smooth, counts)
        states.append(PackedStates.empty(role, fmt, x, -(-packed // 64) * 64, calibration))
        quantizers.store(states[-1], x, 0)
    ends = [(random(batch, kv_heads, n, dim).to(dtype), random(batch, kv_heads, n, value_dim).to(dtype))
            for n in (exact, sinks)]  # fmt: skip
    view = KVView(*ends[0], packed, *states, *(ends[1] if sinks else (None, None)))
    query = random(batch, heads, queries, dim).to(dtype)
    if mask == "bool":
        mask = random(batch, 1, queries, view.length) > -0.5
        mask[0, 0, 0] = False
    elif mask == "add":
        mask = random(1, heads, queries, view.length)
    extra = random(1, heads, 1) if s_aux else None
    return query, view, mask, dict(softcap=softcap, sinks=extra, is_causal=causal)


def run_kernel(query, view, mask, *, softcap, sinks, is_causal, config=None, segments=None):
    """The kernels on what `reference.attend` takes."""
    from tq_kernels import prefill

    from tq_cache.rotation import rotation_matrix

    def code(fmt):
        if fmt.float8 is not None:
            return 8, ((5, 2) if fmt.float8 == torch.float8_e5m2 else (4, 3))
        from tq_kernels.decode import code_table

        return fmt.bits, code_table(fmt.codebook.magnitudes)

    def flat(x):
        return None if x is None else x.flatten(2).contiguous()

    def factors(states):
        scale = states.calibration.scale.flatten(1) if states.scale is None else states.scale
        return tuple(x for x in (states.packed, scale, states.zero) if x is not None)

    def rotation(states):
        return rotation_matrix(states.head_dim, query.device, torch.float32) if states.format.rotated else None

    key, value = view.key, view.value
    return prefill.prefill(
        query, factors(key), factors(value), view.keys, view.values, packed_length=view.packed_length,
        scaling=query.shape[-1] ** -0.5, key_code=code(key.format), value_code=code(value.format),
        sinks=None if view.sink_keys is None else (view.sink_keys, view.sink_values),
        smooth=flat(key.calibration.smooth), rotations=(rotation(key), rotation(value)),
        centers=(flat(key.calibration.center), flat(value.calibration.center)), mask=mask, softcap=softcap,
        s_aux=sinks, causal=is_causal, segments=segments, config=None if config is None else prefill.Config(*config),
    )  # fmt: skip


def reference(query, view, mask, dtype=None, **keywords):
    from tq_cache import reference
    from tq_cache.parts import KVView

    if dtype is not None:
        ends = (view.keys, view.values, view.sink_keys, view.sink_values)
        keys, values, sink_keys, sink_values = (None if x is None else x.to(dtype) for x in ends)
        view = KVView(keys, values, view.packed_length, view.key, view.value, sink_keys, sink_values)
        query = query.to(dtype)
    return reference.attend(query, view, mask, query.shape[-1] ** -0.5, **keywords)


# --------------------------------------------------------------------------------------------------- subprocesses


def start(*arguments: str, **environment: str) -> dict:
    """What this file, run as a script, prints as JSON."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        env=os.environ | dict(PYTHONPATH=paths, OMP_NUM_THREADS="1") | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def interpret(names: list[str]) -> dict[str, list[float]]:
    """Largest differences of output and log-sum-exp from the reference, float32."""
    from tq_kernels import prefill

    prefill.SEGMENT, prefill.SEGMENT_UNIT, prefill.QUERY_UNIT = 128, 64, 16
    prefill._cudnn_attention = _plain_attention
    errors = {}
    for name in names:
        parameters = dict(CASES[name])
        launch = dict(config=parameters.pop("config", (16, 64, 4, 1, 1)), segments=parameters.pop("segments", None))
        query, view, mask, keywords = make_case(**parameters)
        want, got = reference(query, view, mask, **keywords), run_kernel(query, view, mask, **keywords, **launch)
        assert torch.equal(want[1].isinf(), got[1].isinf())
        errors[name] = [(a - b).nan_to_num(math.inf if i == 0 else 0.0).abs().max().item()
                        for i, (a, b) in enumerate(zip(want, got, strict=True))]  # fmt: skip
    return errors


def _plain_attention(query, keys, values):
    scores = query.unflatten(1, (keys.shape[1], -1)) @ keys[:, :, None].mT * math.log(2)
    return (scores.softmax(-1) @ values[:, :, None]).flatten(1, 2), scores.logsumexp(-1).flatten(1, 2)


def compile_all(target: str, kernels: list[str]) -> dict[str, int]:
    """Bytes of each kernel's binary, by name, format and dtype."""
    return {name: len(_compile(TARGETS[target], *name.split("/"))) for name in kernels}


def _compile(target, kernel, preset, dtype):
    """The binary of a kernel of `prefill` for the formats of a preset and a query dtype (bf16, fp16, fp32)."""
    import triton
    from tq_kernels import prefill
    from tq_kernels.decode import code_table
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tq_cache.presets import resolve_preset

    chosen, nvidia = resolve_preset(preset), target[0] == "cuda"
    codes, sides = [], []
    for fmt in (chosen.key, chosen.value):
        codes.append((fmt.bits, code_table(fmt.codebook.magnitudes)) if fmt.codebook else (8, (5, 2)) if "e5" in preset
                     else (8, (4, 3)))  # fmt: skip
        sides.append(("*u8", "*fp32" if fmt.bits == 8 else "*fp16") + (("*fp16",) if fmt.has_zero else ()))
    compute, pair, triple = "*fp32" if dtype == "fp32" else "*fp16", ("i32", "i32"), ("i32", "i32", "i32")
    center = "*fp32" if chosen.center else None
    rotation = "*fp32" if chosen.key.rotated else None
    mask = "*u8" if dtype == "fp32" else None
    sizes = ("i32",) * 5
    packed = dict(key=sides[0], value=sides[1])
    codings = dict(DIM=128, VALUE_DIM=128, KEY=codes[0], VALUE=codes[1], MODE=(nvidia, nvidia and target[1] >= 89))
    precision = "tf32x3" if nvidia and target[1] >= 80 else "ieee"
    shared = dict(GROUP=4, PRECISION=precision, M=64)
    mask_strides = ("i32",) * 4
    signature, constants = {
        "query": (
            dict(query="*" + dtype, rotation=rotation, smooth=center, center=center, rotated=compute, offset=center,
                 count="i32", rows="i32", factor="fp32", strides=triple),
            dict(DIM=128, BITS=codes[0][0], **shared),
        ),
        "packed": (
            dict(rotated=compute, offset=center, **packed, mask=mask, partial=compute, partial_lse="*fp32",
                 sizes=sizes, softcap="fp32", strides=(pair, pair, pair, pair, mask_strides)),
            codings | shared | dict(SOFTCAP=mask is not None, N=64),
        ),
        "unpack": (
            packed | dict(keys="*fp16", values="*fp16", first="i32", count="i32", strides=(pair, pair, pair, pair)),
            codings | dict(N=64),
        ),
        "merge": (
            dict(first="*fp16", first_lse="*fp32", second="*fp16", second_lse="*fp32", offset=center, out="*fp16",
                 out_lse="*fp32", rows="i32", strides=(triple, triple)),
            dict(DIM=128, M=32),
        ),
        "exact": (
            dict(query="*" + dtype, keys="*" + dtype, values="*" + dtype, partial=compute, partial_lse="*fp32",
                 rotation=rotation, center=center, mask=mask, s_aux="*" + dtype if mask else None, out="*" + dtype,
                 lse="*fp32", sizes=sizes, splits="i32", factors=("fp32", "fp32"),
                 strides=(triple, triple, triple, mask_strides, triple)),
            dict(DIM=128, VALUE_DIM=128, CAUSAL=mask is None, SOFTCAP=mask is not None, **shared)
            | dict(N=32 if dtype == "fp32" else 64),
        ),
    }[kernel]  # fmt: skip
    function = getattr(prefill, f"_prefill_{kernel}_kernel")
    place = function.arg_names.index
    constants |= {name: None for name, kind in signature.items() if kind is None}
    attributes = {}
    for name, kind in signature.items():  # pointers and strides are multiples of 16, as those of real tensors
        for path, leaf in _leaves(kind, (place(name),)):
            if isinstance(leaf, str) and (leaf[0] == "*" or name == "strides"):
                attributes[path] = [["tt.divisibility", 16]]
    source = ASTSource(
        function,
        signature=signature | {name: "constexpr" for name in constants},
        constexprs={(place(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    options = dict(num_warps=4, num_stages=2)
    binary = triton.compile(source, target=GPUTarget(*target), options=options).asm
    return binary["cubin" if nvidia else "hsaco"]


def _leaves(kind, path):
    if isinstance(kind, tuple):
        for i, item in enumerate(kind):
            yield from _leaves(item, (*path, i))
    else:
        yield path, kind


# ---------------------------------------------------------------------------------------------------------- tests


def test_interpreted_equals_reference():
    check_interpreted(FAST)


@pytest.mark.slow
def test_interpreted_equals_reference_in_all_cases():
    check_interpreted([name for name in CASES if name not in FAST])


def check_interpreted(names):
    for name, (out, lse) in start("interpret", *names, TRITON_INTERPRET="1").items():
        assert out < 3e-6 and lse < 5e-6, name


@pytest.mark.parametrize(
    "target, kernel",
    [("sm_80", "packed/4bit_nc/bf16"), ("sm_90", "packed/fp8_e4m3/bf16"), ("gfx942", "unpack/4bit_nc/bf16")],
)
def test_compiles(target, kernel):
    assert start("compile", target, kernel)[kernel]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_for_every_target(target):
    kernels = [f"{kernel}/{preset}/{dtype}" for kernel in ("packed", "unpack") for preset in PRESETS
               for dtype in ("bf16",)]  # fmt: skip
    kernels += [f"packed/{preset}/fp32" for preset in ("fp8_e4m3", "tq3")] + ["merge/tq4/bf16"]
    kernels += [f"{kernel}/tq4/{dtype}" for kernel in ("query", "exact") for dtype in ("bf16", "fp16", "fp32")]
    assert all(start("compile", target, *kernels).values())


def test_refuses_what_it_cannot_do():
    query, view, mask, keywords = make_case(packed=64, exact=10)
    from tq_kernels.prefill import prefill

    packed = dict(key=(view.key.packed, view.key.scale), value=(view.value.packed, view.value.scale))
    arguments = dict(packed_length=64, scaling=1.0, key_code=(4, (0, 0)), value_code=(4, (0, 0)))
    with pytest.raises(ValueError, match="expected the 18 tokens of the queries among the exact ones, got 10"):
        prefill(query, **packed, keys=view.keys, values=view.values, **arguments)
    with pytest.raises(ValueError, match="expected a packed_length from 1 to 64, .* got 65"):
        prefill(query, **packed, keys=view.keys, values=view.values, **arguments | dict(packed_length=65, causal=False))
    with pytest.raises(ValueError, match="of one dtype"):
        prefill(query.half(), **packed, keys=view.keys, values=view.values, **arguments)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def check_on_gpu(**parameters):
    """The kernels' error against float64 is at most twice that of the reference in the query's own dtype."""
    launch = {name: parameters.pop(name) for name in ("config", "segments") if name in parameters}
    dtype = parameters.get("dtype", torch.bfloat16)
    query, view, mask, keywords = make_case(**dict(dtype=dtype, device="cuda") | parameters)
    exact, exact_lse = reference(query, view, mask, torch.float64, **keywords)
    same = reference(query, view, mask, **keywords)[0]
    out, lse = run_kernel(query, view, mask, **keywords, **launch)
    error, allowed = ((x.double() - exact).norm() / exact.norm() for x in (out, same))
    assert torch.isfinite(out).all()
    assert error <= 2 * max(allowed, 1e-6), (error.item(), allowed.item())
    assert (lse - exact_lse).nan_to_num(0.0).abs().max() < (1e-4 if dtype == torch.float32 else 4e-3)


BIG = dict(heads=8, kv_heads=2, queries=300, dim=128, packed=4096 + 1000, exact=400)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("preset", [*PRESETS, "k3v4_nc"])
def test_tiles(preset, dtype):
    check_on_gpu(preset=preset, dtype=dtype, segments=False, **BIG)


@pytest.mark.gpu
@on_gpu
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs cuDNN")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("preset", [*PRESETS, "k3v4_nc"])
def test_segments(preset, dtype, monkeypatch):
    monkeypatch.setattr("tq_kernels.prefill.SEGMENT", 2048)
    check_on_gpu(preset=preset, dtype=dtype, segments=True, **BIG)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    parameters = dict(queries=70, exact=90) | CASES[name]
    check_on_gpu(
        **parameters | dict(packed=parameters.get("packed", 100) + 2048 if parameters.get("segments") else 300)
    )


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dim, value_dim", [(64, 64), (80, 80), (96, 64), (256, 256), (192, 128)])
@pytest.mark.parametrize("preset", ["fp8_e4m3", "4bit_nc", "tq3"])
def test_head_dims(preset, dim, value_dim):
    check_on_gpu(preset=preset, dim=dim, value_dim=value_dim, queries=300, packed=3000, exact=400)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("preset", ["fp8_e4m3", "tq3"])
def test_wide_float32(preset):
    check_on_gpu(preset=preset, dim=256, value_dim=256, queries=40, packed=300, exact=50, dtype=torch.float32)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("dim", [128, 256])
def test_runs_are_equal(dim, segments):  # a merge in place once was a race
    if segments and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs cuDNN's attention")
    case = make_case("4bit_nc", dim=dim, queries=300, packed=3000, exact=400, dtype=torch.bfloat16, device="cuda")
    first, *others = (run_kernel(*case[:3], **case[3], segments=segments)[0] for _ in range(10))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("heads, kv_heads", [(7, 7), (14, 2), (16, 1)])
def test_groups(heads, kv_heads):
    check_on_gpu(preset="tq4", heads=heads, kv_heads=kv_heads, dim=128, packed=3000, queries=33, exact=40)


if __name__ == "__main__":
    if sys.argv[1] == "interpret":
        print(json.dumps(interpret(sys.argv[2:])))
    else:
        print(json.dumps(compile_all(sys.argv[2], sys.argv[3:])))
