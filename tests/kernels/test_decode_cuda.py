"""The decode kernels on CUDA, against float64."""

from dataclasses import replace

import pytest
import torch
from decode_cases import CASES, EXACT, STATIC, Case, compare_exact, compare_static, expect, run_kernel, static_storage
from error_budget import Roundings, assert_within, attention, exact_parts, ratios, relative_error, seeded
from kernel_harness import DTYPES

from tq_cache.backends import reference
from tq_cache.formats.presets import PRESETS
from tq_cache.formats.states import map_tensors
from tq_cache.storage.growing import GrowingStorage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_error_budget(name, dtype):
    """The error is what the roundings of the kernels come to, against float64; no other attention is asked."""
    case, dtype = CASES[name], DTYPES[dtype]
    view, query = case.view("cuda", dtype), case.query("cuda", dtype)
    mask, options = case.make_mask(view.length, "cuda"), case.make_options("cuda")
    out, lse = run_kernel(case, view, query, mask, options)
    assert_within(out, lse, expect(case, view, query, mask, options, Roundings.of_kernels(dtype, float8=True)))


@pytest.mark.parametrize("case", STATIC, ids=lambda case: "-".join(map(str, case[:3])))
def test_static_layer_on_cuda(case):
    assert max(compare_static(*case, "cuda", torch.bfloat16)) <= 1


@pytest.mark.parametrize(("residual_length", "sinks"), [(0, 4), (64, 1), (128, 4)])
def test_a_captured_step_reads_what_it_wrote(residual_length, sinks):
    """Update and attention in one CUDA graph, replayed from before the sinks are full through two packings."""
    from tq_cache.backends.triton import attend_preallocated, update_preallocated

    storage = static_storage("tq4", residual_length, sinks, (1,), "cuda", torch.bfloat16)
    states, generator = storage.states, seeded(3)
    padding = torch.arange(400, device="cuda") >= torch.tensor([[0], [1]], device="cuda")
    new = [torch.zeros(2, 2, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    query = torch.zeros(2, 8, 1, 64, device="cuda", dtype=torch.bfloat16)

    def step():
        update_preallocated(states, *new)
        return attend_preallocated(query, states, padding[:, None, None], 0.125)

    step()  # compiles; its token is one of zeros
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for count in range(3, 3 + residual_length + 140):
        for x in (*new, query):
            x.copy_(torch.randn(x.shape, generator=generator))
        graph.replay()
        assert states.num_tokens.item() == count
        view = storage.view()
        mask = padding[:, None, None, :count]
        expected = attention(query, *exact_parts(view), mask, 0.125, Roundings.of_kernels(torch.bfloat16, float8=True))
        assert max(ratios(out, expected.lse, expected)) <= 1, count


@pytest.mark.parametrize(("tokens", "queries"), [*EXACT, (5000, 1), (40000, 16), (3000, 100)])
def test_nothing_packed_on_cuda(tokens, queries):
    assert max(compare_exact(tokens, queries, "cuda", torch.bfloat16)) <= 1


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
        calibration = map_tensors(part.calibration, lambda x: x.expand(many // 2, *x.shape).flatten(0, 1).contiguous())
        states.append(replace(part, packed=packed, calibration=calibration))
    assert states[0].packed.numel() > 2**31
    tails = (view.tail_keys.new_zeros(many, 8, 0, 128), view.tail_values.new_zeros(many, 8, 0, 128))
    wide = query.new_zeros(many, *query.shape[1:])
    wide[-2:] = query
    out, _ = run_kernel(
        case, replace(view, tail_keys=tails[0], tail_values=tails[1], key=states[0], value=states[1]), wide, None, {}
    )
    assert relative_error(out[-2:], expected) < 1e-2
