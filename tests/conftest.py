"""Fixtures shared by all tests."""

import os
from typing import Any

import pytest
import torch
from error_budget import seeded

from tq_cache.tools.runs import EMBEDDED_MODEL, load_model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="of the random numbers of tests, 0 by default")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["TQ_TEST_SEED"] = str(config.getoption("--seed"))  # so that scripts of `run_script` have it too


@pytest.fixture
def generator() -> torch.Generator:
    """A seeded source of random numbers, the same for every test."""
    return seeded(0)


@pytest.fixture(scope="session")
def embedded() -> tuple[Any, Any]:
    """The embedded model in float32, whose attention `make_cache` sets, and its tokenizer."""
    torch.set_num_threads(1)
    return load_model(EMBEDDED_MODEL, torch.float32)
