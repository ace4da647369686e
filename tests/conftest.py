"""Fixtures shared by all tests."""

from typing import Any

import pytest
import torch

from tq_cache.tools.runs import EMBEDDED_MODEL, load_model


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded source of random numbers, the same for every test."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def embedded() -> tuple[Any, Any]:
    """The embedded model in float32, whose attention `make_cache` sets, and its tokenizer."""
    torch.set_num_threads(1)
    return load_model(EMBEDDED_MODEL, torch.float32)
