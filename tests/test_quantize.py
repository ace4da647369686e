"""Quantisers: distortion against theory, what each scale rule promises, float8 against torch's casts, calibration."""

import math

import pytest
import torch

from tq_cache.backends import quantizers, reference
from tq_cache.backends.calibration import calibrate as measure
from tq_cache.formats.codebook import Codebook
from tq_cache.formats.packing import BLOCK_TOKENS
from tq_cache.formats.presets import FORMATS, Format
from tq_cache.formats.rotation import rotate
from tq_cache.formats.states import Calibration, PackedStates

PLAIN = Calibration()
ALL_FORMATS = [(role, fmt) for role, formats in FORMATS.items() for fmt in formats.values()]
ROTATED = [(role, fmt) for role, fmt in ALL_FORMATS if fmt.rotated]
UNIFORM = [fmt for fmt in FORMATS["value"].values() if fmt.has_zero]
FLOAT8 = [fmt for fmt in FORMATS["key"].values() if fmt.scale == "per_head"]


def name(parameter) -> str | None:
    return parameter.name if isinstance(parameter, Format) else None


every_format = pytest.mark.parametrize(("role", "fmt"), ALL_FORMATS, ids=name)
every_rotated = pytest.mark.parametrize(("role", "fmt"), ROTATED, ids=name)
every_uniform = pytest.mark.parametrize("fmt", UNIFORM, ids=name)
every_float8 = pytest.mark.parametrize("fmt", FLOAT8, ids=name)


def all_count(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[0], 1, x.shape[2], 1, dtype=torch.bool)


def calibrate(x: torch.Tensor, fmt: Format, center: bool = False, smooth: float = 0.0) -> Calibration:
    return measure(x, fmt, center, smooth, all_count(x))


