"""What one rank of `lss bench` does. Strategies take turns, so that a machine that slows down slows all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh

from lss.bench import jobs, measure
from lss.bench.jobs import AttentionShape, Measured
from lss.collectives import Axis, agree
from lss.command import write_json
from lss.config import AttentionConfig
from lss.ledger import Ledger
from lss.mesh import World, init_mesh
from lss.models import PRESETS


@dataclass(frozen=True)
class BenchConfig:
    """What `lss bench` measures.

    Args:
        what: `attention` or `step`.
        lengths: Tokens of a sequence.
        sequence: Ranks that hold one sequence together.
        repeats: Runs of each strategy, in turn.
        preset: Whose step is measured.
        batch: Sequences.
        shape: Of attention.
        options: Of attention over ranks.
        device: As of `lss train`.
        json: A file for the rows.
    """

    what: str
    lengths: tuple[int, ...]
    sequence: int
    repeats: int
    preset: str
    batch: int
    shape: AttentionShape
    options: AttentionConfig
    device: str
    json: str


@dataclass
class Strategy:
    """One of those that take turns.

    Args:
        name: `serial` or `lss`.
        job: What this rank runs; None where it has no part in it.
        ranks: That run it.
        threads: Of each.
        seconds: Of each run, until the slowest rank was done.
        waited: Of these, in collectives, on the rank that waited longest.
    """

    name: str
    job: Measured | None
    ranks: int
    threads: int
    seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)


class Ranks:
    """The ranks that measure together."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.device = torch.device(mesh.device_type)
        self.axis = Axis.of(mesh, "sequence", Ledger())

    def each(self, value: float) -> torch.Tensor:
        """The value of every rank; they have met when it returns."""
        own = torch.tensor([value], dtype=torch.float64, device=self.device)
        return self.axis.all_gather(own, layer="bench", phase="step")


def bench(world: World, config: BenchConfig) -> None:
    """Measure, print a table, and write JSON where asked. Runs on every rank."""
    mesh = init_mesh(config.sequence, device=config.device, world=world)
    ranks = Ranks(mesh)
    rows = [row for length in config.lengths for row in _measured(config, length, mesh, ranks)]
    if world.rank == 0:
        Console().print(_table(config, rows))
    agree(lambda: write_json(rows, config.json) if config.json and world.rank == 0 else None)


def _measured(config: BenchConfig, length: int, mesh: DeviceMesh, ranks: Ranks) -> list[dict[str, Any]]:
    cores, size = os.cpu_count() or 1, ranks.axis.size
    serial = _serial(config, length, ranks.device) if ranks.axis.rank == 0 else None
    parallel = _lss(config, length, mesh)
    strategies = [
        Strategy("serial", serial, 1, cores),
        Strategy("lss", parallel, size, max(1, cores // size)),
    ]
    for index in range(config.repeats + 1):
        for strategy in strategies:
            _run(strategy, ranks, is_counted=index > 0)  # the first run warms up
    # what the mask asks for: torch's own kernels are counted with all pairs, also where they skip some
    operations = float(ranks.each(measure.operations(parallel)).sum())
    fastest = min(strategies[0].seconds)
    return [_row(config, length, strategy, ranks, operations, fastest) for strategy in strategies]


def _run(strategy: Strategy, ranks: Ranks, *, is_counted: bool) -> None:
    job = strategy.job
    torch.set_num_threads(strategy.threads)
    ranks.each(0.0)
    if job:
        job.ledger.clear()
    slowest = ranks.each(measure.seconds(job.run, ranks.device) if job else 0.0).max()
    waited = ranks.each(job.ledger.waited if job else 0.0).max()
    if is_counted:
        strategy.seconds.append(float(slowest))
        strategy.waited.append(float(waited))


def _row(
    config: BenchConfig, length: int, strategy: Strategy, ranks: Ranks, operations: float, serial: float
) -> dict[str, Any]:
    job, best = strategy.job, min(strategy.seconds)
    torch.set_num_threads(strategy.threads)
    ranks.each(0.0)
    rate = ranks.each(measure.matrix_product_rate(ranks.device, torch.float32) if job else 0.0).sum()
    return {
        "what": config.what,
        "strategy": strategy.name,
        "length": length,
        "sequence": strategy.ranks,
        "seconds_min": best,
        "seconds_median": median(strategy.seconds),
        "ratio_to_serial": serial / best,
        "peak_bytes": int(ranks.each(measure.peak_bytes(job) if job else 0).max()),
        "flops_per_second": operations / best,
        "share_of_matrix_product": operations / best / float(rate),
        "exposed_communication_seconds": min(strategy.waited),
        "repeats": config.repeats,
    }


def _serial(config: BenchConfig, length: int, device: torch.device) -> Measured:
    if config.what == "attention":
        return jobs.serial_attention(config.shape, length, device)
    return jobs.serial_step(PRESETS[config.preset], config.batch, length, device)


def _lss(config: BenchConfig, length: int, mesh: DeviceMesh) -> Measured:
    if config.what == "attention":
        return jobs.lss_attention(config.shape, length, mesh, config.options)
    return jobs.lss_step(PRESETS[config.preset], config.batch, length, mesh, config.options)


_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "strategy": ("", str),
    "length": ("length", str),
    "sequence": ("ranks", str),
    "seconds_min": ("s min", lambda value: f"{value:.3f}"),
    "seconds_median": ("median", lambda value: f"{value:.3f}"),
    "ratio_to_serial": ("speed", lambda value: f"{value:.2f}"),
    "peak_bytes": ("MB", lambda value: f"{value / 1e6:.0f}"),
    "flops_per_second": ("GF/s", lambda value: f"{value / 1e9:.0f}"),
    "share_of_matrix_product": ("share", lambda value: f"{value:.0%}"),
    "exposed_communication_seconds": ("wait", lambda value: f"{value:.3f}"),
}


def _table(config: BenchConfig, rows: list[dict[str, Any]]) -> Table:
    of = config.preset if config.what == "step" else f"{config.shape.heads} heads"
    table = Table(*(title for title, _ in _COLUMNS.values()), title=f"{config.what}, {of}, batch {config.batch}")
    for row in rows:
        table.add_row(*(show(row[name]) for name, (_, show) in _COLUMNS.items()))
    table.caption = (
        "speed: serial seconds over its own; MB: the busiest rank's peak; GF/s: operations of the run over ranks, "
        "whose blocks skip what the mask hides; share: of a large matrix product on these threads; wait: seconds in "
        "collectives"
    )
    return table
