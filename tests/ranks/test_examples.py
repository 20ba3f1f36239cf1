"""The examples train, over one rank as over two."""

import runpy
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def losses(path: str, sequence: int) -> list[float]:
    """What the example says of each step, on the rank that speaks."""
    arguments, said = [path, "--length", "65", "--steps", "4", "--sequence", str(sequence)], StringIO()
    with patch.object(sys, "argv", arguments), redirect_stdout(said):
        runpy.run_path(path)["main"]()
    return [float(line.split()[2]) for line in said.getvalue().splitlines() if line.startswith("step")]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_it_trains_the_same_over_two_ranks(ranks, path):
    (alone,), (first, _) = (ranks.run(losses, number, str(path), number) for number in (1, 2))
    assert len(alone) == 4
    assert alone[-1] < alone[0]
    assert first == pytest.approx(alone, abs=2e-3)
    assert len(path.read_text().splitlines()) <= 60
