"""Calibration: centre, channel sizes and which tokens count."""

import pytest
import torch
from vectors import all_count, calibrate, every_format, expected_mse, gaussian, read_back, stored

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
