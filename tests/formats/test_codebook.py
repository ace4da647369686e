"""Codebooks: their distortions by numerical integration, exactness in e4m3, nearest values by brute force."""

import math

import pytest
import torch

from tq_cache.formats.codebook import GAUSSIAN, UNIFORM, Codebook

CODEBOOKS = [*GAUSSIAN.values(), *UNIFORM.values()]
# Distortion of the unrestricted optimum for N(0, 1): Max 1960, table I.
LLOYD_MAX = {2: 0.117482, 3: 0.034548, 4: 0.009501}

by_name = pytest.mark.parametrize("codebook", CODEBOOKS, ids=lambda codebook: codebook.name)
by_gaussian_bits = pytest.mark.parametrize("bits", GAUSSIAN)

STEP = 1e-4
HALF_LINE = (torch.arange(90_000, dtype=torch.float64) + 0.5) * STEP
DENSITY = torch.exp(-HALF_LINE.square() / 2) * (2 / math.sqrt(2 * math.pi) * STEP)  # both halves of N(0, 1)


def distortion(magnitudes: tuple[float, ...], unit: float) -> float:
    """E[(x - nearest)^2] for N(0, 1) by the midpoint rule; the smallest of all differences, so no use of `nearest`."""
    error = torch.full_like(HALF_LINE, torch.inf)
    for magnitude in magnitudes:
        error = torch.minimum(error, (HALF_LINE - magnitude * unit).square())
    return float(error @ DENSITY)


def density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def mass(low: float, high: float) -> float:
    return (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2


def closed_form_distortion(magnitudes: tuple[float, ...], unit: float) -> float:
    """E[(x - nearest)^2] = 1 - 2 E[x q] + E[q^2], cell by cell."""
    values = [magnitude * unit for magnitude in magnitudes]
    edges = [0.0, *[(a + b) / 2 for a, b in zip(values, values[1:], strict=False)], 40.0]
    cells = zip(values, edges, edges[1:], strict=False)
    return 1 + 2 * sum(v * v * mass(low, high) - 2 * v * (density(low) - density(high)) for v, low, high in cells)


def best_unit(magnitudes: tuple[float, ...], around: float) -> tuple[float, float]:
    """Unit of the least distortion within 20 % of `around`, and that distortion (golden section)."""
    low, high = 0.8 * around, 1.2 * around
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        if closed_form_distortion(magnitudes, a) < closed_form_distortion(magnitudes, b):
            high = b
        else:
            low = a
    return (low + high) / 2, closed_form_distortion(magnitudes, (low + high) / 2)


def lloyd_max(levels: int) -> float:
    """Distortion of Lloyd's iteration run to its end, in closed form."""
    centroids = [3 * (i + 0.5) / (levels // 2) for i in range(levels // 2)]
    for _ in range(3000):
        edges = [0.0, *[(a + b) / 2 for a, b in zip(centroids, centroids[1:], strict=False)], 40.0]
        cells = list(zip(edges, edges[1:], strict=False))
        centroids = [(density(low) - density(high)) / mass(low, high) for low, high in cells]
    return 1 - 2 * sum(c * c * mass(low, high) for c, (low, high) in zip(centroids, cells, strict=True))


@by_name
def test_distortion_field(codebook):
    assert distortion(codebook.magnitudes, codebook.unit) == pytest.approx(codebook.distortion, abs=1e-6)


@by_gaussian_bits
def test_gaussian_is_within_one_percent_of_lloyd_max(bits):
    assert lloyd_max(2**bits) == pytest.approx(LLOYD_MAX[bits], abs=1e-6)
    ratio = GAUSSIAN[bits].distortion / LLOYD_MAX[bits]
    assert 1 - 1e-5 <= ratio <= 1.01
    assert ratio == pytest.approx({2: 1.0, 3: 1.001, 4: 1.007}[bits], abs=5e-4)  # what the docstring says


@by_name
def test_unit_is_the_best_one(codebook):
    unit, least = best_unit(codebook.magnitudes, codebook.unit)
    assert codebook.unit == pytest.approx(unit, rel=1e-3)
    assert codebook.distortion == pytest.approx(least, abs=1e-6)


@by_gaussian_bits
def test_no_neighbouring_e4m3_magnitudes_are_better(bits):
    codebook = GAUSSIAN[bits]
    e4m3 = sorted(torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist())
    for i, magnitude in enumerate(codebook.magnitudes):
        for step in (-1, 1):
            changed = list(codebook.magnitudes)
            changed[i] = e4m3[e4m3.index(magnitude) + step]
            assert best_unit(tuple(changed), codebook.unit)[1] > codebook.distortion - 1e-7, changed


@by_name
def test_magnitudes_are_exact_in_e4m3_and_ordered(codebook):
    exact = torch.tensor(codebook.magnitudes, dtype=torch.float64)
    assert torch.equal(exact.to(torch.float8_e4m3fn).double(), exact)
    assert (exact.diff() > 0).all() and exact[0] > 0


@by_name
def test_codes_are_sign_and_magnitude(codebook):
    half = 2 ** (codebook.bits - 1)
    values = codebook.values(dtype=torch.float64)
    assert values.shape == (2 * half,) and len(codebook.magnitudes) == half
    assert torch.equal(values[half:], -values[:half])
    assert values[:half].tolist() == list(codebook.magnitudes)


def test_gaussian_and_uniform_are_keyed_by_their_bits():
    assert all(codebook.bits == bits for table in (GAUSSIAN, UNIFORM) for bits, codebook in table.items())


@by_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nearest_is_nearest(codebook, dtype, generator):
    reach = 1.5 * codebook.magnitudes[-1]
    x = (torch.rand(64, 257, generator=generator, dtype=dtype) * 2 - 1) * reach
    codes = codebook.nearest(x)
    assert codes.dtype == torch.uint8
    values = codebook.values(dtype=torch.float64)
    error = (x.double() - values[codes.int()]).abs()
    assert torch.equal(error, (x.double()[..., None] - values).abs().amin(dim=-1))
    assert torch.equal(codebook.nearest(x.T), codes.T)  # not contiguous


@by_name
def test_nearest_finds_the_values_themselves(codebook):
    assert codebook.nearest(codebook.values()).tolist() == list(range(2**codebook.bits))


@by_name
def test_ties_go_to_the_smaller_magnitude(codebook):
    pairs = list(zip(codebook.magnitudes, codebook.magnitudes[1:], strict=False))
    ties = torch.tensor([(low + high) / 2 for low, high in pairs])
    assert codebook.nearest(ties).tolist() == list(range(len(pairs)))
    half = len(codebook.magnitudes)
    assert codebook.nearest(-ties).tolist() == [half + i for i in range(len(pairs))]
    just_above = torch.nextafter(ties, torch.tensor(torch.inf))
    assert codebook.nearest(just_above).tolist() == list(range(1, len(pairs) + 1))


@by_name
def test_extremes(codebook):
    half = len(codebook.magnitudes)
    x = torch.tensor([0.0, -0.0, 1e30, -1e30, torch.inf, -torch.inf])
    assert codebook.nearest(x).tolist() == [0, 0, half - 1, 2 * half - 1, half - 1, 2 * half - 1]
    assert int(codebook.nearest(torch.tensor(torch.nan))) < 2 * half  # some code: its scale is NaN


def test_a_codebook_is_a_value():
    assert GAUSSIAN[4] == Codebook(**{name: getattr(GAUSSIAN[4], name) for name in GAUSSIAN[4].__dataclass_fields__})
