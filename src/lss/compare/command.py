"""`lss bench compare`: its flags, what each rank does, and what is printed and written."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console

from lss import page
from lss.bench.run import Ranks
from lss.collectives import agree, from_first_rank
from lss.command import Job, check_reports, natural, write, write_json
from lss.compare.contest import Contest
from lss.compare.plans import Plans, planned
from lss.compare.report import Row, parts
from lss.compare.way import Way
from lss.config import Config, ParallelConfig
from lss.errors import ConfigError
from lss.mesh import World, detect_world, init_mesh
from lss.models import PRESETS
from lss.plan import Hardware
from lss.plan.command import bytes_of
from lss.train.metrics import display

USUAL = "serial,lss,ring,lightseq,ulysses,megatron,megatron-tp"


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Args:
        ways: Strategies, as they are set.
        lengths: Tokens of a sequence.
        preset: Whose step.
        batch: Sequences.
        repeats: Steps of each way, in turn, after one to warm up.
        device: As of `lss train`.
        memory: Bytes that a rank may take: what is planned to take more is not run; infinite for any.
        plans: Of each way and length, on the first rank; empty where none were asked for.
        html: A file for the page.
        json: A file for the rows.
    """

    ways: tuple[Way, ...]
    lengths: tuple[int, ...]
    preset: str
    batch: int
    repeats: int
    device: str
    memory: float
    plans: Plans
    html: str
    json: str


def read_compare(arguments: Sequence[str]) -> Job:
    """The job that flags of `lss bench compare` ask for; the first rank plans."""
    given = _flags().parse_args(list(arguments))
    check_reports(html=given.html, json=given.json)
    names = given.strategies.split(",")
    if len(set(names)) < len(names):
        raise ConfigError(f"strategies = {given.strategies}", allowed="each once")
    ways = tuple(Way.of(name) for name in names)
    lengths = tuple(natural("lengths", length) for length in given.lengths.split(","))
    sequence, batch = natural("sequence", given.sequence), natural("batch", given.batch)
    memory = bytes_of(given.memory) if given.memory else float("inf")
    hardware = Hardware.named(given.hardware or ("h100" if torch.cuda.is_available() else "cpu-gloo"))
    plans: Plans = {}
    if (given.hardware or given.memory) and detect_world(os.environ).rank == 0:
        with Console(stderr=True).status("planning"):
            plans = planned(ways, lengths, given.preset, batch, sequence, hardware)
    repeats = natural("repeats", given.repeats)
    comparison = Comparison(
        ways, lengths, given.preset, batch, repeats, given.device, memory, plans, given.html, given.json
    )
    job = partial(compare, comparison=comparison, is_timed=bool(given.hardware))
    return Job(job, Config(parallel=ParallelConfig(sequence, 1, given.device)), f"bench compare {given}")


def compare(world: World, comparison: Comparison, *, is_timed: bool) -> None:
    """Measure, print a table, and write a page and JSON where asked. Runs on every rank.

    Args:
        world: The ranks.
        comparison: What is compared.
        is_timed: Whether planned seconds are of this machine, and so are shown.
    """
    plans = from_first_rank(comparison.plans)
    mesh = init_mesh(world.size, device=comparison.device, world=world)
    ranks = Ranks(mesh)
    rows: list[Row] = []
    contests = [
        Contest(comparison.preset, length, comparison.batch, comparison.repeats, mesh, ranks)
        for length in comparison.lengths
    ]
    fitting = {contest.length: _fitting(comparison, plans, contest.length) for contest in contests}
    units = sum(contest.units * len(fitting[contest.length]) for contest in contests)
    with display(world.rank, units, "part") as progress:
        for contest in contests:
            found = {row["strategy"]: row for row in contest.run(fitting[contest.length], progress)}
            for way in comparison.ways:
                row = found.get(way.name) or contest.about(way)
                rows.append(row | plans.get((way.name, contest.length), {}))
    if not is_timed:
        rows = [{name: value for name, value in row.items() if name not in _TIMES} for row in rows]
    page.show(parts(rows, comparison.memory), Console(quiet=world.rank > 0))
    agree(lambda: _write(rows, comparison) if world.rank == 0 else None)


_TIMES = ("planned_seconds", "planned_communication", "planned_waiting")


def _fitting(comparison: Comparison, plans: Plans, length: int) -> list[Way]:
    """Ways that are not planned to take too much memory."""
    planned_bytes = {way: plans.get((way.name, length), {}).get("planned_bytes", 0) for way in comparison.ways}
    return [way for way, size in planned_bytes.items() if size <= comparison.memory]


def _write(rows: list[Row], comparison: Comparison) -> None:
    if comparison.json:
        write_json(rows, comparison.json)
    if comparison.html:
        from lss.compare.drawings import written  # noqa: PLC0415  (matplotlib is optional)

        write(comparison.html, written(rows, comparison.memory))


def _flags() -> ArgumentParser:
    made = ArgumentParser(
        prog="lss bench compare", description="A training step by several strategies, in turn, on the same ranks."
    )
    made.add_argument(
        "--strategies",
        default=USUAL,
        help=f"with settings behind a slash, as lss/x, lss/kv/regather, ring/contiguous (default {USUAL})",
    )
    made.add_argument("--lengths", default="1024,2048", help="tokens of a sequence (default 1024,2048)")
    made.add_argument("--sequence", type=int, default=2, help="ranks that hold one sequence together (default 2)")
    made.add_argument("--repeats", type=int, default=5, help="steps of each, in turn, after one to warm up (default 5)")
    made.add_argument("--preset", choices=list(PRESETS), default="gpt-20m", help="whose step (default gpt-20m)")
    made.add_argument("--batch", type=int, default=1, help="sequences (default 1)")
    made.add_argument("--device", choices=["cpu", "cuda", "auto"], default="auto", help="where to run (default auto)")
    made.add_argument("--memory", default="", metavar="BYTES", help="of a rank: what needs more is not run")
    made.add_argument("--hardware", default="", help="plan too, on this machine: a name, or a file of lss calibrate")
    made.add_argument("--json", default="", help="a file for the rows")
    made.add_argument("--html", default="", help="a file for a page")
    return made
