"""Fixtures shared by all tests."""

import pytest
import torch


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded source of random numbers, the same for every test."""
    return torch.Generator().manual_seed(0)
