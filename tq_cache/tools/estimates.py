"""Means over tokens and texts, and how far they can be trusted.

Tokens of one text depend on each other, so errors are those over texts: the standard deviation of the texts' means,
divided by the square root of how many there are.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Estimate:
    """A mean, and its standard error over texts; None with one text, which tells nothing about others."""

    mean: float
    error: float | None


def over_texts(values: torch.Tensor) -> Estimate:
    """The mean of `values`, one number per text and token [N, T], with its error over texts."""
    means = values.double().mean(dim=1)
    error = (means.std(correction=1) / math.sqrt(len(means))).item() if len(means) > 1 else None
    return Estimate(means.mean().item(), error)


def paired_difference(values: torch.Tensor, others: torch.Tensor) -> Estimate:
    """Mean of `values` - `others` on the same texts and tokens, [N, T] each.

    Its error is that of the difference, text by text: how hard a text is falls out.
    """
    return over_texts(values.double() - others.double())


def percentile(values: torch.Tensor, percent: float) -> float:
    """Of all `values`, interpolated linearly between the two nearest."""
    ordered = values.double().flatten().sort().values
    place = percent / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], place - low).item()


def by_quarter(values: torch.Tensor) -> tuple[float, ...]:
    """Mean over the first, second, third and last quarter of the tokens of `values` [N, T], T of 4 or more."""
    return tuple(part.double().mean().item() for part in values.tensor_split(4, dim=1))


def median(values: torch.Tensor) -> float:
    """The middle one of `values` [N], or the mean of the two in the middle."""
    return percentile(values, 50)
