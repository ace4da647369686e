"""`reference.attend` against plain attention in float64 over the dequantised keys and values of the same codes."""

import math

import pytest
import torch
from error_budget import Roundings, attention, exact_parts
from views import DTYPES, LENGTH, assert_within_error_budget, causal, make_query, make_view, padding, to_float

from tq_cache.backends import reference
from tq_cache.formats.packing import BLOCK_TOKENS
from tq_cache.formats.presets import PRESETS
from tq_cache.hf.handles import materialize
from tq_cache.storage.growing import GrowingStorage

# --------------------------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("head_dim", (48, 64))
def test_every_preset(preset, head_dim, generator):
    view = make_view(generator, 150, preset=preset, key_dim=head_dim, residual=20, sinks=4)
    assert (view.sink_length, view.packed_length, view.tail_keys.shape[2]) == (4, 126, 20)
    query = make_query(generator, view, 3, 2)
    assert_within_error_budget(query, view, None, causal(3, 150))


@pytest.mark.parametrize("preset", ("k8v4", "4bit_nc", "tq3"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(preset, dtype, generator):
    view = make_view(generator, 300, preset=preset, residual=30, sinks=2, dtype=dtype)
    assert_within_error_budget(make_query(generator, view, 5, 2), view, None, causal(5, 300))


@pytest.mark.parametrize("preset", ("fp8_e5m2", "3bit_nc", "tq2"))
@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 96), (576, 512), (80, 48), (192, 128), (256, 256)])
def test_keys_and_values_of_different_width(preset, key_dim, value_dim, generator):
    view = make_view(generator, 130, preset=preset, key_dim=key_dim, value_dim=value_dim, residual=10)
    out = assert_within_error_budget(make_query(generator, view, 2, 2), view, None, causal(2, 130))
    assert out.shape[-1] == value_dim


@pytest.mark.parametrize("scale", (30.0, 300.0))
@pytest.mark.parametrize("preset", ("fp8_e4m3", "4bit_nc", "tq4"))
def test_large_scores(preset, scale, generator):
    """Nearly one-hot weights."""
    view = make_view(generator, 1100, preset=preset, residual=100)
    assert_within_error_budget(scale * make_query(generator, view, 2, 2), view, None, causal(2, 1100))


@pytest.mark.parametrize("scale", (1.0, 30.0, 300.0))
@pytest.mark.parametrize("residual", (0, 100))
def test_weights_sum_to_one(residual, scale, generator):
    """Whatever the scores: with all values one (exact in float8) the output is one."""
    storage = GrowingStorage(PRESETS["fp8_e4m3"], residual, 4, "reference")
    keys = torch.randn(2, 2, 1100, 64, generator=generator)
    storage.append(keys, torch.ones_like(keys))
    query = scale * make_query(generator, storage.view(), 17, 2)
    out, _ = reference.attend(query, storage.view(), None, 0.125)
    rounding = math.sqrt(1100) * torch.finfo(torch.float32).eps / 2  # of a sum of as many terms
    torch.testing.assert_close(out, torch.ones_like(out), rtol=rounding, atol=0)


# ---------------------------------------------------------------------------------------------------------- shapes


@pytest.mark.parametrize("group", (1, 2, 4, 7, 16))
@pytest.mark.parametrize("num_queries", (1, 3, 17))
def test_gqa_groups(group, num_queries, generator):
    view = make_view(generator, 100, preset="4bit_nc", residual=10)
    assert_within_error_budget(make_query(generator, view, num_queries, group), view, None, causal(num_queries, 100))


@pytest.mark.parametrize("length", (1, 63, 64, 65, 1000, 1024, 1100, 2049))
@pytest.mark.parametrize("num_queries", (1, 3, 17))
@pytest.mark.parametrize("preset", ("k3v4_nc", "tq4"))
def test_ragged_lengths(length, num_queries, preset, generator):
    """All packed; the longest are more than a tile of `TILE_TOKENS`."""
    view = make_view(generator, length, preset=preset, batch=1)
    assert view.packed_length == length
    num_queries = min(num_queries, length)
    assert_within_error_budget(make_query(generator, view, num_queries, 2), view, None, causal(num_queries, length))


@pytest.mark.parametrize(("residual", "sinks"), [(0, 0), (0, 4), (16, 0), (64, 4), (128, 70), (500, 0), (500, 4)])
def test_sinks_packed_and_tail_are_one_sequence(residual, sinks, generator):
    view = make_view(generator, 300, residual=residual, sinks=sinks)
    assert_within_error_budget(make_query(generator, view, 7, 2), view, None, causal(7, 300))


def test_stale_tokens_behind_the_packed_ones_are_not_seen(generator):
    storage = GrowingStorage(PRESETS["tq4"], 0, 0, "reference")
    x = torch.randn(2, 2, 200, 64, generator=generator)
    storage.append(x, 100 * x)
    storage.crop(70)
    view = storage.view()
    assert view.packed_length == 70 and view.key.capacity > 128
    assert_within_error_budget(make_query(generator, view, 3, 2), view, None, causal(3, 70))


def test_non_contiguous_query(generator):
    view = make_view(generator, 100, residual=10)
    query = torch.randn(2, 3, 4, 64, generator=generator).transpose(1, 2)  # [B, H, S, D] as models make it
    assert_within_error_budget(query, view, None, causal(3, 100))


# --------------------------------------------------------------------------------------- softcap, sinks, scaling, lse


