"""`reference.attend_latents` against attention in float64 over the latents and rotary keys of the same codes."""

import pytest
import torch
from error_budget import exact_parts
from latents import LATENTS, ROTARY, SHAPES, assert_latents_within_budget, latent_queries, latent_view, preallocated
from preallocated import add
from views import DTYPES, LENGTH, causal, padding, to_float

from tq_cache.backends import reference
from tq_cache.backends.masks import with_indices
from tq_cache.formats.packing import BLOCK_TOKENS

PARTS = {"residual": 30, "sinks": 4}

# --------------------------------------------------------------------------------------------------- formats, shapes


@pytest.mark.parametrize("preset", LATENTS)
@pytest.mark.parametrize(("rank", "width", "rotary"), SHAPES)
def test_every_format_and_width(preset, rank, width, rotary, generator):
    view = latent_view(generator, 150, preset=preset, rotary=rotary, rank=rank, width=width, **PARTS)
    assert (view.sink_length, view.packed_length, view.tail_keys.shape[2]) == (4, 116, 30)
    assert_latents_within_budget(*latent_queries(generator, view, 3), view, None, causal(3, 150))


@pytest.mark.parametrize("smooth", (0.0, 0.5))
@pytest.mark.parametrize("center", (False, True, "both"))
@pytest.mark.parametrize("preset", ("fp8_e4m3", "tq3", "4bit_nc"))
def test_centre_and_channel_sizes_are_undone_in_scores_and_sums(preset, center, smooth, generator):
    view = latent_view(generator, 150, preset=preset, center=center, smooth=smooth, **PARTS)
    held = view.key.calibration
    assert ((held.center is not None), (held.smooth is not None)) == (bool(center), smooth > 0)
    assert view.value.calibration.center is None  # a rotary key turns with its place: it has no centre
    assert_latents_within_budget(*latent_queries(generator, view, 3), view, None, causal(3, 150))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary", ROTARY)
def test_every_dtype(rotary, dtype, generator):
    view = latent_view(generator, LENGTH, rotary=rotary, dtype=dtype, **PARTS)
    assert_latents_within_budget(*latent_queries(generator, view, 5), view, None, causal(5, LENGTH))


@pytest.mark.parametrize(("residual", "sinks"), [(0, 0), (0, 4), (16, 0), (64, 4), (128, 70), (500, 0), (500, 4)])
@pytest.mark.parametrize("width", (0, 64))
def test_sinks_packed_and_tail_are_one_sequence(residual, sinks, width, generator):
    view = latent_view(generator, 300, width=width, residual=residual, sinks=sinks)
    assert_latents_within_budget(*latent_queries(generator, view, 7), view, None, causal(7, 300))


@pytest.mark.parametrize("length", (1, 63, 64, 65, 1024, 1100))
@pytest.mark.parametrize("num_queries", (1, 3, 17))
def test_ragged_lengths(length, num_queries, generator):
    view = latent_view(generator, length, rotary="int8")
    assert view.packed_length == length
    num_queries = min(num_queries, length)
    assert_latents_within_budget(*latent_queries(generator, view, num_queries), view, None, causal(num_queries, length))


def test_tiles_are_no_more_than_a_bound_on_memory(generator, monkeypatch):
    view = latent_view(generator, 700, rotary="int8", **PARTS)
    queries = latent_queries(generator, view, 3)
    for tokens in (reference.TILE_TOKENS, BLOCK_TOKENS):
        monkeypatch.setattr(reference, "TILE_TOKENS", tokens)
        assert_latents_within_budget(*queries, view, None, causal(3, 700))


# ------------------------------------------------------------------------------------------------- masks and options


@pytest.mark.parametrize("kind", ("bool", "inf", "finfo_min"))
@pytest.mark.parametrize("width", (0, 32))
def test_padding_masks(kind, width, generator):
    view = latent_view(generator, LENGTH, width=width, **PARTS)
    allowed = padding() & causal(5, LENGTH)
    lowest = {"bool": 0.0, "inf": -torch.inf, "finfo_min": torch.finfo(torch.float32).min}[kind]
    mask = allowed if kind == "bool" else to_float(allowed, lowest)
    assert_latents_within_budget(*latent_queries(generator, view, 5), view, mask, allowed)


@pytest.mark.parametrize("mask_heads", (1, 6))
@pytest.mark.parametrize("is_bool", (True, False), ids=["bool", "float"])
def test_random_masks_per_head(mask_heads, is_bool, generator):
    view = latent_view(generator, LENGTH, **PARTS)
    shape = (2, mask_heads, 3, LENGTH)
    mask = torch.rand(shape, generator=generator) < 0.3 if is_bool else torch.randn(shape, generator=generator)
    assert_latents_within_budget(*latent_queries(generator, view, 3), view, mask, mask)


@pytest.mark.parametrize("preset", ("fp8_e4m3", "tq4"))
@pytest.mark.parametrize("lowest", (None, -torch.inf), ids=str)
def test_a_query_that_may_see_no_token_gets_zeros(preset, lowest, generator):
    view = latent_view(generator, LENGTH, preset=preset, **PARTS)
    allowed = (padding() & causal(5, LENGTH)).clone()
    allowed[1, :, 2] = False
    mask = allowed if lowest is None else to_float(allowed, lowest)
    out = assert_latents_within_budget(*latent_queries(generator, view, 5), view, mask, allowed)
    assert torch.equal(out[1, :, 2], torch.zeros_like(out[1, :, 2]))


