"""Calibration: centre, channel sizes and which tokens count."""

import pytest
import torch
from vectors import all_count, calibrate, every_format, expected_mse, gaussian, read_back, stored

from tq_cache.backends.calibration import KEYS_ALONE, SMALLEST_SIZE, TRUSTED_TOKENS, query_energy
from tq_cache.backends.calibration import calibrate as measure
from tq_cache.formats.presets import FORMATS
from tq_cache.formats.states import Calibration

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


SIZES = torch.tensor([0.25, 1.0, 4.0, 16.0]).repeat(8)
QUERY_SIZES = torch.tensor([1.0, 2.0]).repeat_interleave(16)


def geometric(sizes: torch.Tensor) -> torch.Tensor:
    return sizes / sizes.log().mean().exp()


@pytest.mark.parametrize("exponent", (0.0, 0.5, 1.0))
def test_smoothing_divides_by_the_size_of_keys_relative_to_queries(exponent, generator):
    x = gaussian(generator, 1, 1, 50_000, 32) * SIZES
    query = gaussian(generator, 1, 4, 10_000, 32) * QUERY_SIZES
    energy = query_energy(query, 1, None)
    fmt = FORMATS["key"]["tq4"]
    aware = measure(x, fmt, True, exponent, all_count(x), queries=energy).smooth
    alone = measure(x, fmt, True, exponent, all_count(x)).smooth
    if exponent == 0.0:
        assert aware is None and alone is None
        return
    torch.testing.assert_close(aware[0, 0, 0], geometric((SIZES / QUERY_SIZES) ** exponent), rtol=0.03, atol=0)
    torch.testing.assert_close(alone[0, 0, 0], geometric(SIZES ** (KEYS_ALONE * exponent)), rtol=0.03, atol=0)


def test_queries_of_padding_do_not_count(generator):
    """Nor do those of other heads' groups."""
    query = gaussian(generator, 2, 6, 50, 32)
    counts = torch.ones(2, 50, dtype=torch.bool)
    counts[1, :20] = False
    spoiled = query.clone()
    spoiled[1, :, :20] = 1e4
    spoiled[0, 0, 3, 5] = torch.nan  # a query with NaN does not count either
    squares, count = query_energy(spoiled, 2, counts)
    kept = query.unflatten(1, (2, 3))
    torch.testing.assert_close(squares[1, :, 0], kept[1, :, :, 20:].square().sum(dim=(1, 2)))
    torch.testing.assert_close(squares[0, 1, 0], kept[0, 1].square().sum(dim=(0, 1)) - kept[0, 1, 0, 3].square())
    assert count[:, 0, 0, 0].tolist() == [3 * 50 - 1, 3 * 30]


def test_one_query_says_little(generator):
    """A channel that it happens not to use is not divided by zero, nor taken for one that no query uses."""
    x = gaussian(generator, 1, 1, 4000, 32)
    query = gaussian(generator, 1, 1, 1, 32)
    query[..., 3] = 0
    smooth = measure(x, FORMATS["key"]["tq4"], True, 0.5, all_count(x), queries=query_energy(query, 1, None)).smooth
    assert 0.5 < smooth.min() and smooth.max() < 2


def test_center_is_the_mean(generator):
    x = gaussian(generator, 2, 3, 50, 32) + gaussian(generator, 2, 3, 1, 32)
    center = calibrate(x, FORMATS["value"]["tq4"], center=True).center
    torch.testing.assert_close(center, x.mean(dim=2, keepdim=True))


def test_a_dead_channel_is_taken_for_a_small_one(generator):
    """It may come to life: later tokens must not be divided by next to nothing."""
    x = gaussian(generator, 1, 1, 5000, 32)
    x[..., 4] = 0.0
    smooth = calibrate(x, FORMATS["key"]["tq4"], center=True, smooth=1.0).smooth[0, 0, 0]
    assert smooth[4] / smooth.median() == pytest.approx(SMALLEST_SIZE**KEYS_ALONE, rel=0.05)
    all_dead = calibrate(torch.zeros_like(x), FORMATS["key"]["tq4"], center=True, smooth=1.0).smooth
    assert torch.equal(all_dead, torch.ones_like(all_dead))


def test_sizes_of_few_tokens_are_trusted_in_proportion(generator):
    x = gaussian(generator, 1, 1, 50_000, 32) * SIZES
    fmt = FORMATS["key"]["tq4"]
    whole = calibrate(x, fmt, center=True, smooth=1.0).smooth.log()
    for count in (16, 64, 500):
        part = calibrate(x[:, :, :count], fmt, center=True, smooth=1.0).smooth.log()
        slope = float((part * whole).sum() / whole.square().sum())
        assert slope == pytest.approx(count / (count + TRUSTED_TOKENS), rel=0.1)


def test_where_nothing_counts_the_calibration_is_neutral(generator):
    x = gaussian(generator, 1, 2, 50, 32)
    none = torch.zeros(1, 1, 50, 1, dtype=torch.bool)
    for fmt in (FORMATS["key"]["tq4"], FORMATS["key"]["fp8_e4m3"]):
        neutral = measure(x, fmt, True, 0.5, none)
        assert not neutral.center.any() and torch.equal(neutral.smooth, torch.ones(1, 2, 1, 32))
        assert neutral.scale is None or torch.equal(neutral.scale, torch.ones(1, 2, 1, 1))


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
