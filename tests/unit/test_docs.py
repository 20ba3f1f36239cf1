"""Examples in docstrings run; the README's code does too."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import lss

ROOT = Path(__file__).parents[2]
MODULES = [module.name for module in pkgutil.walk_packages(lss.__path__, "lss.") if module.name != "lss.__main__"]


@pytest.fixture(autouse=True)
def _own_process_group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(name)
    failures, _ = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert failures == 0


def test_some_examples_exist():
    finder = doctest.DocTestFinder()
    examples = [test for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples]
    assert len(examples) >= 3


PAGES = [
    path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "```python" in path.read_text()
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_run(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        exec(compile(block, page.name, "exec"), {})


def snippet_over_ranks(source: str) -> None:
    exec(compile(source, "README.md", "exec"), {})


def test_the_readme_runs_over_ranks(ranks):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "sequence=1, data=1" in block
    ranks.run(snippet_over_ranks, 4, block.replace("sequence=1, data=1", "sequence=2, data=2"))


def test_public_names_have_docstrings():
    for name in lss.__all__:
        assert getattr(lss, name).__doc__, name


def test_the_table_of_support_is_that_of_the_tests(tmp_path):
    """Its rows, columns and cells; whether they hold is for `pytest tests/ranks --matrix docs/support.md` to say."""
    made = tmp_path / "support.md"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/ranks", "--matrix", str(made)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    declared, said = (
        [line for line in page.read_text().splitlines() if line.startswith(("|", *"123456789"))]
        for page in (made, ROOT / "docs/support.md")
    )
    assert [line.replace("yes", "no") for line in said] == declared
