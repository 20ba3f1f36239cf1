"""Shared fixtures."""

import subprocess
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from lss.cli import main
from lss.testing import RankPool
from tests.matrix import Matrix

PRELOADED = ["lss.cli", "transformers.models.gpt2.modeling_gpt2", "peft"]
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many examples the property test of batches draws; where the table of what is supported is written."""
    parser.addoption("--examples", type=int, default=30, help="examples of tests/ranks/test_property.py")
    parser.addoption("--matrix", type=Path, help="write the table of docs/support.md, of the tests that run")
    parser.addoption("--matrix-date", default=date.today().isoformat(), help="its date; else today")


def pytest_configure(config: pytest.Config) -> None:
    """The mark `supports`, and the plugin that gathers it."""
    config.addinivalue_line("markers", "supports(model, *features): what the test proves; see tests/matrix.py")
    if path := config.getoption("--matrix"):
        config.pluginmanager.register(Matrix(path, config.getoption("--matrix-date"), config.invocation_params.args))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four processes that any test may run a function on."""
    with RankPool(4, preload=PRELOADED) as pool:
        yield pool


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command `lss` in this process, which has imported torch already; ranks are processes."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        given = [str(word) for word in words]
        capfd.readouterr()
        try:
            code = main(given)
        except SystemExit as ended:  # by argparse
            code = ended.code
        finally:
            torch.use_deterministic_algorithms(False)
        return subprocess.CompletedProcess(given, code, *capfd.readouterr())

    return run


@pytest.fixture
def ranks8() -> Iterator[RankPool]:
    """Eight processes, for the few tests that need them."""
    with RankPool(8) as pool:
        yield pool
