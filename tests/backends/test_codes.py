"""Quantisers: float8, zeros, huge and bad vectors, dtypes and layouts, storing in steps."""

import pytest
import torch
from vectors import PLAIN, calibrate, every_float8, every_format, gaussian, read_back, relative_mse, stored

from tq_cache.backends import quantizers, reference
from tq_cache.backends.calibration import FLOAT8_HEADROOM
from tq_cache.backends.calibration import calibrate as measure
from tq_cache.formats.presets import EXACT
from tq_cache.formats.states import PackedStates

# ---------------------------------------------------------------------------------------------------------- float8


@every_float8
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_float8_is_torchs_cast_of_the_scaled_vector(fmt, dtype, generator):
    x = (gaussian(generator, 2, 3, 70, 48) * torch.tensor([0.01, 1.0, 50.0])[:, None, None]).to(dtype)
    states = stored(x, "key", fmt)
    scale = states.calibration.scale
    codes = (x.float() / scale).to(fmt.float8)
    assert torch.equal(quantizers.decode(states)[:, :, :70], codes.float())
    assert torch.equal(reference.dequantize(states, 70, torch.float32), codes.float() * scale)


@every_float8
def test_float8_scale_is_a_power_of_two_with_headroom(fmt, generator):
    x = gaussian(generator, 2, 3, 70, 48) * torch.tensor([1e-6, 1.0, 1e4])[:, None, None]
    scale = calibrate(x, fmt).scale.double()
    assert scale.shape == (2, 3, 1, 1)
    assert torch.equal(torch.exp2(torch.log2(scale).round()), scale)
    room = scale * torch.finfo(fmt.float8).max / x.double().abs().amax(dim=(2, 3), keepdim=True)
    assert ((room >= FLOAT8_HEADROOM) & (room < 2 * FLOAT8_HEADROOM)).all()


@every_float8
def test_float8_scale_is_exact_at_powers_of_two(fmt):
    limit = torch.finfo(fmt.float8).max
    for exponent in range(-30, 31):
        x = torch.full((1, 1, 16, 32), limit / FLOAT8_HEADROOM * 2.0**exponent)
        assert float(calibrate(x, fmt).scale) == 2.0**exponent


@every_float8
def test_float8_saturates_beyond_the_headroom(fmt, generator):
    calibration = calibrate(gaussian(generator, 1, 1, 64, 32), fmt)
    limit = float(torch.finfo(fmt.float8).max * calibration.scale)
    x = torch.tensor([1.0, -1.0, 0.5, 1e20]).repeat(8)[None, None, None] * limit * 4
    read = read_back(x, "key", fmt, calibration)
    assert read[0, 0, 0, :4].tolist() == [limit, -limit, limit, limit]


@every_float8
@pytest.mark.parametrize(("center", "smooth"), [(True, 0.0), (False, 1.0), (True, 1.0)])
def test_float8_headroom_holds_for_what_is_quantised(fmt, center, smooth, generator):
    """Centring and smoothing come first: a rare spike in a quiet channel grows, and must not saturate."""
    x = gaussian(generator, 1, 1, 4096, 32) * 10
    x[..., 5] = 0.0
    x[0, 0, 100, 5] = 10.0
    calibration = calibrate(x, fmt, center, smooth)
    read = read_back(x, "key", fmt, calibration)
    torch.testing.assert_close(read[0, 0, 100, 5].float(), x[0, 0, 100, 5], rtol=0.13, atol=0)


# ----------------------------------------------------------------------------------------- zeros, constants, extremes


@every_format
def test_zero_vectors_read_back_as_zeros(role, fmt, generator):
    x = gaussian(generator, 1, 2, 20, 32)
    x[:, :, 3:7] = 0.0
    read = read_back(x, role, fmt)
    assert torch.equal(read[:, :, 3:7], torch.zeros(1, 2, 4, 32, dtype=torch.float64))
    assert torch.equal(read_back(torch.zeros_like(x), role, fmt), torch.zeros_like(x, dtype=torch.float64))