@pytest.mark.parametrize("lowest", (None, "no mask", -torch.inf, torch.finfo(torch.float32).min), ids=str)
def test_indices_narrow_what_a_query_sees(lowest, generator):
    """Sparse attention: the tokens that an indexer chose, of those that the mask, or causality, allows."""
    view = latent_view(generator, LENGTH, **PARTS)
    indices = torch.stack([torch.randperm(LENGTH - 5, generator=generator)[:20] for _ in range(10)]).view(2, 5, 20)
    chosen = torch.zeros(2, 5, LENGTH, dtype=torch.bool)
    for row in range(2):
        for query in range(5):
            chosen[row, query, indices[row, query]] = True
    allowed = causal(5, LENGTH) if lowest == "no mask" else padding() & causal(5, LENGTH)
    mask = {"no mask": None, None: allowed}[lowest] if lowest in ("no mask", None) else to_float(allowed, lowest)
    expected = allowed & chosen[:, None]
    assert expected.any(dim=-1).all()
    assert_latents_within_budget(*latent_queries(generator, view, 5), view, mask, expected, indices=indices)
    narrowed = with_indices(mask, indices, LENGTH)
    assert torch.equal(narrowed if narrowed.dtype == torch.bool else narrowed == 0, expected)


@pytest.mark.parametrize("softcap", (1.0, 50.0))
def test_softcap_is_of_the_sum_of_both_scores(softcap, generator):
    view = latent_view(generator, LENGTH, **PARTS)
    content, rotary = (10 * x for x in latent_queries(generator, view, 5))
    allowed = padding() & causal(5, LENGTH)
    assert_latents_within_budget(content, rotary, view, to_float(allowed), allowed, softcap=softcap)


@pytest.mark.parametrize("shape", [(1, 6, 1), (2, 6, 3)], ids=["per_head", "per_query"])
def test_sink_logits(shape, generator):
    view = latent_view(generator, LENGTH, **PARTS)
    sink_logits = 5 * torch.randn(shape, generator=generator)
    queries = latent_queries(generator, view, 3)
    out = assert_latents_within_budget(*queries, view, None, causal(3, LENGTH), sink_logits=sink_logits)
    assert not torch.equal(out, reference.attend_latents(*queries, view, None, 0.1)[0])


def test_full_attention_and_scaling(generator):
    view = latent_view(generator, LENGTH, rotary="int8", **PARTS)
    queries = latent_queries(generator, view, 5)
    assert_latents_within_budget(*queries, view, None, None, is_causal=False, scaling=0.5)


# ------------------------------------------------------------------------------------------------------- other paths


@pytest.mark.parametrize("width", (0, 32))
def test_it_is_what_attention_over_expanded_keys_and_values_is(width, generator):
    """What a model without absorption does: kv_b_proj makes keys and values of every head from each latent."""
    view = latent_view(generator, LENGTH, width=width, dtype=torch.float64, **PARTS)
    heads, nope, value_dim = 6, 24, 40
    weight = torch.randn(heads, nope + value_dim, 128, generator=generator, dtype=torch.float64) / 128**0.5
    query = torch.randn(2, heads, 3, nope, generator=generator, dtype=torch.float64)
    rotary = torch.randn(2, heads, 3, width, generator=generator, dtype=torch.float64)
    latents, rotary_keys = exact_parts(view)
    expanded = torch.einsum("her,bjtr->bhte", weight, latents)
    keys = torch.cat([expanded[..., :nope], rotary_keys.expand(-1, heads, -1, -1)], dim=-1)
    scores = torch.cat([query, rotary], dim=-1) @ keys.mT * 0.15
    weights = scores.masked_fill(~causal(3, LENGTH), -torch.inf).softmax(dim=-1)
    content = torch.einsum("bhsn,hnr->bhsr", query, weight[:, :nope])
    out, _ = reference.attend_latents(content, rotary, view, None, 0.15)
    values = torch.einsum("bhsr,hvr->bhsv", out, weight[:, nope:])
    torch.testing.assert_close(values, weights @ expanded[..., nope:], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("width", "rotary"), [(0, "exact"), *((32, name) for name in ROTARY)])
def test_preallocated_latents(width, rotary, generator):
    """After chunks and single tokens, through a ring that wraps; masks may be as long as there is room."""
    storage = preallocated(rotary=rotary, sinks=4)
    latents = torch.randn(2, 1, 400, 128, generator=generator)
    rotary_keys = torch.randn(2, 1, 400, width, generator=generator)
    for start, end in [(0, 250), *((n, n + 1) for n in range(250, 400))]:
        add(storage, latents[:, :, start:end], rotary_keys[:, :, start:end])
    view = storage.view()
    assert (view.length, view.packed_length) == (400, 320)
    queries = latent_queries(generator, view, 1)
    mask = torch.zeros(2, 1, 1, 600, dtype=torch.bool)
    mask[..., :400] = True
    mask[1, ..., :90] = False
    expected = assert_latents_within_budget(*queries, view, mask[..., :400], mask[..., :400], scaling=0.1)
    assert torch.equal(reference.attend_latents_preallocated(*queries, storage.states, mask, 0.1), expected)


@pytest.mark.parametrize("shape", [(2, LENGTH), (2, 1, 1, LENGTH - 1)])
def test_masks_that_do_not_fit_are_refused(shape, generator):
    view = latent_view(generator, LENGTH, residual=30)
    with pytest.raises(ValueError, match=r"expected an attention mask \[B, H, S, 200 or more\], got"):
        reference.attend_latents(*latent_queries(generator, view, 1), view, torch.ones(shape, dtype=torch.bool), 0.1)
