"""Shared fixtures."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from lss.testing import RankPool

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many examples the property test of batches draws."""
    parser.addoption("--examples", type=int, default=60, help="examples of tests/ranks/test_property.py")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four processes that any test may run a function on."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture
def ranks8() -> Iterator[RankPool]:
    """Eight processes, for the few tests that need them."""
    with RankPool(8) as pool:
        yield pool