@pytest.mark.parametrize("softcap", (1.0, 50.0))
@pytest.mark.parametrize("residual", (0, 30))
def test_softcap_comes_before_the_mask(softcap, residual, generator):
    view = make_view(generator, LENGTH, residual=residual, sinks=4)
    allowed = padding() & causal(5, LENGTH)
    assert_within_error_budget(
        10 * make_query(generator, view, 5, 2), view, to_float(allowed), allowed, softcap=softcap
    )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("residual", (0, 30))
@pytest.mark.parametrize("shape", [(1, 6, 1), (2, 6, 3)], ids=["per_head", "per_query"])
def test_sink_logits(shape, dtype, residual, generator):
    view = make_view(generator, LENGTH, residual=residual, sinks=4, dtype=dtype)
    sink_logits = (5 * torch.randn(shape, generator=generator)).to(dtype)
    query = make_query(generator, view, 3, 3)
    out = assert_within_error_budget(query, view, None, causal(3, LENGTH), sink_logits=sink_logits)
    assert not torch.equal(out, reference.attend(query, view, None, 0.125)[0])


def test_sink_logits_on_a_row_without_tokens(generator):
    view = make_view(generator, LENGTH, residual=30)
    mask = torch.zeros(2, 1, 1, LENGTH, dtype=torch.bool)
    sink_logits = torch.randn(1, 4, 1, generator=generator)
    out, lse = reference.attend(make_query(generator, view, 1, 2), view, mask, 0.125, sink_logits=sink_logits)
    assert torch.equal(out, torch.zeros_like(out))
    torch.testing.assert_close(lse, sink_logits.expand(2, 4, 1))


@pytest.mark.parametrize("scaling", (1.0, 0.01, 0.0))
def test_scaling(scaling, generator):
    view = make_view(generator, LENGTH, residual=30)
    assert_within_error_budget(make_query(generator, view, 3, 2), view, None, causal(3, LENGTH), scaling=scaling)


def test_all_options_at_once(generator):
    view = make_view(generator, 1100, preset="tq_k4v2", key_dim=96, value_dim=48, residual=30, sinks=4)
    mask = padding(1100) & causal(17, 1100)
    options = {"scaling": 0.2, "softcap": 20.0, "sink_logits": torch.linspace(-3, 3, 14)[None, :, None]}
    assert_within_error_budget(make_query(generator, view, 17, 7), view, mask, mask, **options)


# ------------------------------------------------------------------------------------------------- merge, whole views


def test_merge_of_parts_is_attention_over_the_whole(generator):
    scores = 20 * torch.randn(3, 5, 100, generator=generator, dtype=torch.float64)
    values = torch.randn(3, 100, 8, generator=generator, dtype=torch.float64)
    scores[0, :, :40] = -torch.inf  # a part without tokens
    spans = [slice(0, 40), slice(40, 41), slice(41, 100)]
    outs = [torch.softmax(scores[..., span], dim=-1).nan_to_num(0.0) @ values[:, span] for span in spans]
    lses = [torch.logsumexp(scores[..., span], dim=-1) for span in spans]
    out, lse = reference.merge(outs, lses)
    torch.testing.assert_close(out, torch.softmax(scores, dim=-1) @ values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, torch.logsumexp(scores, dim=-1), rtol=1e-13, atol=1e-13)


def test_merge_of_nothing_seen_is_zero_and_minus_infinity():
    outs, lses = [torch.zeros(2, 3, 4)] * 2, [torch.full((2, 3), -torch.inf)] * 2
    out, lse = reference.merge(outs, lses)
    assert torch.equal(out, torch.zeros(2, 3, 4)) and torch.equal(lse, lses[0])


def test_tiles_are_no_more_than_a_bound_on_memory(generator, monkeypatch):
    view = make_view(generator, 700, residual=30, sinks=4)
    query = make_query(generator, view, 3, 2)
    for tokens in (reference.TILE_TOKENS, BLOCK_TOKENS):
        monkeypatch.setattr(reference, "TILE_TOKENS", tokens)
        assert_within_error_budget(query, view, None, causal(3, 700))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_materialised_view_is_what_attention_sees(dtype, generator):
    view = make_view(generator, LENGTH, residual=30, sinks=4, dtype=dtype)
    for role, exact in zip(("key", "value"), exact_parts(view), strict=True):
        whole = materialize(view, role)
        assert whole.dtype == dtype
        torch.testing.assert_close(whole.double(), exact, atol=1e-6, rtol=torch.finfo(dtype).eps)


def test_quantisation_itself_costs_little(generator):
    """The other question: against attention over the keys and values before packing, bounded by the codes' error."""
    storage = GrowingStorage(PRESETS["tq4"], 0, 0, "reference")
    keys, values = (torch.randn(2, 2, 1000, 128, generator=generator) for _ in range(2))
    storage.append(keys, values)
    query = torch.randn(2, 4, 1, 128, generator=generator)
    out, _ = reference.attend(query, storage.view(), None, 1 / math.sqrt(128))
    exact = attention(query, keys, values, None, 1 / math.sqrt(128), Roundings.of_reference(query.dtype)).out
    relative = float((out - exact).square().sum() / exact.square().sum())
    # keys: scores are off by |q| / sqrt(D) * sqrt(D_key) = 0.1, weights by as much; values: D_value
    assert relative < 1.5 * (0.00966 + 0.00957)