@every_format
def test_constant_vectors(role, fmt):
    """2.5 is exact in every format with a range or a float; rotated formats stay within the worst of their codes."""
    x = torch.full((1, 1, 20, 64), 2.5)
    read = read_back(x, role, fmt)
    if fmt.rotated:
        assert relative_mse(x, read) < 0.5 ** (2 * fmt.bits - 4)
    else:
        assert torch.equal(read, x.double())


@every_format
@pytest.mark.parametrize("size", (1e-30, 1e-4, 1e4, 1e30))
def test_extreme_sizes_stay_finite(role, fmt, size, generator):
    x = size * gaussian(generator, 1, 1, 20, 64)
    assert read_back(x, role, fmt).isfinite().all()


@every_format
def test_float16_scale_saturates_rather_than_overflows(role, fmt, generator):
    """Vectors beyond float16's range become as large as it allows, in their direction, and never infinite."""
    x = 1e6 * gaussian(generator, 1, 1, 20, 64)
    states = stored(x, role, fmt)
    for factor in (states.scale, states.zero):
        assert factor is None or factor.isfinite().all()
    read = reference.dequantize(states, 20, torch.float64)
    assert (torch.cosine_similarity(read, x.double(), dim=-1) > 0.75).all()  # signs alone give sqrt(2 / pi) = 0.80


BAD = [torch.nan, torch.inf, -torch.inf]


