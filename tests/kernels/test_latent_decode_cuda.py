"""Attention to latents on a CUDA device, against float64."""

from dataclasses import replace

import pytest
import torch
from error_budget import Roundings, assert_within, exact_parts, ratios, relative_error, seeded
from kernel_harness import DTYPES
from latent_decode_cases import (
    CASES,
    SCALING,
    STATIC,
    Case,
    Static,
    compare,
    compare_static,
    expect,
    make_queries,
    run_kernel,
    takes_rows,
)
from latent_store_cases import LATENT_FORMATS, ROTARY_FORMATS

from tq_cache.backends import reference
from tq_cache.backends.latents import KVProjection
from tq_cache.storage.growing import GrowingStorage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HALVES = ("bf16", "fp16")


def forms(case, dtype):
    """Both ways to attend to packed tokens, where this GPU has them: tokens as rows are for Hopper."""
    hopper = torch.cuda.get_device_capability() == (9, 0)
    return [False] + [True] * (hopper and dtype != torch.float32 and takes_rows(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_error_budget(name, dtype):
    """The error is what the roundings of the kernels come to, against float64; no other attention is asked."""
    case, dtype = CASES[name], DTYPES[dtype]
    for rows in forms(case, dtype):
        found = compare(case, rows, "cuda", dtype)
        assert max(found) <= 1, (rows, found)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("heads", "queries"), [(16, 1), (16, 3), (20, 2), (40, 1), (128, 1)])
@pytest.mark.parametrize("latent", LATENT_FORMATS)
def test_real_sizes(latent, heads, queries, dtype):
    """As DeepSeek and its kin have them, with as many splits as the launcher chooses."""
    rotary = ROTARY_FORMATS[(LATENT_FORMATS.index(latent) + heads) % len(ROTARY_FORMATS)]
    case = Case(latent, rotary, 512, 64, 4096 + 77, 2, heads, queries, tail=100, sinks=4, splits=None)
    for rows in forms(case, DTYPES[dtype]):
        found = compare(case, rows, "cuda", DTYPES[dtype])
        assert max(found) <= 1, (rows, found)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("latent", LATENT_FORMATS)
def test_sparse_attention_at_real_sizes(latent, heads):
    """2048 of 10,000 tokens, as DeepSeek-V3.2 chooses them."""
    case = Case(latent, "exact", 512, 64, 9900, 2, heads, 2, tail=96, sinks=4, chosen=2048, splits=None)
    found = compare(case, False, "cuda", torch.bfloat16)
    assert max(found) <= 1, found


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", STATIC)
def test_static_layer_on_cuda(name, dtype):
    for rows in forms(STATIC[name], DTYPES[dtype]):
        assert max(compare_static(STATIC[name], rows, "cuda", DTYPES[dtype])) <= 1, rows


def test_the_form_is_chosen():
    """On Hopper tokens are rows of the dots where codes are of 8 or 4 bits and there are few columns.

    Of 8 bits only if packed tokens fill their blocks: what is behind them may be NaN.
    """
    from tq_kernels.launch import Launch

    launched, run = [], Launch.run
    Launch.run = lambda launch: (launched.append(launch.program.kernel.__name__), run(launch))
    try:
        for latent, heads, tokens in (
            ("tq4", 16, 330), ("fp8_e4m3", 40, 320), ("fp8_e4m3", 40, 330), ("tq3", 16, 320), ("tq4", 128, 320)
        ):  # fmt: skip
            case = Case(latent, "int8", 512, 64, tokens, heads=heads)
            view, queries = case.view("cuda", torch.bfloat16), make_queries(case, 1, "cuda", torch.bfloat16)
            launched.clear()
            run_kernel(case, queries, view, None, None, {})
            hopper = torch.cuda.get_device_capability() == (9, 0)
            rows = hopper and latent != "tq3" and heads < 128 and (latent, tokens) != ("fp8_e4m3", 330)
            assert launched == [
                "latent_query_kernel", "latent_rows_kernel" if rows else "latent_kernel", "latent_merge_kernel"
            ]  # fmt: skip
    finally:
        Launch.run = run


@pytest.mark.parametrize(
    ("latent", "rotary", "residual_length", "sinks"),
    [("tq4", "int8", 0, 4), ("tq4", "exact", 64, 1), ("fp8_e4m3", "fp8_e4m3", 64, 4), ("tq3", "int8", 128, 4)],
)
def test_a_captured_step_reads_what_it_wrote(latent, rotary, residual_length, sinks):
    """Update and attention in one CUDA graph, replayed from before the sinks are full through two packings."""
    from tq_cache.backends.triton import attend_latents_preallocated, update_preallocated

    case = Static(latent, rotary, residual_length, sinks, (1,), rank=512, heads=16)
    storage = case.storage("cuda", torch.bfloat16)
    states, generator = storage.states, seeded(3)
    padding = torch.arange(case.most, device="cuda") >= torch.tensor([[0], [1]], device="cuda")
    new = [torch.zeros(2, 1, 1, width, device="cuda", dtype=torch.bfloat16) for width in (512, 64)]
    queries = [torch.zeros(2, 16, 1, width, device="cuda", dtype=torch.bfloat16) for width in (512, 64)]

    def step():
        update_preallocated(states, *new)
        return attend_latents_preallocated(*queries, states, padding[:, None, None], SCALING)

    step()  # compiles; its token is one of zeros
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for count in range(3, 3 + residual_length + 140):
        for x in (*new, *queries):
            x.copy_(torch.randn(x.shape, generator=generator))
        graph.replay()
        assert states.num_tokens.item() == count
        mask = padding[:, None, None, :count]
        expected = expect(queries, storage.view(), mask, Roundings.of_kernels(torch.bfloat16, float8=True))
        assert max(ratios(out, expected.lse, expected)) <= 1, count


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("latent", LATENT_FORMATS)
def test_finds_one_token_among_131072(latent, heads):
    """A needle: one latent that matches the queries, the rest noise; it comes out to 1e-2."""
    tokens, place, generator = 131072, 54321, seeded(0, "cuda")
    case = Case(latent, "int8", 512, 64, heads=heads, splits=None)
    storage = GrowingStorage(case.preset(), 128, 0, "reference")
    latents, rotary = (
        torch.randn(1, 1, tokens, width, generator=generator, device="cuda", dtype=torch.bfloat16)
        for width in (512, 64)
    )
    storage.append(latents, rotary)
    view = storage.view()
    queries = [2.0 * x[:, :, [place]].expand(-1, heads, -1, -1) for x in (latents, rotary)]
    expected, _ = reference.attend_latents(*(x.double() for x in queries), view, None, SCALING)
    for rows in forms(case, torch.bfloat16):
        out, _ = run_kernel(case, queries, view, None, None, {}, rows=rows)
        assert relative_error(out, expected) < 1e-2, rows
    needle = reference.dequantize(view.key, view.packed_length, torch.float64)[:, :, [place]]
    assert relative_error(expected, needle.expand_as(expected)) < 0.2  # the needle decides


@pytest.mark.parametrize("form", ["heads", "rows", "chosen"])
def test_offsets_beyond_32_bits(form):
    """Packed latents of more than 2**31 bytes, of which the last sequences are looked at."""
    case = Case("fp8_e4m3", "int8", 512, 64, packed=1024, batch=2, heads=16, chosen=100 * (form == "chosen"))
    rows = form == "rows"
    assert not rows or True in forms(case, torch.bfloat16), "rows are for Hopper"
    view, queries = case.view("cuda", torch.bfloat16), make_queries(case, 1, "cuda", torch.bfloat16)
    indices = case.make_indices("cuda")
    expected, _ = run_kernel(case, queries, view, None, indices, {}, rows=rows)
    many, blocks = 1040, 4160 // 64  # 1040 sequences of 4160 tokens of 512 bytes
    states = []
    for part in (view.key, view.value):
        packed = part.packed.new_zeros(many, 1, blocks, part.packed.shape[3])
        packed[-2:, :, : part.packed.shape[2]] = part.packed
        changes = {"packed": packed}
        if part.scale is not None:
            scale = part.scale.new_zeros(many, 1, 64 * blocks)
            scale[-2:, :, : part.scale.shape[2]] = part.scale
            changes["scale"] = scale
        given = part.calibration
        wide = {
            name: torch.cat([x.new_ones(many - 2, *x.shape[1:]), x])
            for name in ("center", "smooth", "scale")
            if (x := getattr(given, name)) is not None
        }
        states.append(replace(part, **changes, calibration=replace(given, **wide)))
    assert states[0].packed.numel() > 2**31
    tails = [x.new_zeros(many, 1, 0, x.shape[3]) for x in (view.tail_keys, view.tail_values)]
    wide_view = replace(view, tail_keys=tails[0], tail_values=tails[1], key=states[0], value=states[1])
    wide_queries = [torch.cat([x.new_zeros(many - 2, *x.shape[1:]), x]) for x in queries]
    if indices is not None:
        indices = torch.cat([indices.new_full((many - 2, *indices.shape[1:]), -1), indices])
    out, _ = run_kernel(case, wide_queries, wide_view, None, indices, {}, rows=rows)
    assert relative_error(out[-2:], expected) < 1e-2


def test_one_sequence_of_more_than_2_to_the_31_bytes():
    """The last tokens of a very long sequence; all before them are hidden by a mask."""
    case = Case("fp8_e4m3", "exact", 512, 64, packed=1024, heads=16, splits=None)
    view, queries = case.view("cuda", torch.bfloat16), make_queries(case, 1, "cuda", torch.bfloat16)
    blocks = 2**31 // (512 * 64) + 16
    states = []
    for part in (view.key, view.value):
        packed = part.packed.new_zeros(1, 1, blocks, part.packed.shape[3])
        packed[:, :, -16:] = part.packed[:, :, :16]
        states.append(replace(part, packed=packed))
    length = 64 * blocks
    long = replace(view, packed_length=length, key=states[0], value=states[1])
    mask = (torch.arange(length, device="cuda") >= length - 1024)[None, None, None]
    for rows in forms(case, torch.bfloat16):
        expected, _ = run_kernel(case, queries, view, None, None, {}, rows=rows)
        out, _ = run_kernel(case, queries, long, mask, None, {}, rows=rows)
        assert relative_error(out, expected) < 1e-2, rows


# --- Against attention in bfloat16. -----------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("latent", LATENT_FORMATS)
def test_error_is_not_larger_than_that_of_bfloat16(latent, queries):
    """Than of attention over the same latents, unpacked in bfloat16 and repeated for every head."""
    case = Case(latent, "int8", 512, 64, packed=4096, heads=16, queries=queries, causal=False, splits=None)
    view, given = case.view("cuda", torch.bfloat16), make_queries(case, queries, "cuda", torch.bfloat16)
    expected = expect(given, view, None, Roundings.of_kernels(torch.bfloat16)).out
    latents, rotary = (x.bfloat16().expand(-1, 16, -1, -1) for x in exact_parts(view))
    weights = torch.softmax(torch.cat(given, -1) @ torch.cat([latents, rotary], -1).mT * SCALING, -1, torch.float32)
    plain = relative_error(weights.bfloat16() @ latents, expected)
    for rows in forms(case, torch.bfloat16):
        out, _ = run_kernel(case, given, view, None, None, {}, rows=rows)
        assert relative_error(out, expected) <= plain, (rows, plain)


@pytest.mark.parametrize("latent", ["fp8_e4m3", "tq4", "tq3"])
def test_error_is_not_larger_than_that_of_expanded_attention_in_bfloat16(latent):
    """Beside what transformers does: latents expanded to each head's keys and values, all rounded to bfloat16.

    The kernels' error is that for the queries they are given.  Scores have a standard deviation of about 3, so that a
    few tokens decide, as in a model; where all count alike, the error of either is but the rounding of its output.
    Absorbed queries are rounded once more, which no expanded ones are: with that, and the means' rounding on their way
    through the weight, one more rounding each as large as that of the output, sqrt(3) of it at most.
    """
    case = Case(latent, "int8", 512, 64, packed=4096, heads=16, splits=None)
    view, generator = case.view("cuda", torch.bfloat16), seeded(5, "cuda")

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    projection, query = KVProjection(normal(16, 256, 512) / 512**0.5, 128), 4 * normal(1, 16, 1, 192)
    exact = KVProjection(projection.weight.double(), 128)
    keys, values = exact.expand(*exact_parts(view))
    whole = torch.softmax(query.double() @ keys.mT * SCALING, -1) @ values
    keys, values = projection.expand(*(x.bfloat16() for x in exact_parts(view)))
    weights = torch.softmax(query @ keys.mT * SCALING, -1, torch.float32).bfloat16()
    expanded = relative_error(weights @ values, whole)
    absorbed = list(projection.absorb(query))
    expected = expect(absorbed, view, None, Roundings.of_kernels(torch.bfloat16)).out
    for rows in forms(case, torch.bfloat16):
        means, _ = run_kernel(case, absorbed, view, None, None, {}, rows=rows)
        found = relative_error(means, expected), relative_error(projection.values_of(means), whole)
        assert found[0] <= expanded and found[1] <= 3**0.5 * expanded, (rows, found, expanded)


def test_a_query_with_strides_and_a_mask_that_is_expanded():
    """Queries as a model's projection leaves them, transposed; and one mask row for all sequences."""
    case = Case("tq4", "exact", 512, 64, packed=300, batch=3, heads=16, queries=2, tail=5)
    view = case.view("cuda", torch.bfloat16)
    wide = torch.randn(3, 2, 16, 576, generator=seeded(6)).to("cuda", torch.bfloat16).transpose(1, 2)
    queries = list(wide.split([512, 64], dim=-1))
    mask = torch.ones(2, 305, dtype=torch.bool, device="cuda").tril(303)[None, None].expand(3, 1, -1, -1)
    expected = expect(queries, view, mask, Roundings.of_kernels(torch.bfloat16, float8=True))
    for rows in forms(case, torch.bfloat16):
        assert_within(*run_kernel(case, queries, view, mask, None, {}, rows=rows), expected)
