"""Storages of latents and rotary keys (MLA): every format and width, alone and through every operation."""

import copy

import pytest
import torch
from latents import LATENTS, ROTARY, SHAPES, growing, latent_preset, latent_tokens, preallocated
from preallocated import add
from storages import assert_same_state, codes_of, everything

from tq_cache.backends import quantizers, reference
from tq_cache.formats.presets import FORMATS, resolve_preset
from tq_cache.formats.states import PackedStates
from tq_cache.hf.graph_ops import flatten, unflatten
from tq_cache.hf.handles import materialize
from tq_cache.storage.growing import UNLIMITED, GrowingStorage
from tq_cache.storage.preallocated import PreallocatedStorage

# Of Gaussian vectors: the norm of the error over that of the vectors.
ROTARY_ERROR = {"exact": 0.0, "int8": 0.008, "fp8_e4m3": 0.03, "fp8_e5m2": 0.06}
BYTES = {"exact": lambda width: 2 * width, "int8": lambda width: width + 2, "fp8_e4m3": int, "fp8_e5m2": int}


@pytest.mark.parametrize("preset", LATENTS)
@pytest.mark.parametrize(("rank", "width", "rotary"), SHAPES)
def test_latents_are_stored_as_keys_and_rotary_keys_as_they_are_told(preset, rank, width, rotary, generator):
    storage = growing(preset, rotary, residual=16, sinks=4)
    latents, rotary_keys = latent_tokens(generator, 300, rank, width, dtype=torch.bfloat16)
    view = storage.append(latents, rotary_keys)
    assert torch.equal(view.tail_keys, latents) and torch.equal(view.tail_values, rotary_keys)
    view = storage.view()
    assert (view.length, view.packed_length) == (300, 256)
    assert (view.key.role, view.value.role) == ("key", "rotary")
    assert (view.key.format, view.value.format) == (resolve_preset(preset).key, FORMATS["rotary"][rotary])
    again = PackedStates.empty("key", view.key.format, latents, 256, view.key.calibration)
    reference.store(again, latents[:, :, 4:260], 0)
    assert torch.equal(view.key.packed[:, :, :4], again.packed)
    read = materialize(view, "value")
    assert read.shape == rotary_keys.shape and read.dtype == torch.bfloat16
    assert (read - rotary_keys).float().norm() <= ROTARY_ERROR[rotary] * rotary_keys.float().norm() + (width == 0)
    per_token = storage.preset.token_bytes(rank, width)
    assert per_token == storage.preset.key.token_bytes(rank) + BYTES[rotary](width)
    packed = [x for states in (view.key, view.value) for x in (states.packed, states.scale) if x is not None]
    assert sum(x.nbytes for x in packed) == 2 * view.key.capacity * per_token


@pytest.mark.parametrize(("rank", "width", "rotary"), SHAPES)
def test_crop_into_a_block_then_new_tokens(rank, width, rotary, generator):
    """Kept tokens keep their codes, new ones get those that they would have got anyway."""
    storage = growing("tq3", rotary)
    storage.append(*latent_tokens(generator, 150, rank, width))
    kept = [codes_of(states, 70) for states in (storage.key, storage.value)]
    storage.crop(70)
    new = latent_tokens(generator, 80, rank, width)
    storage.append(*new)
    assert (storage.length, storage.packed_length) == (150, 128)
    for states, codes, x in zip((storage.key, storage.value), kept, new, strict=True):
        assert torch.equal(codes_of(states, 70), codes)
        again = PackedStates.empty(states.role, states.format, x, 64, states.calibration)
        reference.store(again, x[:, :, :58], 0)
        assert torch.equal(codes_of(states, 128)[:, :, 70:], codes_of(again, 58))


@pytest.mark.parametrize(("width", "rotary"), [(0, "exact"), *((32, name) for name in ROTARY)])
def test_sequences_and_copies(width, rotary, generator):
    """select, repeat, to and deepcopy move the bits of rotary keys, too."""
    storage = growing("tq4", rotary, residual=16, sinks=4)
    new = latent_tokens(generator, 70, width=width, batch=4)
    storage.append(*latent_tokens(generator, 200, width=width, batch=3))
    before = storage.tensors()
    storage.select(torch.tensor([2, 0]))
    storage.repeat(2)
    assert all(torch.equal(now, old[[2, 2, 0, 0]]) for now, old in zip(storage.tensors(), before, strict=True))
    state = everything(storage)
    storage.to("cpu")
    assert_same_state(state, everything(storage))
    twin = copy.deepcopy(storage)
    assert_same_state(state, everything(twin))
    twin.append(*new)
    twin.crop(30)
    assert_same_state(state, everything(storage))
    storage.append(*new)
    assert (storage.length, twin.length) == (270, 30)
    assert torch.equal(materialize(storage.view(), "value")[:, :, -70:], new[1])


