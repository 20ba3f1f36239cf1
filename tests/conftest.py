"""Shared fixtures."""

from collections.abc import Iterator

import pytest

from lss.testing import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four processes that any test may run a function on."""
    with RankPool(4) as pool:
        yield pool