@every_format
@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize(("center", "smooth"), [(False, 0.0), (True, 0.65)], ids=["plain", "centred"])
def test_bad_tokens_read_back_as_nan_and_change_no_other(role, fmt, bad, center, smooth, generator):
    """Also where they come first and the calibration is measured on the same tokens."""
    clean = gaussian(generator, 2, 2, 70, 32) + 1.0
    x = clean.clone()
    x[0, 1, 0] = bad
    x[0, 1, 33, 7] = bad
    good = torch.ones(70, dtype=torch.bool)
    good[[0, 33]] = False
    # what the calibration should be: that of the good tokens (for the one row and head that has bad ones)
    without = measure(clean, fmt, center, smooth, good[None, None, :, None].expand(2, 1, -1, -1))
    calibration = calibrate(x, fmt, center, smooth)
    for part in ("center", "smooth", "scale"):
        measured, expected = getattr(calibration, part), getattr(without, part)
        assert (measured is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(measured[0, 1], expected[0, 1], atol=1e-6, rtol=1e-6)
    read = read_back(x, role, fmt, calibration)
    assert read[0, 1, 0].isnan().all()
    assert read[0, 1, 33, 7].isnan()
    if fmt.float8 is None:
        assert read[0, 1, 33].isnan().all()
    expected = read_back(clean, role, fmt, calibration)
    read[0, 1, ~good] = expected[0, 1, ~good]
    assert torch.equal(read, expected)


@pytest.mark.parametrize("bad", BAD, ids=str)
@every_format
def test_a_chunk_of_bad_tokens_leaves_a_usable_calibration(role, fmt, bad, generator):
    x = torch.full((1, 2, 20, 32), bad)
    calibration = calibrate(x, fmt, center=True, smooth=0.65)
    assert all(part is None or part.isfinite().all() for part in vars(calibration).values())
    later = gaussian(generator, 1, 2, 20, 32)
    assert read_back(later, role, fmt, calibration).isfinite().all()


@every_format
def test_a_huge_finite_token_changes_no_other(role, fmt, generator):
    """bfloat16 holds 1e30, whose square is no float32: the statistics must not become NaN for everybody."""
    x = gaussian(generator, 1, 2, 40, 32)
    x[0, 0, 5] = 1e30
    calibration = calibrate(x, fmt, center=True, smooth=0.65)
    assert all(part is None or part.isfinite().all() for part in vars(calibration).values())


# ----------------------------------------------------------------------------------------- dtypes and memory layouts


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_inputs_are_quantised_as_the_float32_values_they_are(role, fmt, dtype, generator):
    x = gaussian(generator, 1, 2, 70, 48).to(dtype)
    calibration = calibrate(x.float(), fmt, center=True, smooth=0.5)
    low, high = stored(x, role, fmt, calibration), stored(x.float(), role, fmt, calibration)
    assert torch.equal(low.packed, high.packed)
    read = reference.dequantize(low, 70, dtype)
    assert read.dtype == dtype
    assert torch.equal(read, reference.dequantize(high, 70, torch.float32).to(dtype))


@every_format
def test_float64_is_computed_in_float64(role, fmt, generator):
    x = gaussian(generator, 1, 2, 70, 48, dtype=torch.float64)
    codes, scale, zero = quantizers.quantize(x, fmt, calibrate(x, fmt))
    single = quantizers.quantize(x.float(), fmt, calibrate(x.float(), fmt))
    assert (codes != single[0]).double().mean() < 1e-3  # ties at a boundary only
    read = read_back(x, role, fmt)
    assert read.dtype == torch.float64
    torch.testing.assert_close(read_back(x.float(), role, fmt).norm(), read.norm(), rtol=1e-3, atol=0)


@every_format
def test_memory_layout_does_not_matter(role, fmt, generator):
    x = gaussian(generator, 2, 70, 3, 48).transpose(1, 2)  # as models hand keys over
    calibration = calibrate(x, fmt, center=True, smooth=0.5)
    assert torch.equal(stored(x, role, fmt, calibration).packed, stored(x.contiguous(), role, fmt, calibration).packed)


@every_format
def test_a_token_is_coded_alike_alone_and_in_company(role, fmt, generator):
    x = gaussian(generator, 2, 3, 70, 48)
    calibration = calibrate(x, fmt, center=True, smooth=0.5)
    together, _, _ = quantizers.quantize(x, fmt, calibration)
    alone, _, _ = quantizers.quantize(x[:, :, 41:42], fmt, calibration)
    assert (alone[:, :, 0] != together[:, :, 41]).double().mean() < 0.01  # sums in another order move ties only


# ----------------------------------------------------------------------------------------------- writing in place


@every_format
@pytest.mark.parametrize("split", (1, 37, 64, 70, 128))
def test_storing_in_two_steps_gives_the_bits_of_one(role, fmt, split, generator):
    """Also in the middle of a block, over whatever a crop has left behind."""
    x = gaussian(generator, 2, 2, 150, 48, dtype=torch.float64)
    calibration = calibrate(x, fmt, center=True, smooth=0.5)
    whole = stored(x, role, fmt, calibration)
    pieces = PackedStates.empty(role, fmt, x, 192, calibration)
    reference.store(pieces, 3 * x[:, :, : split + 20], 0)  # left behind
    reference.store(pieces, x[:, :, :split], 0)
    reference.store(pieces, x[:, :, split:], split)
    assert torch.equal(
        reference.dequantize(pieces, 150, torch.float64), reference.dequantize(whole, 150, torch.float64)
    )
    assert torch.equal(pieces.packed[:, :, :2], whole.packed[:, :, :2])


# ---------------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("head_dim", (0, 32, 64))
def test_exact_is_what_was_handed_over(head_dim, dtype, generator):
    """In any order of writing, bad elements too; of no width at all as well."""
    x = gaussian(generator, 2, 2, 150, head_dim).to(dtype)
    if head_dim:
        x[0, 1, 33, 7], x[1, 0, 70, 3] = torch.nan, torch.inf
    states = PackedStates.empty("rotary", EXACT, x, 192, PLAIN)
    assert (states.scale, states.zero) == (None, None)
    assert states.packed.dtype == dtype and states.packed.shape == (2, 2, 3, 64 * head_dim)
    reference.store(states, 3 * x[:, :, :90], 0)  # left behind
    reference.store(states, x[:, :, :70], 0)
    reference.store(states, x[:, :, 70:], 70)
    read = reference.dequantize(states, 150, dtype)
    assert read.dtype == dtype and read.shape == x.shape
    assert torch.equal(read.nan_to_num(7.0), x.nan_to_num(7.0))
    assert torch.equal(states.tokens(64, 150).packed, states.packed[:, :, 1:])
