"""`lss bench`: its flags, and what one rank does.

Strategies take turns, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh

from lss.bench import jobs, measure
from lss.bench.jobs import AttentionShape, Measured
from lss.collectives import Axis, agree
from lss.command import Job, add_attention, attention_of, natural, write_json
from lss.config import AttentionConfig, Config, ParallelConfig
from lss.errors import ConfigError
from lss.ledger import Ledger
from lss.mesh import World, init_mesh
from lss.models import PRESETS


@dataclass(frozen=True)
class BenchConfig:
    """What `lss bench` measures.

    Args:
        what: `attention` or `step`.
        lengths: Tokens of a sequence.
        sequence: Job that hold one sequence together.
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


def read_bench(arguments: Sequence[str]) -> Job:
    """The job that flags of `lss bench` ask for."""
    made = ArgumentParser(prog="lss bench", description="Forward and backward, serially and over ranks, in turn.")
    made.add_argument("what", choices=["attention", "step"], help="one call of attention, or a training step")
    made.add_argument("--lengths", default="1024,2048", help="tokens of a sequence (default 1024,2048)")
    made.add_argument("--sequence", type=int, default=2, help="ranks that hold one sequence together (default 2)")
    made.add_argument("--repeats", type=int, default=5, help="runs of each, after one to warm up (default 5)")
    made.add_argument("--preset", choices=list(PRESETS), default="gpt-20m", help="whose step (default gpt-20m)")
    made.add_argument("--batch", type=int, default=1, help="sequences (default 1)")
    made.add_argument("--heads", type=int, default=8, help="of attention (default 8)")
    made.add_argument("--key-value-heads", type=int, default=8, help="of attention (default 8)")
    made.add_argument("--head-width", type=int, default=64, help="of attention (default 64)")
    made.add_argument("--full", action="store_true", help="attention without a causal mask")
    made.add_argument("--device", choices=["cpu", "cuda", "auto"], default="auto", help="where to run (default auto)")
    made.add_argument("--json", default="", help="a file for the rows")
    add_attention(made)
    given = made.parse_args(list(arguments))
    lengths = tuple(natural("lengths", length) for length in given.lengths.split(","))
    batch, heads, key_value_heads, head_width = (
        natural(name, getattr(given, name)) for name in ("batch", "heads", "key_value_heads", "head_width")
    )
    if heads % key_value_heads:
        raise ConfigError(f"heads = {heads} with key_value_heads = {key_value_heads}", allowed="a divisor of heads")
    shape = AttentionShape(batch, heads, key_value_heads, head_width, not given.full)
    parallel = ParallelConfig(natural("sequence", given.sequence), 1, given.device)
    config = BenchConfig(
        given.what,
        lengths,
        parallel.sequence,
        natural("repeats", given.repeats),
        given.preset,
        batch,
        shape,
        attention_of(given),
        given.device,
        given.json,
    )
    return Job(partial(bench, config=config), Config(parallel=parallel), f"bench {given}")


def bench(world: World, config: BenchConfig) -> None:
    """Measure, print a table, and write JSON where asked. Runs on every rank."""
    mesh = init_mesh(config.sequence, device=config.device, world=world)
    axis = Axis.of(mesh, "sequence", Ledger())
    rows = [row for length in config.lengths for row in _measured(config, length, mesh, axis)]
    if world.rank == 0:
        Console().print(_table(config, rows))
    agree(lambda: write_json(rows, config.json) if config.json and world.rank == 0 else None)


def _measured(config: BenchConfig, length: int, mesh: DeviceMesh, axis: Axis) -> Iterator[dict[str, Any]]:
    device, cores = torch.device(mesh.device_type), os.cpu_count() or 1
    threads = {"serial": cores, "lss": max(1, cores // axis.size)}
    parallel = _lss(config, length, mesh)
    made = {"serial": _serial(config, length, device) if axis.rank == 0 else None, "lss": parallel}
    timed: dict[str, list[float]] = {name: [] for name in made}
    waited: list[float] = []
    for index in range(config.repeats + 1):
        for name, job in made.items():
            torch.set_num_threads(threads[name])
            _meet(axis)
            if job:
                job.ledger.clear()
            own = measure.seconds(job.run, device) if job else 0.0
            slowest = float(_of_all(axis, own).max())
            if index:  # the first run warms up
                timed[name].append(slowest)
                waited += [float(_of_all(axis, job.ledger.waited).max())] if name == "lss" and job else []
    # what the mask asks for: torch's own kernels are counted with all pairs, also where they skip some
    work = _of_all(axis, measure.operations(parallel)).sum()
    for name, job in made.items():
        torch.set_num_threads(threads[name])
        _meet(axis)
        rate = _of_all(axis, measure.matrix_product_rate(device, torch.float32) if job else 0.0).sum()
        peak = _of_all(axis, measure.peak_bytes(job) if job else 0).max()
        best = min(timed[name])
        yield {
            "what": config.what,
            "strategy": name,
            "length": length,
            "sequence": axis.size if name == "lss" else 1,
            "seconds_min": best,
            "seconds_median": median(timed[name]),
            "ratio_to_serial": min(timed["serial"]) / best,
            "peak_bytes": int(peak),
            "flops_per_second": float(work) / best,
            "share_of_matrix_product": float(work) / best / float(rate),
            "exposed_communication_seconds": min(waited) if name == "lss" else 0.0,
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


def _meet(axis: Axis) -> None:
    _of_all(axis, 0.0)


def _of_all(axis: Axis, value: float) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    own = torch.tensor([value], dtype=torch.float64, device=device)
    return axis.all_gather(own, layer="bench", phase="step")


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
        "speed: serial seconds over its own; MB: the busiest rank's peak; share: of a large matrix product on these "
        "threads; wait: seconds in collectives"
    )
    return table
