"""What storages of latents (MLA) calibrate on: real tokens, as latents and masks tell, and absorbed queries."""

import pytest
import torch
from latents import ROTARY, growing, latent_preset, latent_tokens, preallocated

from tq_cache.backends.calibration import FLOAT8_HEADROOM, measures
from tq_cache.hf.handles import materialize
from tq_cache.storage.growing import GrowingStorage

RANK, HEADS = 128, 4


def masks(padding: list[int], length: int, queries: int) -> torch.Tensor:
    """Causal, bool [B, 1, S, T], of rows with padding on the left."""
    token = torch.arange(length)
    causal = token[None] <= torch.arange(length - queries, length)[:, None]
    return torch.stack([causal & (token >= pad) for pad in padding])[:, None]


def attend(storage, pair, query, padding, *ends: int) -> None:
    """As a model does: updates, and the absorbed queries of each to whoever wants them."""
    start = 0
    for end in (*ends, pair[0].shape[2]):
        view = storage.append(*(x[:, :, start:end] for x in pair), queries_follow=True)
        if view.observe is not None:
            view.observe(query[:, :, start:end], masks(padding, end, end - start))
        start = end


@pytest.mark.parametrize(("preset", "rotary"), [("fp8_e4m3", "fp8_e4m3"), ("tq4", "exact"), ("tq3", "int8")])
@pytest.mark.parametrize(("chunk", "pads"), [(64, 300), (150, 300), (700, 300)])
def test_a_padded_row_in_chunks_is_as_the_row_alone(preset, rotary, chunk, pads, generator):
    """Pads and then 400 tokens, beside a row without: the first chunks of the padded row are padding only."""
    count = pads + 400
    pair = latent_tokens(generator, count, RANK)
    query = torch.randn(2, HEADS, count, RANK, generator=generator)
    pair[0][..., 20] += 300
    for x in pair:
        x[1, :, :pads] = 7 * torch.randn(1, pads, x.shape[3], generator=generator)
    storage, alone = growing(preset, rotary, sinks=4), growing(preset, rotary)
    attend(storage, pair, query, [0, pads], *range(chunk, count, chunk))
    attend(alone, [x[1:, :, pads:] for x in pair], query[1:, :, pads:], [0])
    last = pads + alone.packed_length
    for role, x in zip(("key", "value"), pair, strict=True):
        size = (x - x[:, :, pads:].mean(dim=2, keepdim=True))[1, :, pads:last].norm()
        batch = (materialize(storage.view(), role) - x)[1, :, pads:last].norm() / size
        single = (materialize(alone.view(), role) - x[1:, :, pads:])[0, :, : last - pads].norm() / size
        assert batch < 1.1 * single + 0.01, role


@pytest.mark.parametrize("make", (growing, preallocated))
@pytest.mark.parametrize("preset", ("fp8_e4m3", "tq4"))
def test_padding_is_told_by_latents(make, preset, generator):
    """Without a mask: rotary keys of padding differ by their place, the latents beside them do not."""
    latents, rotary_keys = latent_tokens(generator, 400, RANK)
    latents[1, :, :150] = 50.0
    rotary_keys[1, :, :150] *= 100
    storage = make(preset, "fp8_e4m3")
    storage.append(latents, rotary_keys)
    held = storage.view()
    torch.testing.assert_close(held.key.calibration.center[1], latents[1, :, 150:].mean(dim=1, keepdim=True))
    room = held.value.calibration.scale[1] * 448 / rotary_keys[1, :, 150:].abs().max()
    assert FLOAT8_HEADROOM <= room < 2 * FLOAT8_HEADROOM


def test_absorbed_queries_decide_the_sizes_of_channels(generator):
    """Smoothing by latents and queries makes the errors of scores least."""
    pair = latent_tokens(generator, 1024, RANK)
    query = torch.randn(2, HEADS, 1024, RANK, generator=generator)
    query[..., 8::16] *= 8
    errors = {}
    for name in ("none", "keys", "both"):
        storage = growing("tq4", smooth=0.0 if name == "none" else None)
        view = storage.append(*pair, queries_follow=True)
        view.observe(query if name == "both" else None, None)
        error = materialize(storage.view(), "key") - pair[0]
        errors[name] = float((query[:, :, :64] @ error.mT).square().mean())
    assert errors["both"] < 0.75 * min(errors["none"], errors["keys"])


@pytest.mark.parametrize("rotary", ROTARY)
def test_rotary_keys_are_measured_for_a_float8_scale_alone(rotary):
    """No centre, no channel sizes, whatever is said of latents."""
    preset = latent_preset("tq4", rotary, center=False, smooth=0.0)
    assert measures(preset, {}) == rotary.startswith("fp8")
    assert not measures(preset, {"rotary": torch.ones(1)})
    assert measures(latent_preset("tq4", rotary), {})
    assert latent_preset("tq4", rotary, center="both").center == ("key",)


@pytest.mark.parametrize("rotary", ("exact", "fp8_e5m2"))
def test_where_all_is_given_no_token_is_waited_for(rotary, generator):
    scales = {"key": torch.ones(1)} | ({"rotary": torch.ones(1)} if rotary != "exact" else {})
    preset = latent_preset("fp8_e5m2", rotary, center=False)
    storage = GrowingStorage(preset, 0, 0, "reference", scales)
    storage.append(*latent_tokens(generator, 64), queries_follow=True)
    assert storage.packed_length == 64 and storage.first_tokens.done
