"""What a run shows and writes while it goes on."""

from __future__ import annotations

import math
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lss.errors import RunError
from lss.ledger import Ledger
from lss.train.folder import RunFolder


class Display(Protocol):
    """A bar, lines, or nothing."""

    def advance(self, text: str = "", detail: str = "") -> None:
        """One unit of work is done; `text` says how it stands, `detail` more where there is room."""

    def say(self, text: str) -> None:
        """Print a line."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


class Silent:
    """For all ranks but the first."""

    def advance(self, text: str = "", detail: str = "") -> None:
        """Say nothing."""

    def say(self, text: str) -> None:
        """Say nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass


class Lines(Silent):
    """One line a unit of work, with the time that is left."""

    def __init__(self, total: int, what: str) -> None:
        self.total = total
        self.what = what
        self.done = 0
        self.started = time.monotonic()

    def advance(self, text: str = "", detail: str = "") -> None:
        """Print how far it is, `text`, `detail`, and when it will be done."""
        self.done += 1
        left = (time.monotonic() - self.started) / self.done * (self.total - self.done)
        parts = (f"{self.what} {self.done}/{self.total}", text, detail, f"ETA {timedelta(seconds=round(left))}")
        print("  ".join(part for part in parts if part), flush=True)

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, flush=True)


class Bar(Silent):
    """A live bar on a terminal."""

    def __init__(self, total: int, what: str) -> None:
        columns = (
            TextColumn(what),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, transient=True)
        self.task = self.progress.add_task(what, total=total, text="")

    def advance(self, text: str = "", detail: str = "") -> None:
        """Move the bar on, `text` beside it."""
        self.progress.update(self.task, advance=1, text=text)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.progress.console.print(text, markup=False, highlight=False)

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.progress.stop()


def display(rank: int, total: int, what: str) -> Display:
    """A bar on a terminal, lines elsewhere, silence on all ranks but the first."""
    if rank:
        return Silent()
    return Bar(total, what) if Console().is_terminal else Lines(total, what)


class Metrics:
    """Writes one JSON line a step or evaluation, and TensorBoard events where asked.

    Args:
        folder: The run's; None on all ranks but the first.
        tensorboard: Whether to write events, below `folder`.
    """

    def __init__(self, folder: RunFolder | None, tensorboard: bool) -> None:
        self.folder = folder
        self.events = _summary_writer(folder.path) if folder and tensorboard else None

    def write(self, line: dict[str, Any]) -> None:
        """Add a line; its numbers become scalars over `step`."""
        if self.folder:
            self.folder.append(line)
        if self.events:
            for name, value in line.items():
                if isinstance(value, int | float) and name != "step":
                    self.events.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Flush the events."""
        if self.events:
            self.events.close()


def bits(nats: float) -> float:
    """Nats to bits."""
    return nats / math.log(2)


def peak_bytes(device: torch.device) -> int:
    """Peak bytes that torch has held on a GPU; on the CPU the peak of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def step_text(line: dict[str, Any], ledger: Ledger) -> tuple[str, str]:
    """A step for people: in short, and the rest."""
    count, num_bytes = ledger.total()
    return (
        f"loss {line['loss']:.4f}  {line['bits_per_byte']:.3f} bits/byte  {line['tokens_per_second']:,.0f} tokens/s",
        f"norm {line['grad_norm']:.3f}  rate {line['learning_rate']:.2e}  {line['step_seconds']:.3f} s  "
        f"{count} collectives {num_bytes / 1e6:.1f} MB",
    )


def _summary_writer(path: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (an optional dependency)
    except ImportError as error:
        raise RunError(
            "run.tensorboard is true, and tensorboard is not installed",
            remedy="pip install tensorboard, or leave run.tensorboard false",
        ) from error
    return SummaryWriter(path)
