"""The table of docs/support.md: which features of which models tests prove.

A test says what it proves: `@pytest.mark.supports(model, feature, ...)`, where `{name}` stands for a parameter of the
test. `pytest tests/ranks --matrix FILE` runs those tests alone and writes the table; a cell is `yes` if all tests that
declare it passed.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
import transformers

Cell = tuple[str, str]

_LANGUAGE = ("GPT-2", "Llama", "Qwen3", "Mistral", "Gemma 3", "gpt-oss", "BERT", "RoBERTa", "ModernBERT")
_PAIRED = ("T5", "BART", "Whisper")
_TORCH = ("nn.TransformerEncoder", "nn.Transformer", "nn.MultiheadAttention")
_OWN = ("own module with scaled_dot_product_attention", "lss.models.GPT")
MODELS = (*_LANGUAGE, *_PAIRED, "ViT", *_TORCH, *_OWN)
_BATCHES = ("loss, outputs, gradients", "padding", "packed documents", "data groups", "dropout")
_WAYS = ("activation checkpointing", "cut in the layers", "Trainer", "LoRA", "fully_shard", "DDP", "torch.compile")
FEATURES = (*_BATCHES, *_WAYS)
# parameters of tests that stand for a model or a feature
WORDS = {
    "GPT": "lss.models.GPT",
    "whole": "loss, outputs, gradients",
    "padded": "padding",
    "padded right": "padding",
    "padded left": "padding",
    "packed": "packed documents",
}
# why a cell can never be `yes`: features, models, the reason
REASONS = (
    ("Trainer", (*_TORCH, *_OWN), "it takes models of transformers"),
    ("packed documents", _PAIRED, "of an encoder and a decoder, padding only is taken"),
    ("packed documents", _TORCH, "cut in their layers, they are given masks by their own code"),
    ("padding", ("ViT",), "images are of one size"),
    ("packed documents", ("ViT",), "images are of one size"),
)
PAGE = """# What is supported

Written by `{command}` on {date}, with torch {torch} and transformers
{transformers}.

`yes`: all tests of it passed, `no`: one failed, empty: there is no test. They compare with the untouched model in
float64, in the first column over two and three ranks that share an odd number of tokens; with dropout, with one rank.

{table}

{notes}
"""


def cells(item: pytest.Item) -> set[Cell]:
    """What a test declares that it proves."""
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    found = set()
    for mark in item.iter_markers("supports"):
        parts = [part.format(**given) for part in mark.args]
        model, *features = (WORDS.get(part, part) for part in parts)
        assert model in MODELS, parts
        assert set(features) <= set(FEATURES), parts
        found |= {(model, feature) for feature in features}
    return {cell for cell in found if not reason(*cell)}


def reason(model: str, feature: str) -> str:
    """Why the model cannot have the feature; empty if it can."""
    return next((why for taken, models, why in REASONS if taken == feature and model in models), "")


def table(results: Mapping[Cell, bool]) -> tuple[str, str]:
    """Rows of Markdown, and the notes to them."""
    models = [name for name in MODELS if name in {model for model, _ in results}]
    features = [name for name in FEATURES if name in {feature for _, feature in results}]
    reasons = list(dict.fromkeys(why for _, _, why in REASONS))

    def cell(model: str, feature: str) -> str:
        if why := reason(model, feature):
            return f"- ({reasons.index(why) + 1})"
        return {True: "yes", False: "no", None: ""}[results.get((model, feature))]

    rows = [["model", *features], ["---"] * (len(features) + 1)]
    rows += [[model, *(cell(model, feature) for feature in features)] for model in models]
    notes = (f"{number}. {why}" for number, why in enumerate(reasons, 1))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows), "\n".join(notes)


class Matrix:
    """Gathers what tests proved; under xdist, from the reports of its workers."""

    def __init__(self, path: Path, date: str, arguments: Iterable[object]) -> None:
        self.path, self.date, self.command = path, date, f"pytest {' '.join(map(str, arguments))}"
        self.results: dict[Cell, bool] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item], config: pytest.Config) -> None:
        declared = {item: sorted(found) for item in items if (found := cells(item))}
        items[:] = declared
        for item, found in declared.items():
            item.user_properties.append(("supports", found))
            if config.option.collectonly:
                self.results |= dict.fromkeys(found, False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test passes by its call; its setup or teardown can only fail it."""
        proved = [tuple(cell) for name, found in report.user_properties if name == "supports" for cell in found]
        for cell in proved if report.when == "call" or not report.passed else ():
            self.results[cell] = self.results.get(cell, True) and report.passed

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            rows, notes = table(self.results)
            given = {"command": self.command, "date": self.date, "table": rows, "notes": notes}
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            self.path.write_text(PAGE.format(**given, **versions))
