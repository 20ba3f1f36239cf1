"""`lss calibrate`: what this machine can do, measured by all ranks at once, as a hardware file."""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

import tomli_w
import torch
from rich.console import Console
from torch import Tensor

from lss.collectives import Axis, agree
from lss.command import Job, natural
from lss.config import Config, ParallelConfig
from lss.errors import ConfigError, RunError
from lss.ledger import Ledger
from lss.mesh import SEQUENCE, World, init_mesh
from lss.plan.hardware import Hardware, Link, Rates
from lss.plan.probes import Probe, attention_probes, host_seconds, pass_probes, product_probes
from lss.plan.timeline import expected_largest

# Bytes of a segment of the messages that tell latency and bandwidth.
SMALL, LARGE = 2**10, 2**23
REPEATS = 9
# Seconds of a run that is repeated only once.
SLOW = 0.5


def read_calibrate(arguments: Sequence[str]) -> Job:
    """The job that flags of `lss calibrate` ask for."""
    made = ArgumentParser(prog="lss calibrate", description="Measure this machine, for lss plan --hardware FILE.")
    made.add_argument("file", help="where to write it: a TOML file")
    made.add_argument("--ranks", type=int, default=2, help="that measure together (default 2)")
    made.add_argument("--device", choices=["cpu", "cuda", "auto"], default="auto", help="where (default auto)")
    given = made.parse_args(list(arguments))
    if not Path(given.file).absolute().parent.is_dir():
        raise ConfigError(f"a hardware file {given.file}", allowed="a file in a folder that exists")
    parallel = ParallelConfig(natural("ranks", given.ranks), 1, given.device)
    return Job(partial(calibrate, parallel=parallel, file=given.file), Config(parallel=parallel), f"calibrate {given}")


def calibrate(world: World, parallel: ParallelConfig, file: str) -> None:
    """Measure, print and write. Runs on every rank."""
    mesh = init_mesh(parallel.sequence, device=parallel.device, world=world)
    ranks = _Ranks(Axis.of(mesh, SEQUENCE, Ledger()), torch.device(mesh.device_type))
    with Console(quiet=world.rank > 0).status("measuring"):
        hardware = measured(ranks, world)
    if world.rank == 0:
        Console().print(f"{hardware.name}: written to {file}")
    agree(lambda: _write(hardware, file) if world.rank == 0 else None)


def _write(hardware: Hardware, file: str) -> None:
    try:
        Path(file).write_text(tomli_w.dumps(asdict(hardware)))
    except OSError as error:
        raise RunError(f"{file!r} cannot be written: {error}", remedy="name another file") from error


class _Ranks:
    """The ranks that measure together."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.device = axis, device

    def each(self, value: float) -> Tensor:
        """The value of every rank; they have met when it returns."""
        own = torch.tensor([value], dtype=torch.float64, device=self.device)
        return self.axis.all_gather(own, layer="calibrate", phase="setup")

    def seconds(self, run: Callable[[], object]) -> float:
        """Of a run, the median of several, the mean of the ranks, which all run at once."""
        first = float(self.each(self._once(run)).max())
        repeats = REPEATS if first < SLOW else 1
        return float(torch.stack([self.each(self._once(run)).mean() for _ in range(repeats)]).median())

    def _once(self, run: Callable[[], object]) -> float:
        self.each(0.0)
        started = time.perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started


def measured(ranks: _Ranks, world: World) -> Hardware:
    """The machine, as all ranks see it at once."""
    host = float(ranks.each(host_seconds(ranks.device)).mean())
    rates = _rates(ranks, host)
    per_node = min(world.size, world.local_size)
    link, factors = _links(ranks)
    return Hardware(
        name=f"{ranks.axis.size} ranks of {os.uname().nodename}",
        source=f"lss calibrate, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}",
        device="cuda" if ranks.device.type == "cuda" else "cpu",
        memory=float(_memory(ranks.device)) / (1 if ranks.device.type == "cuda" else per_node),
        ranks_per_node=per_node,
        rates=rates,
        node=link,
        between=link,
        factors=factors,
        overlap=_overlap(ranks),
        jitter=_jitter(ranks),
    )


def _rates(ranks: _Ranks, host: float) -> Rates:
    """Of one rank, while all compute."""

    def rate(probe: Probe, amount: float) -> float:
        return amount / max(1e-9, ranks.seconds(probe.run) - probe.number * host)

    products = {kind: rate(probe, probe.flops) for kind, probe in product_probes(ranks.device, batched=False).items()}
    batched = {kind: rate(probe, probe.flops) for kind, probe in product_probes(ranks.device, batched=True).items()}
    passes = {name: rate(probe, probe.moved) for name, probe in pass_probes(ranks.device).items()}
    forward, backward = ({k: rate(p, p.flops) for k, p in part.items()} for part in attention_probes(ranks.device))
    share = median(backward[kind] / forward[kind] for kind in forward)
    return Rates(products, passes.pop("add"), host, 0.0, batched, forward, share, passes)


def _links(ranks: _Ranks) -> tuple[Link, dict[str, float]]:
    """Latency and bandwidth by all-gathers, and how many times longer other collectives take than these say."""
    axis, size = ranks.axis, ranks.axis.size
    if size == 1:
        return Link(0.0, 1e12), {}

    def gather(number: int) -> float:
        segment = torch.zeros(number // 4, device=ranks.device)
        return ranks.seconds(lambda: axis.all_gather(segment, layer="calibrate", phase="setup"))

    small, large = gather(SMALL), gather(LARGE)
    bandwidth = (size - 1) * (LARGE - SMALL) / max(1e-9, large - small)
    link = Link(small / (size - 1), bandwidth)
    whole, tensor = torch.zeros(size * LARGE // 4, device=ranks.device), torch.zeros(LARGE // 4, device=ranks.device)
    scattered = ranks.seconds(lambda: axis.reduce_scatter(whole, layer="calibrate", phase="setup"))
    reduced = ranks.seconds(lambda: axis.all_reduce_(tensor, layer="calibrate", phase="setup"))
    reduced_as_planned = 2 * ((size - 1) * link.latency + (size - 1) / size * LARGE / bandwidth)
    return link, {"reduce_scatter": scattered / large, "all_reduce": reduced / reduced_as_planned}


def _overlap(ranks: _Ranks) -> float:
    """Share of a message's time in which a rank can compute."""
    axis = ranks.axis
    if axis.size == 1:
        return 1.0
    segment = torch.zeros(LARGE // 4, device=ranks.device)
    matrix = torch.ones(768, 768, device=ranks.device)

    def compute() -> None:
        for _ in range(8):
            matrix @ matrix

    def both() -> None:
        wait = axis.start_all_gather(segment, layer="calibrate", phase="setup")
        compute()
        wait()

    alone, sent, together = (
        ranks.seconds(run)
        for run in (compute, lambda: axis.all_gather(segment, layer="calibrate", phase="setup"), both)
    )
    return min(1.0, max(0.0, (alone + sent - together) / min(alone, sent)))


def _jitter(ranks: _Ranks) -> float:
    """Standard deviation of the time that ranks take for the same work, as a share of it."""
    matrix = torch.ones(768, 768, device=ranks.device)
    spreads = []
    for _ in range(REPEATS):
        seconds = ranks.each(ranks._once(lambda: [matrix @ matrix for _ in range(8)]))
        late = float(seconds.max() / seconds.mean()) - 1
        spreads.append(late / max(1e-9, expected_largest(ranks.axis.size)))
    return median(spreads) if ranks.axis.size > 1 else 0.0


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
