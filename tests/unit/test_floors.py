"""Who may call what: collectives in one file, none of them in the models."""

import ast
from pathlib import Path

import pytest

import lss

SOURCE = Path(lss.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
COLLECTIVES = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather_object",
    "irecv",
    "isend",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter_object_list",
}


def distributed_attributes(path: Path) -> set[str]:
    """Names taken from torch.distributed under its usual alias."""
    tree = ast.parse(path.read_text())
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist"
    }


def test_collectives_are_called_in_one_file():
    callers = {path.name for path in FILES if distributed_attributes(path) & COLLECTIVES}
    assert callers == {"collectives.py"}


@pytest.mark.parametrize("path", sorted((SOURCE / "models").glob("*.py")), ids=lambda path: path.name)
def test_models_are_plain(path):
    assert "distributed" not in path.read_text()


def test_files_fit_in_the_head():
    lengths = {path.name: len(path.read_text().splitlines()) for path in FILES}
    assert max(lengths.values()) <= 320, lengths