@pytest.mark.parametrize("residual", (0, 64))
@pytest.mark.parametrize(("rank", "width", "rotary"), [(128, 0, "exact"), (256, 32, "fp8_e5m2"), *SHAPES[-6:-2]])
def test_preallocated_holds_what_a_growing_storage_holds(rank, width, rotary, residual, generator):
    """Chunks and single tokens, as a layer adds them, through the ring; and through a graph's flat list of tensors."""
    fixed = preallocated("tq4", rotary, residual, sinks=4)
    held = growing("tq4", rotary, residual, sinks=4)
    for count in (250, *[1] * 150, 70, *[1] * 30):
        chunk = latent_tokens(generator, count, rank, width)
        held.append(*chunk)
        add(fixed, *chunk)
    ours, theirs = fixed.view(), held.view()
    assert ours.packed_length == theirs.packed_length == (500 - 4 - residual) // 64 * 64
    assert torch.equal(ours.tail_keys, theirs.tail_keys) and torch.equal(ours.tail_values, theirs.tail_values)
    assert torch.equal(ours.sink_values, theirs.sink_values)
    for mine, other in ((ours.key, theirs.key), (ours.value, theirs.value)):
        assert torch.equal(codes_of(mine, ours.packed_length), codes_of(other, ours.packed_length))
    again = unflatten(flatten(fixed.states))
    assert (again.key.role, again.value.role) == ("key", "rotary")
    assert (again.key.format, again.value.format) == (fixed.states.key.format, fixed.states.value.format)
    assert torch.equal(materialize(again.view(), "value"), materialize(ours, "value"))


@pytest.mark.parametrize("width", (0, 32))
@pytest.mark.parametrize("make", [
    lambda preset: GrowingStorage(preset, UNLIMITED, 0, "reference"),
    lambda preset: PreallocatedStorage(preset, 640, 0, 600, "reference"),
])  # fmt: skip
def test_layers_that_are_not_packed(make, width, generator):
    storage = make(latent_preset("k8v4"))
    chunks = [latent_tokens(generator, count, width=width) for count in (300, 1, 90)]
    for chunk in chunks:
        view = storage.append(*chunk)
    for tail, side in ((view.tail_keys, 0), (view.tail_values, 1)):
        assert torch.equal(tail, torch.cat([chunk[side] for chunk in chunks], dim=2))


@pytest.mark.parametrize("rotary", ROTARY)
def test_bad_tokens_change_no_other(rotary, generator):
    """Inf and NaN read back as NaN, or, where elements are stored one by one, as what they were."""
    latents, rotary_keys = latent_tokens(generator, 200)
    clean, spoiled = growing("tq4", rotary), growing("tq4", rotary)
    clean.append(latents, rotary_keys)
    bad = rotary_keys.clone()
    bad[0, 0, 33, 7], bad[1, 0, 40] = torch.inf, torch.nan
    spoiled.append(latents, bad)
    read = materialize(spoiled.view(), "value")
    assert not read[0, 0, 33, 7].isfinite() and read[1, 0, 40].isnan().all()
    if rotary == "int8":
        assert read[0, 0, 33].isnan().all()
    expected = materialize(clean.view(), "value")
    read[0, 0, 33], read[1, 0, 40] = expected[0, 0, 33], expected[1, 0, 40]
    assert torch.equal(read, expected)


@pytest.mark.parametrize("rotary", ROTARY[1:])
@pytest.mark.parametrize("width", (0, 24, 16))
@pytest.mark.parametrize("make", (growing, preallocated))
def test_rotary_keys_that_cannot_be_packed(make, width, rotary, generator):
    storage = make("tq4", rotary)
    message = f"expected a width of rotary keys in {rotary} that is a multiple of 16 from 32 to 576, got {width}; use"
    with pytest.raises(ValueError, match=f"{message} rotary='exact'"):
        storage.append(*latent_tokens(generator, 10, width=width))
    assert storage.length == 0
    make("tq4").append(*latent_tokens(generator, 10, width=width))


@pytest.mark.parametrize("make", (growing, preallocated))
def test_other_tokens_are_refused(make, generator):
    with pytest.raises(ValueError, match=r"expected latents \[batch, 1, tokens, rank\], got \[2, 4, 10, 64\]"):
        make().append(*torch.randn(2, 2, 4, 10, 64, generator=generator).unbind())
    with pytest.raises(ValueError, match="expected a head_dim that is a multiple of 16 from 32 to 576, got 24"):
        make().append(*latent_tokens(generator, 10, rank=24))


def test_given_scales_are_of_latents_and_of_rotary_keys(generator):
    scales = {"key": torch.tensor([0.25]), "rotary": torch.tensor([0.5])}
    preset = latent_preset("fp8_e4m3", "fp8_e4m3")
    for storage in (
        GrowingStorage(preset, 64, 0, "reference", scales),
        PreallocatedStorage(preset, 64, 0, 600, "reference", scales),
    ):
        storage.append(*latent_tokens(generator, 300))
        view = storage.view()
        assert torch.equal(view.key.calibration.scale, torch.full((2, 1, 1, 1), 0.25))
        assert torch.equal(view.value.calibration.scale, torch.full((2, 1, 1, 1), 0.5))


@pytest.mark.parametrize("name", ("fp8_e4m3_token", "fp8_e5m2_token"))
def test_latents_with_a_float8_scale_per_token(name, generator):
    storage = growing("tq4", "int8", key=name)
    latents, rotary_keys = latent_tokens(generator, 200)
    storage.append(latents, rotary_keys)
    codes, scale, _ = quantizers.quantize(latents[:, :, :192], storage.preset.key, storage.key.calibration)
    assert torch.equal(storage.key.scale[:, :, :192], scale)
    assert torch.equal(codes_of(storage.key, 192)[..., :128], codes.to(torch.int16))