def stored(x: torch.Tensor, role: str, fmt: Format, calibration: Calibration | None = None) -> PackedStates:
    capacity = -(-x.shape[2] // BLOCK_TOKENS) * BLOCK_TOKENS
    states = PackedStates.empty(role, fmt, x, capacity, calibrate(x, fmt) if calibration is None else calibration)
    reference.store(states, x, 0)
    return states


def read_back(x: torch.Tensor, role: str, fmt: Format, calibration: Calibration | None = None) -> torch.Tensor:
    return reference.dequantize(stored(x, role, fmt, calibration), x.shape[2], torch.float64)


def gaussian(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=dtype)


def relative_mse(x: torch.Tensor, read: torch.Tensor) -> float:
    return float((x.double() - read).square().sum() / x.double().square().sum())


# ------------------------------------------------------------------------------------------------------ distortion
#
# Let g be a coordinate of unit variance, q its code value times the codebook's unit, and rho = E[gq]^2 / E[q^2] the
# squared cosine between a long vector and its codes.  The unit is the best one, so that E[gq] = E[q^2] = rho = 1 - D
# with D the codebook's distortion.  A stored factor a per vector gives the relative error |g - a q|^2 / |g|^2
# = 1 - 2 a E[gq] + a^2 E[q^2]:
#     least_squares  a = E[gq] / E[q^2]      1 - rho            = D
#     norm           a = 1 / sqrt(E[q^2])    2 - 2 sqrt(rho)    = 2 - 2 sqrt(1 - D)
#     unbiased       a = 1 / E[gq]           1 / rho - 1        = 1 / (1 - D) - 1
# For D -> infinity coordinates of a rotated vector over its norm are N(0, 1).  At finite width they are those of a
# sphere, density (1 - t^2/D)^((D-3)/2), and as a fits each vector, E[cos^2] exceeds rho by a term of order 1 / D.


def expected_mse(fmt: Format, rho: float) -> float:
    return {"least_squares": 1 - rho, "norm": 2 - 2 * rho**0.5, "unbiased": 1 / rho - 1}[fmt.scale]


def cosine_squared_on_sphere(codebook: Codebook, head_dim: int) -> float:
    t = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000 * math.sqrt(head_dim)
    weight = (1 - t.square() / head_dim).clamp_min(0) ** ((head_dim - 3) / 2)
    weight /= weight.sum()
    values = torch.tensor(codebook.magnitudes, dtype=torch.float64) * codebook.unit
    q = values[(t[:, None] - values).abs().argmin(dim=1)]
    inner, square = float((t * q) @ weight), float(q.square() @ weight)
    # second order of E[A^2 / B], A and B the means of tq and q^2 over a vector whose mean of t^2 is 1
    deviation, constraint = t * q / inner - q.square() / square, t.square() - 1
    slope = (deviation * constraint) @ weight / (constraint.square() @ weight)
    variance = float((deviation - slope * constraint).square() @ weight) / head_dim
    return inner**2 / square * (1 + variance)


@every_rotated
def test_distortion_of_wide_gaussian_vectors_is_the_codebooks(role, fmt, generator):
    x = gaussian(generator, 1, 2, 512, 576)
    assert relative_mse(x, read_back(x, role, fmt)) == pytest.approx(
        expected_mse(fmt, 1 - fmt.codebook.distortion), rel=0.02
    )


@every_rotated
@pytest.mark.parametrize("head_dim", (32, 80, 128, 256))
def test_distortion_of_gaussian_vectors_of_any_width(role, fmt, head_dim, generator):
    x = 7.0 * gaussian(generator, 1, 2, 200_000 // head_dim // 2, head_dim)  # the size does not matter
    rho = cosine_squared_on_sphere(fmt.codebook, head_dim)
    assert relative_mse(x, read_back(x, role, fmt)) == pytest.approx(expected_mse(fmt, rho), rel=0.02)


@every_rotated
def test_rotation_makes_a_dominant_channel_harmless(role, fmt, generator):
    x = gaussian(generator, 1, 2, 256, 128)
    x[..., 3] *= 8.0
    assert relative_mse(x, read_back(x, role, fmt)) < 1.15 * expected_mse(fmt, 1 - fmt.codebook.distortion)


def mean_square_range(n: int) -> float:
    """E[(max - min)^2] of n values of N(0, 1), by integration over both order statistics."""
    x = torch.linspace(-8, 8, 1601, dtype=torch.float64)
    below = torch.special.ndtr(x)
    low, high = below[:, None], below[None, :]
    # P(min <= x, max >= y) for x <= y, integrated twice
    joint = 1 - high**n - (1 - low) ** n + (high - low).clamp_min(0) ** n
    return float(2 * (torch.triu(joint, 1).sum() + joint.diagonal().sum() / 2) * 0.01**2)


@every_uniform
@pytest.mark.parametrize("head_dim", (32, 128))
def test_distortion_of_min_max_codes(fmt, head_dim, generator):
    """Steps of range / (levels - 1), error uniform within a step; the two extremes themselves are exact."""
    x = gaussian(generator, 1, 2, 200_000 // head_dim // 2, head_dim)
    step_squared = mean_square_range(head_dim) / (2**fmt.bits - 1) ** 2
    expected = step_squared / 12 * (1 - 2 / head_dim)
    assert relative_mse(x, read_back(x, "value", fmt)) == pytest.approx(expected, rel=0.02)


@every_float8
@pytest.mark.parametrize("size", (1e-3, 1.0, 300.0))
def test_distortion_of_float8(fmt, size, generator):
    """Against the nearest of all finite values of the format, integrated over N(0, 1)."""
    mantissa = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}[fmt.float8]
    x = torch.linspace(1e-4, 8, 80_000, dtype=torch.float64)
    spacing = torch.exp2(torch.floor(torch.log2(x)) - mantissa)
    density = torch.exp(-x.square() / 2)
    expected = float((spacing.square() / 12 * density).sum() / density.sum())
    data = size * gaussian(generator, 1, 2, 1000, 128)
    assert relative_mse(data, read_back(data, "key", fmt)) == pytest.approx(expected, rel=0.02)


# ----------------------------------------------------------------------------------------------- the stored factor

HALF_ROUNDING = 2**-11  # of the stored factor


def keys_of(scale: str) -> list[Format]:
    return [fmt for fmt in FORMATS["key"].values() if fmt.scale == scale]


@pytest.mark.parametrize("fmt", keys_of("unbiased"), ids=name)
@pytest.mark.parametrize("head_dim", (32, 96, 128, 576))
def test_unbiased_keys_have_exact_scores_with_themselves(fmt, head_dim, generator):
    x = gaussian(generator, 2, 3, 65, head_dim) * torch.logspace(-2, 3, 65)[:, None]
    read = read_back(x, "key", fmt)
    exact = x.double().square().sum(dim=-1)
    torch.testing.assert_close((x.double() * read).sum(dim=-1), exact, rtol=1.1 * HALF_ROUNDING, atol=0)


@pytest.mark.parametrize("fmt", keys_of("norm"), ids=name)
@pytest.mark.parametrize("head_dim", (32, 96, 128, 576))
def test_norm_correction(fmt, head_dim, generator):
    x = gaussian(generator, 2, 3, 65, head_dim) * torch.logspace(-2, 3, 65)[:, None]
    read = read_back(x, "key", fmt)
    torch.testing.assert_close(read.norm(dim=-1), x.double().norm(dim=-1), rtol=1.1 * HALF_ROUNDING, atol=0)


@pytest.mark.parametrize("bits", (2, 3, 4))
def test_least_squares_values_cannot_be_scaled_better(bits, generator):
    x = gaussian(generator, 1, 2, 65, 128)
    read = read_back(x, "value", FORMATS["value"][f"tq{bits}"])
    best = (x * read).sum(dim=-1) / read.square().sum(dim=-1)
    torch.testing.assert_close(best, torch.ones_like(best), rtol=1.1 * HALF_ROUNDING, atol=0)


@every_rotated
def test_codes_are_the_nearest_in_the_rotated_space(role, fmt, generator):
    x = gaussian(generator, 1, 2, 33, 80, dtype=torch.float64)
    codes, _, _ = quantizers.quantize(x, fmt, PLAIN)
    unit = rotate(x) / x.norm(dim=-1, keepdim=True) * math.sqrt(80) / fmt.codebook.unit
    values = fmt.codebook.values(dtype=torch.float64)
    assert torch.equal(codes.int(), (unit[..., None] - values).abs().argmin(dim=-1).int())


@every_uniform
def test_min_max_range_is_covered(fmt, generator):
    """No element is further than half a step off, up to float16 rounding of scale and zero; both ends are reached."""
    x = gaussian(generator, 2, 2, 70, 96) + 3.0 * gaussian(generator, 2, 2, 70, 1)
    states = stored(x, "value", fmt)
    read = reference.dequantize(states, 70, torch.float64)
    low, high = x.amin(dim=-1).double(), x.amax(dim=-1).double()
    levels = 2**fmt.bits
    half_step = (high - low) / (levels - 1) / 2
    # The midpoint is rounded, the range made symmetric around it (twice that rounding at one end), the step rounded.
    rounding = HALF_ROUNDING * (2 * (high + low).abs() / 2 + (high - low) / 2) + 1e-6
    assert ((x.double() - read).abs().amax(dim=-1) <= half_step + rounding).all()
    assert ((read.amin(dim=-1) - low).abs() <= rounding).all()
    assert ((read.amax(dim=-1) - high).abs() <= rounding).all()
    codes, _, _ = quantizers.quantize(x, fmt, states.calibration)
    assert all(len(vector.unique()) <= levels for vector in read[0, 0])
    assert int(codes.max()) == levels - 1


@every_uniform
def test_min_max_with_a_large_offset_clips_nothing(fmt, generator):
    """Rounding the midpoint to float16 must not push an end of the range out of reach."""
    x = 100.0 + 0.1 * gaussian(generator, 1, 1, 64, 64)
    read = read_back(x, "value", fmt)
    midpoint_rounding = float(torch.finfo(torch.float16).eps) * 64 / 2  # 100 lies in [64, 128)
    half_step = (x.amax(dim=-1) - x.amin(dim=-1)).double() / 2 + midpoint_rounding
    half_step = half_step / (2**fmt.bits - 1)  # of a range that contains both ends around the rounded midpoint
    assert ((x.double() - read).abs().amax(dim=-1) <= 1.01 * half_step + 1e-4).all()


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
    assert ((room >= 4) & (room < 8)).all()


@every_float8
def test_float8_scale_is_exact_at_powers_of_two(fmt):
    limit = torch.finfo(fmt.float8).max
    for exponent in range(-30, 31):
        x = torch.full((1, 1, 16, 32), limit / 4 * 2.0**exponent)
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


# ----------------------------------------------------------------------------------------- centring and smoothing


def fine(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Values of few bits, so that sums and products of them are exact."""
    return torch.randint(-8, 9, shape, generator=generator).double()


@every_format
def test_center_is_exactly_undone(role, fmt, generator):
    x, center = fine(generator, 1, 2, 64, 32), 1000 * fine(generator, 1, 2, 1, 32)
    plain = Calibration(scale=calibrate(x, fmt).scale)
    moved = Calibration(center=center, scale=plain.scale)
    assert torch.equal(stored(x + center, role, fmt, moved).packed, stored(x, role, fmt, plain).packed)
    difference = read_back(x + center, role, fmt, moved) - read_back(x, role, fmt, plain)
    torch.testing.assert_close(difference, center.expand_as(x), rtol=0, atol=1e-10)


@every_format
def test_smoothing_is_exactly_undone(role, fmt, generator):
    x, smooth = fine(generator, 1, 2, 64, 32), 2.0 ** (fine(generator, 1, 2, 1, 32) / 4).floor()
    plain = Calibration(scale=calibrate(x, fmt).scale)
    scaled = Calibration(smooth=smooth, scale=plain.scale)
    assert torch.equal(stored(x * smooth, role, fmt, scaled).packed, stored(x, role, fmt, plain).packed)
    torch.testing.assert_close(
        read_back(x * smooth, role, fmt, scaled), read_back(x, role, fmt, plain) * smooth, rtol=1e-14, atol=0
    )


@pytest.mark.parametrize("bits", (3, 4))
def test_centring_removes_a_constant_part(bits, generator):
    """The error is relative to what varies, not to a bias a hundred times larger (Qwen2's keys)."""
    varying = gaussian(generator, 1, 2, 512, 128)
    x = varying + 100 * gaussian(generator, 1, 2, 1, 128)
    fmt = FORMATS["key"][f"tq{bits}"]
    read = read_back(x, "key", fmt, calibrate(x, fmt, center=True))
    error = float((x.double() - read).square().mean() / varying.double().square().mean())
    assert error < 1.02 * expected_mse(fmt, 1 - fmt.codebook.distortion)


@pytest.mark.parametrize("exponent", (0.0, 0.5, 1.0))
def test_smoothing_divides_by_the_relative_size_of_a_channel(exponent, generator):
    sizes = torch.tensor([0.25, 1.0, 4.0, 16.0]).repeat(8)
    x = gaussian(generator, 1, 1, 20_000, 32) * sizes
    measured = calibrate(x, FORMATS["key"]["tq4"], center=True, smooth=exponent).smooth
    if exponent == 0.0:
        assert measured is None
    else:
        torch.testing.assert_close(measured[0, 0, 0], (sizes / sizes.mean()) ** exponent, rtol=0.03, atol=0)


def test_center_is_the_mean(generator):
    x = gaussian(generator, 2, 3, 50, 32) + gaussian(generator, 2, 3, 1, 32)
    center = calibrate(x, FORMATS["value"]["tq4"], center=True).center
    torch.testing.assert_close(center, x.mean(dim=2, keepdim=True))


def test_a_dead_channel_does_not_divide_by_zero(generator):
    x = gaussian(generator, 1, 1, 50, 32)
    x[..., 4] = 0.0
    smooth = calibrate(x, FORMATS["key"]["tq4"], center=True, smooth=1.0).smooth
    assert smooth.isfinite().all() and (smooth > 0).all()
    all_dead = calibrate(torch.zeros_like(x), FORMATS["key"]["tq4"], center=True, smooth=1.0).smooth
    assert torch.equal(all_dead, torch.ones_like(all_dead))


def test_few_tokens_leave_center_and_smoothing_neutral(generator):
    fmt = FORMATS["key"]["tq4"]
    few = calibrate(gaussian(generator, 1, 2, 15, 32), fmt, center=True, smooth=1.0)
    assert torch.equal(few.center, torch.zeros(1, 2, 1, 32)) and torch.equal(few.smooth, torch.ones(1, 2, 1, 32))
    enough = calibrate(gaussian(generator, 1, 2, 16, 32), fmt, center=True, smooth=1.0)
    assert enough.center.any() and (enough.smooth != 1).all()


@every_format
def test_rows_are_calibrated_on_the_tokens_that_count(role, fmt, generator):
    x = gaussian(generator, 2, 3, 60, 32) + 1.0
    counts = all_count(x)
    counts[1, :, :20] = False
    x[1, :, :20] = 1e3
    together = measure(x, fmt, True, 0.65, counts)
    alone = calibrate(x[1:, :, 20:], fmt, True, 0.65)
    first = calibrate(x[:1], fmt, True, 0.65)
    for part, expected in vars(alone).items():
        if expected is not None:
            torch.testing.assert_close(getattr(together, part)[1:], expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(getattr(together, part)[:1], getattr(first, part), rtol=1e-5, atol=1e-6)


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
