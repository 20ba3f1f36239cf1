"""What `lss plan` says of each way, set beside what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lss.compare.way import Way
from lss.errors import LssError
from lss.plan import Hardware, Setup, make_plan

# Of a way at a length.
Plans = dict[tuple[str, int], dict[str, Any]]


def planned(
    ways: Sequence[Way], lengths: Sequence[int], preset: str, batch: int, num_ranks: int, hardware: Hardware
) -> Plans:
    """Seconds of a step and bytes at peak; nothing of those that are refused. Not in a process of a run."""
    found: Plans = {}
    for way in ways:
        for length in lengths:
            config = way.config(preset, length, batch, num_ranks, hardware.device)
            try:
                plan = make_plan(Setup("", config, hardware.device), hardware)
            except LssError:
                continue  # the run says why
            line = plan.timeline
            found[way.name, length] = {
                "planned_seconds": line.total,
                "planned_communication": line.communication,
                "planned_waiting": line.waiting,
                "planned_bytes": plan.peak.total,
            }
    return found
