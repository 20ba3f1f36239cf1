"""The examples train, over one rank as over two."""

import runpy
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from jsonargparse import auto_cli

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def losses(path: str, sequence: int) -> list[float]:
    """What the example says of each step, on the rank that speaks."""
    said = StringIO()
    with redirect_stdout(said):
        auto_cli(runpy.run_path(path)["main"], args=f"--length 65 --steps 4 --sequence {sequence}".split())
    return [float(line.split()[2]) for line in said.getvalue().splitlines() if line.startswith("step")]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_it_trains_the_same_over_two_ranks(ranks, path):
    (alone,), (first, _) = (ranks.run(losses, number, str(path), number) for number in (1, 2))
    assert len(alone) == 4
    assert alone[-1] < alone[0]
    assert first == pytest.approx(alone, abs=2e-3)
    assert len(path.read_text().splitlines()) < 60
