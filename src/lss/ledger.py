"""Count and bytes of every collective.

Bytes are those that one rank sends, and receives, in the ring form of a collective over N ranks: (N - 1) segments for
an all-gather or a reduce-scatter, 2 (N - 1) / N of the tensor for an all-reduce, the tensor for a broadcast; of an
all-to-all (N - 1) / N of the tensor leave the rank, and sends are counted as they are.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """What a ledger counts apart: one kind of collective of one layer.

    Args:
        axis: `sequence` or `data`.
        operation: `all_gather`, `reduce_scatter`, `all_reduce`, `broadcast`, `all_to_all`, `send` (to the next rank)
            or `fetch` (of one farther away, and what it is sent in turn).
        phase: `forward`, `backward`, `step` (once a batch) or `setup` (once a run).
        layer: Qualified name of the module, or what the message carries: `gradients`, `norm`, `scalars`.
    """

    axis: str
    operation: str
    phase: str
    layer: str

    def __str__(self) -> str:
        return f"{self.operation} of {self.layer} ({self.phase}) over the {self.axis} axis"


@dataclass
class Ledger:
    """Count and bytes of every collective of this rank.

    Args:
        counts: Of each entry.
        bytes: Sent, of each entry.
        waited: Seconds in which this rank did nothing but start or await collectives. On a GPU the host goes on, and
            they say little.
    """

    counts: Counter[Entry] = field(default_factory=Counter)
    bytes: Counter[Entry] = field(default_factory=Counter)
    waited: float = 0.0

    def record(self, entry: Entry, num_bytes: int) -> None:
        """Count one collective."""
        self.counts[entry] += 1
        self.bytes[entry] += num_bytes

    def clear(self) -> None:
        """Forget everything, as at the start of a step."""
        self.counts.clear()
        self.bytes.clear()
        self.waited = 0.0

    @contextmanager
    def starting(self, entry: Entry, num_bytes: int) -> Iterator[None]:
        """Count a collective that is started within it, and the seconds that this takes."""
        started = time.perf_counter()
        yield
        self.waited += time.perf_counter() - started
        self.record(entry, num_bytes)

    @contextmanager
    def waiting(self, entry: Entry) -> Iterator[None]:
        """Count the seconds in which the earliest collective of an entry that is on its way is awaited."""
        started = time.perf_counter()
        yield
        self.waited += time.perf_counter() - started

    def total(self, **where: str) -> tuple[int, int]:
        """Count and bytes of the entries whose fields equal `where`: `total(axis="sequence", phase="forward")`."""
        chosen = [e for e in self.counts if all(getattr(e, name) == value for name, value in where.items())]
        return sum(self.counts[e] for e in chosen), sum(self.bytes[e] for e in chosen)

    def rows(self) -> list[dict[str, Any]]:
        """One dict an entry: axis, operation, pass, layer, count, bytes."""
        return [
            {
                "axis": entry.axis,
                "operation": entry.operation,
                "pass": entry.phase,
                "layer": entry.layer,
                "count": count,
                "bytes": self.bytes[entry],
            }
            for entry, count in self.counts.items()
        ]
