"""The paper's figures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Fact:
    """A column of one of the paper's tables; None where it gives no figure.

    Args:
        gpus: Of all sequence groups together.
        length: Tokens of a sequence.
        gigabytes: Of a GPU.
        ran: Whether it ran: False where the paper says out of memory; None where it says nothing of memory.
        tflops: 10^12 operations a second of all GPUs.
        attention: "Increase of self-attention's computation", relative to the table's first.
        efficiency: "Parallel efficiency", in percent.
    """

    gpus: int
    length: int | None
    gigabytes: float | None = None
    ran: bool | None = None
    tflops: float | None = None
    attention: float | None = None
    efficiency: float | None = None


def facts() -> dict[str, Any]:
    """All of them, as they lie in `tables.json`."""
    found: dict[str, Any] = json.loads((resources.files("lss.paper") / "tables.json").read_text())
    return found


def table(name: str) -> tuple[Fact, ...]:
    """One of the paper's tables, by its name in `tables.json`."""
    return tuple(_fact(dict(zip(facts()["columns"], row, strict=True))) for row in facts()[name])


def _fact(row: dict[str, Any]) -> Fact:
    memory = row["gb_per_gpu"]
    gigabytes = None if memory == "OOM" else memory
    ran = False if memory == "OOM" else True if gigabytes or row["tflops"] else None
    shown = row["tflops"], row["attention_increase"], row["efficiency_percent"]
    return Fact(row["gpus"], row["length"], gigabytes, ran, *shown)
