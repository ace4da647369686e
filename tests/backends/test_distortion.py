"""Quantisers: the error of every format is that of its codebook, and its scale what it says."""

import math

import pytest
import torch
from vectors import (
    ALL_FORMATS,
    PLAIN,
    every_float8,
    every_rotated,
    every_uniform,
    expected_mse,
    gaussian,
    name,
    read_back,
    relative_mse,
    stored,
)

from tq_cache.backends import quantizers, reference
from tq_cache.formats.codebook import Codebook
from tq_cache.formats.presets import FORMATS, Format
from tq_cache.formats.rotation import rotate

# ------------------------------------------------------------------------------------------------------ distortion
#
# Let g be a coordinate of unit variance, q its code value times the codebook's unit, and rho = E[gq]^2 / E[q^2] the
# squared cosine between a long vector and its codes.  The unit is the best one, so that E[gq] = E[q^2] = rho = 1 - D
# with D the codebook's distortion.  A stored factor a per vector gives the relative error |g - a q|^2 / |g|^2
# = 1 - 2 a E[gq] + a^2 E[q^2]:
#     norm           a = 1 / sqrt(E[q^2])    2 - 2 sqrt(rho)    = 2 - 2 sqrt(1 - D)
#     unbiased       a = 1 / E[gq]           1 / rho - 1        = 1 / (1 - D) - 1
# For D -> infinity coordinates of a rotated vector over its norm are N(0, 1).  At finite width they are those of a
# sphere, density (1 - t^2/D)^((D-3)/2), and as a fits each vector, E[cos^2] exceeds rho by a term of order 1 / D.


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


INT8 = FORMATS["rotary"]["int8"]


def mean_square_largest(n: int) -> float:
    """E[max |x|^2] of n values of N(0, 1)."""
    x = torch.linspace(0, 8, 8001, dtype=torch.float64)
    return float((2 * x * (1 - torch.erf(x / math.sqrt(2)) ** n)).sum() * 0.001)


@pytest.mark.parametrize("size", (1e-3, 1.0, 300.0))
@pytest.mark.parametrize("head_dim", (32, 64))
@pytest.mark.parametrize("outlier", (1.0, 8.0))
def test_distortion_of_int8(head_dim, size, outlier, generator):
    """Steps of largest / 127, the largest itself exact; rotated, a dominant channel is harmless."""
    x = size * gaussian(generator, 1, 2, 200_000 // head_dim // 2, head_dim)
    x[..., 3] *= outlier
    expected = mean_square_largest(head_dim) / 127**2 / 12 * (1 - 1 / head_dim)
    error = relative_mse(x, read_back(x, "rotary", INT8))
    assert error == pytest.approx(expected, rel=0.02) if outlier == 1 else error < 1.15 * expected


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


def of_scale(scale: str) -> list[tuple[str, Format]]:
    return [(role, fmt) for role, fmt in ALL_FORMATS if fmt.scale == scale]


@pytest.mark.parametrize(("role", "fmt"), of_scale("unbiased"), ids=name)
@pytest.mark.parametrize("head_dim", (32, 96, 128, 576))
def test_unbiased_vectors_lose_nothing_of_their_own_direction(role, fmt, head_dim, generator):
    """Keys: exact scores with themselves.  Values: weighted sums do not shrink, however many errors average out."""
    x = gaussian(generator, 2, 3, 65, head_dim) * torch.logspace(-2, 3, 65)[:, None]
    read = read_back(x, role, fmt)
    exact = x.double().square().sum(dim=-1)
    torch.testing.assert_close((x.double() * read).sum(dim=-1), exact, rtol=1.1 * HALF_ROUNDING, atol=0)


@pytest.mark.parametrize(("role", "fmt"), of_scale("norm"), ids=name)
@pytest.mark.parametrize("head_dim", (32, 96, 128, 576))
def test_norm_correction(role, fmt, head_dim, generator):
    x = gaussian(generator, 2, 3, 65, head_dim) * torch.logspace(-2, 3, 65)[:, None]
    read = read_back(x, role, fmt)
    torch.testing.assert_close(read.norm(dim=-1), x.double().norm(dim=-1), rtol=1.1 * HALF_ROUNDING, atol=0)


@every_rotated
def test_codes_are_the_nearest_in_the_rotated_space(role, fmt, generator):
    x = gaussian(generator, 1, 2, 33, 80, dtype=torch.float64)
    codes, _, _ = quantizers.quantize(x, fmt, PLAIN)
    unit = rotate(x) / x.norm(dim=-1, keepdim=True) * math.sqrt(80) / fmt.codebook.unit
    values = fmt.codebook.values(dtype=torch.float64)
    assert torch.equal(codes.int(), (unit[..., None] - values).abs().argmin(dim=-1).int())


@pytest.mark.parametrize("head_dim", (32, 48, 64))
def test_int8_codes_are_the_nearest_and_reach_127(head_dim, generator):
    """The scale is largest / 127 in float16, the codes are nearest to that: half a step off, and no code is -128."""
    x = gaussian(generator, 2, 3, 70, head_dim) * torch.logspace(-2, 3, 70)[:, None]
    states = stored(x, "rotary", INT8)
    r = rotate(x.double())
    torch.testing.assert_close(
        states.scale[:, :, :70].double(), r.abs().amax(dim=-1) / 127, rtol=1.1 * HALF_ROUNDING, atol=0
    )
    codes = quantizers.decode(states, torch.float64)[:, :, :70]
    assert (codes.abs().amax(dim=-1) == 127).all()
    step = states.scale[:, :, :70, None].double()
    clipped = 127 * HALF_ROUNDING  # steps by which the largest may be beyond 127 of them
    assert ((codes - r / step).abs() <= 0.5 + 1.1 * clipped).all()
    assert (((codes - r / step).abs() <= 0.5 + 1e-3) | (codes.abs() == 127)).all()


@pytest.mark.parametrize("size", (1e-9, 1e-7, 1e-6, 1e-5))
def test_int8_of_tiny_vectors_is_no_further_off_than_zero(size, generator):
    """Where the scale is subnormal, or zero, in float16."""
    x = size * gaussian(generator, 1, 2, 500, 64)
    read = read_back(x, "rotary", INT8)
    assert ((x.double() - read).norm(dim=-1) <= x.double().norm(dim=-1)).all()


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
