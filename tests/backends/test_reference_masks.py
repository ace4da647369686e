"""Masks and causality of `reference.attend`, against plain attention in float64."""

import pytest
import torch
from error_budget import exact_parts
from views import LENGTH, assert_within_error_budget, causal, make_query, make_view, padding, to_float

from tq_cache.backends import reference

# ----------------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("kind", ("bool", "inf", "finfo_min", "bf16_min"))
@pytest.mark.parametrize("residual", (0, 30))
def test_padding_masks(kind, residual, generator):
    view = make_view(generator, LENGTH, residual=residual, sinks=4)
    allowed = padding() & causal(5, LENGTH)
    mask = {
        "bool": allowed,
        "inf": to_float(allowed),
        "finfo_min": to_float(allowed, torch.finfo(torch.float32).min),
        "bf16_min": to_float(allowed, torch.finfo(torch.bfloat16).min, torch.bfloat16),
    }[kind]
    assert_within_error_budget(make_query(generator, view, 5, 2), view, mask, allowed)


@pytest.mark.parametrize("mask_heads", (1, 6))
@pytest.mark.parametrize("mask_batch", (1, 2))
@pytest.mark.parametrize("is_bool", (True, False), ids=["bool", "float"])
def test_random_masks_per_head(mask_heads, mask_batch, is_bool, generator):
    view = make_view(generator, 1100, residual=30, sinks=4)
    shape = (mask_batch, mask_heads, 3, 1100)
    mask = torch.rand(shape, generator=generator) < 0.3 if is_bool else torch.randn(shape, generator=generator)
    assert_within_error_budget(make_query(generator, view, 3, 3), view, mask, mask)


def test_a_mask_longer_than_the_cache_is_read_from_its_start(generator):
    view = make_view(generator, LENGTH, residual=30)
    mask = torch.rand(2, 1, 3, LENGTH + 56, generator=generator) < 0.5
    query = make_query(generator, view, 3, 2)
    assert_within_error_budget(query, view, mask, mask[..., :LENGTH])


def test_one_mask_row_serves_all_queries(generator):
    view = make_view(generator, LENGTH, residual=30)
    assert_within_error_budget(make_query(generator, view, 3, 2), view, padding(), padding())


@pytest.mark.parametrize("residual", (0, 30, 500))
@pytest.mark.parametrize("preset", ("4bit_nc", "tq4"))
@pytest.mark.parametrize("is_bool", (True, False), ids=["bool", "inf"])
def test_a_query_that_may_see_no_token_gets_zeros(residual, preset, is_bool, generator):
    view = make_view(generator, LENGTH, preset=preset, residual=residual, sinks=4)
    allowed = (padding() & causal(5, LENGTH)).clone()
    allowed[1, :, 2] = False
    query = make_query(generator, view, 5, 2)
    out = assert_within_error_budget(query, view, allowed if is_bool else to_float(allowed), allowed)
    assert torch.equal(out[1, :, 2], torch.zeros_like(out[1, :, 2]))


@pytest.mark.parametrize("residual", (0, 30, 500))
def test_a_row_masked_by_the_lowest_float_is_an_average_or_zeros(residual, generator):
    """Dense softmax gives the mean there.  A mean or zeros are harmless; a sum of thousands of values is not."""
    view = make_view(generator, 1100, residual=residual)
    mask = torch.zeros(2, 1, 2, 1100)
    mask[1, :, 0] = torch.finfo(torch.float32).min
    out, _ = reference.attend(make_query(generator, view, 2, 2), view, mask, 0.125)
    _, values = exact_parts(view)
    assert (out[1, :, 0].abs() <= values.abs().max()).all()


@pytest.mark.parametrize("num_queries", (2, 64, 150))
@pytest.mark.parametrize("residual", (0, 30))
def test_no_mask_is_causal_for_a_chunk(num_queries, residual, generator):
    view = make_view(generator, LENGTH, residual=residual, sinks=4)
    assert_within_error_budget(make_query(generator, view, num_queries, 2), view, None, causal(num_queries, LENGTH))


@pytest.mark.parametrize("num_queries", (1, 5))
def test_no_mask_and_not_causal_sees_everything(num_queries, generator):
    view = make_view(generator, LENGTH, residual=30)
    assert_within_error_budget(make_query(generator, view, num_queries, 2), view, None, None, is_causal=False)


def test_a_mask_replaces_causality(generator):
    view = make_view(generator, LENGTH, residual=30)
    everything = torch.ones(1, 1, 5, LENGTH, dtype=torch.bool)
    assert_within_error_budget(make_query(generator, view, 5, 2), view, everything, None, is_causal=True)


@pytest.mark.parametrize("shape", [(2, LENGTH), (2, 1, LENGTH), (2, 1, 1, LENGTH - 1)])
def test_masks_that_do_not_fit_are_refused(shape, generator):
    view = make_view(generator, LENGTH, residual=30)
    with pytest.raises(ValueError, match=r"expected an attention mask \[B, H, S, 200 or more\], got"):
        reference.attend(make_query(generator, view, 1, 2), view, torch.ones(shape, dtype=torch.bool), 0.125)
