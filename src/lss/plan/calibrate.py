"""`lss calibrate`: what this machine can do, measured by all ranks at once, as a hardware file."""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median

import tomli_w
import torch
from rich.console import Console
from torch import Tensor

from lss.bench.measure import seconds
from lss.bench.run import Ranks
from lss.collectives import agree
from lss.command import Job, check_reports, natural, write
from lss.config import Config, ParallelConfig
from lss.mesh import World, init_mesh
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
    check_reports(html="", hardware=given.file)
    parallel = ParallelConfig(natural("ranks", given.ranks), 1, given.device)
    return Job(partial(calibrate, parallel=parallel, file=given.file), Config(parallel=parallel), f"calibrate {given}")


def calibrate(world: World, parallel: ParallelConfig, file: str) -> None:
    """Measure, print and write. Runs on every rank."""
    mesh = init_mesh(parallel.sequence, device=parallel.device, world=world)
    ranks = Ranks(mesh)
    with Console(quiet=world.rank > 0).status("measuring"):
        hardware = measured(ranks, world)
    if world.rank == 0:
        Console().print(f"{hardware.name}: written to {file}")
    agree(lambda: write(file, tomli_w.dumps(asdict(hardware))) if world.rank == 0 else None)


def _seconds(ranks: Ranks, run: Callable[[], object]) -> float:
    """Of a run, the median of several, the mean of the ranks, which all run at once."""
    first = float(_once(ranks, run).max())
    repeats = REPEATS if first < SLOW else 1
    return float(torch.stack([_once(ranks, run).mean() for _ in range(repeats)]).median())


def _once(ranks: Ranks, run: Callable[[], object]) -> Tensor:
    """Seconds of a run that all ranks begin together, of each."""
    ranks.each(0.0)
    return ranks.each(seconds(run, ranks.device))


def measured(ranks: Ranks, world: World) -> Hardware:
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


def _rates(ranks: Ranks, host: float) -> Rates:
    """Of one rank, while all compute."""

    def rate(probe: Probe, amount: float) -> float:
        return amount / max(1e-9, _seconds(ranks, probe.run) - probe.number * host)

    products = {kind: rate(probe, probe.flops) for kind, probe in product_probes(ranks.device, batched=False).items()}
    batched = {kind: rate(probe, probe.flops) for kind, probe in product_probes(ranks.device, batched=True).items()}
    passes = {name: rate(probe, probe.moved) for name, probe in pass_probes(ranks.device).items()}
    forward, backward = ({k: rate(p, p.flops) for k, p in part.items()} for part in attention_probes(ranks.device))
    share = median(backward[kind] / forward[kind] for kind in forward)
    return Rates(products, passes.pop("add"), host, 0.0, batched, forward, share, passes)


def _links(ranks: Ranks) -> tuple[Link, dict[str, float]]:
    """Latency and bandwidth by all-gathers, and how many times longer other collectives take than these say."""
    axis, size = ranks.axis, ranks.axis.size
    if size == 1:
        return Link(0.0, 1e12), {}

    def gather(number: int) -> float:
        segment = torch.zeros(number // 4, device=ranks.device)
        return _seconds(ranks, lambda: axis.all_gather(segment, layer="calibrate", phase="setup"))

    small, large = gather(SMALL), gather(LARGE)
    bandwidth = (size - 1) * (LARGE - SMALL) / max(1e-9, large - small)
    link = Link(small / (size - 1), bandwidth)
    whole, tensor = torch.zeros(size * LARGE // 4, device=ranks.device), torch.zeros(LARGE // 4, device=ranks.device)
    scattered = _seconds(ranks, lambda: axis.reduce_scatter(whole, layer="calibrate", phase="setup"))
    reduced = _seconds(ranks, lambda: axis.all_reduce_(tensor, layer="calibrate", phase="setup"))
    reduced_as_planned = 2 * ((size - 1) * link.latency + (size - 1) / size * LARGE / bandwidth)
    factors = {"reduce_scatter": scattered / large, "all_reduce": reduced / reduced_as_planned}
    return link, factors | _direct_factors(ranks, link)


def _direct_factors(ranks: Ranks, link: Link) -> dict[str, float]:
    """How many times longer sends take than latency and bandwidth say: to the next rank, and to all."""
    axis, size = ranks.axis, ranks.axis.size
    parts, part = (torch.zeros(shape, device=ranks.device) for shape in ((size, LARGE // 4), (LARGE // 4,)))
    received, following, before = torch.empty_like(part), (axis.rank + 1) % size, (axis.rank - 1) % size

    def send() -> None:
        axis.start_send([(part, following)], [(received, before)], layer="calibrate", phase="setup")()

    sent = _seconds(ranks, send)
    exchanged = _seconds(ranks, lambda: axis.start_all_to_all(parts, layer="calibrate", phase="setup")())
    one, all_others = (steps * (link.latency + LARGE / link.bandwidth) for steps in (1, size - 1))
    return {"send": sent / one, "fetch": sent / one, "all_to_all": exchanged / all_others}


def _overlap(ranks: Ranks) -> float:
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
        _seconds(ranks, run)
        for run in (compute, lambda: axis.all_gather(segment, layer="calibrate", phase="setup"), both)
    )
    return min(1.0, max(0.0, (alone + sent - together) / min(alone, sent)))


def _jitter(ranks: Ranks) -> float:
    """Standard deviation of the time that ranks take for the same work, as a share of it."""
    matrix = torch.ones(768, 768, device=ranks.device)
    spreads = []
    for _ in range(REPEATS):
        spent = _once(ranks, lambda: [matrix @ matrix for _ in range(8)])
        late = float(spent.max() / spent.mean()) - 1
        spreads.append(late / max(1e-9, expected_largest(ranks.axis.size)))
    return median(spreads) if ranks.axis.size > 1 else 0.0


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
