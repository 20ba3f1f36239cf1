"""`lss verify` on one rank."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console

from lss.collectives import agree
from lss.config import AttentionConfig, ParallelConfig
from lss.errors import DifferentError, RunError
from lss.mesh import World, init_mesh
from lss.verification.compare import Report
from lss.verification.target import Target
from lss.verification.verify import verify


def verify_target(
    world: World, target: Target, parallel: ParallelConfig, attention: AttentionConfig, steps: int, file: str
) -> None:
    """Verify, print the report, and write it as JSON where asked.

    Raises:
        DifferentError: Some check failed; on all ranks.
    """
    started = time.perf_counter()
    mesh = init_mesh(parallel.sequence, parallel.data, device=parallel.device, world=world)
    model, batch = agree(target.load)
    console = Console(quiet=world.rank > 0)
    with console.status("") as status:
        report = verify(
            model,
            batch,
            mesh,
            attention=attention,
            shift_labels=target.shift_labels,
            steps=steps,
            progress=status.update,
        )
    if world.rank == 0:
        console.print(report.render())
        console.print(f"{time.perf_counter() - started:.1f} s", style="dim")
    agree(lambda: _write(report, file) if file and world.rank == 0 else None)
    if not report.passed:
        failed = next(check for check in report.checks if not check.passed)
        if failed.kind == "sanity":
            error = DifferentError(
                f"{target.name}: {failed.note}", allowed=f"a run that proves something: {failed.name}"
            )
        else:
            error = DifferentError(
                f"{target.name} over ranks differs from the serial run: {failed.kind} {failed.name}",
                allowed=f"a relative error of at most {failed.bound:.1e}",
                remedy="look at the module named above" if report.first_forward else "",
            )
        error.on_all_ranks = True
        raise error


def _write(report: Report, file: str) -> None:
    try:
        Path(file).write_text(json.dumps(report.to_dict(), indent=1))
    except OSError as error:
        raise RunError(f"{file!r} cannot be written: {error}", remedy="name another file") from error
