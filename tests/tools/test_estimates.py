"""Statistics on numbers small enough to work out by hand."""

import math

import pytest
import torch

from tq_cache.tools.estimates import by_quarter, median, over_texts, paired_difference, percentile


def test_error_is_over_texts_and_not_over_tokens():
    """Text means 1, 2, 6: mean 3, variance (4 + 1 + 9) / 2, however far tokens within a text are apart."""
    values = torch.tensor([[1.0, 1.0], [0.0, 4.0], [-94.0, 106.0]])
    found = over_texts(values)
    assert found.mean == 3 and found.error == pytest.approx(math.sqrt(7 / 3))
    assert over_texts(values[:1]).error is None


def test_a_paired_difference_knows_no_hard_texts():
    """Losses of two texts far apart, and a cache that adds 0.1 and 0.3 to them: 0.2 +- 0.1, not +- 5."""
    exact = torch.tensor([[1.0, 2.0], [11.0, 12.0]], dtype=torch.float64)
    other = exact + torch.tensor([[0.0, 0.2], [0.2, 0.4]])
    found = paired_difference(other, exact)
    assert found.mean == pytest.approx(0.2) and found.error == pytest.approx(0.1)
    assert over_texts(other).error > 5


@pytest.mark.parametrize("percent, value", [(0, 0), (50, 50), (99, 99), (99.9, 99.9), (100, 100)])
def test_percentiles(percent, value):
    shuffled = torch.randperm(101, generator=torch.Generator().manual_seed(0)).double()
    assert percentile(shuffled, percent) == pytest.approx(value)
    assert percentile(shuffled[:100].view(10, 10), percent) == pytest.approx(
        torch.quantile(shuffled[:100], percent / 100).item()
    )


def test_quarters_and_median():
    assert by_quarter(torch.arange(16.0).view(2, 8)) == (4.5, 6.5, 8.5, 10.5)
    assert median(torch.tensor([4, 1, 3])) == 3 and median(torch.tensor([4, 1, 3, 9])) == 3.5
