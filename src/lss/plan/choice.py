"""What a search for the fastest plan has found, and the command that runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from shlex import quote
from typing import Any

from rich.console import Console

from lss import page
from lss.config import Config
from lss.page import Paragraph, Table
from lss.plan.report import gigabytes, to_dict
from lss.plan.result import Plan, WhatIf

SHOWN = 10


@dataclass(frozen=True)
class Best:
    """What a search has found.

    Args:
        plans: Those that fit, fastest first.
        num_candidates: Ways to run it.
        num_planned: Those of them that were planned.
        is_settled: Whether none of the others can come near the first.
        refused: Messages of those that cannot be run, and how often.
        memory: Bytes of a rank.
    """

    plans: list[Plan]
    num_candidates: int
    num_planned: int
    is_settled: bool
    refused: Counter[str]
    memory: float

    def show(self, console: Console) -> None:
        """Print the ten best, why the first wins, and the command that runs it."""
        page.show([self.table(), *(Paragraph(text) for text in self.told())], console)
        console.print(command_of(self.plans[0]), style="bold", soft_wrap=True, markup=False)

    def table(self) -> Table:
        """The ten best."""
        head = ("", "ranks", "batch", "gather", "kept", "recompute", "shard", "GB", "seconds", "comm")
        rows = ((str(number), *_row(plan)) for number, plan in enumerate(self.plans[:SHOWN], 1))
        return Table("the fastest that fit; ranks are data groups x sequence", head, tuple(rows))

    def told(self) -> list[str]:
        """How far the search went, what was refused, and why the first wins."""
        end = "no other can be more than 1 % faster" if self.is_settled else "the search ended before the others"
        number, planned = self.num_candidates, self.num_planned
        said = [f"{number} candidates for {gigabytes(self.memory)}, {planned} planned: {end}"]
        said += [f"{number} x {message}" for message, number in self.refused.items()]
        if self.plans[0].what_if != WhatIf():
            said.append("planned with what-ifs: a run is without them")
        return [*said, self.why()]

    def why(self) -> str:
        """What the first has over the second, and over the first of other degrees."""
        first, *others = self.plans
        said = [f"the first takes {first.timeline.total:.4f} s"]
        parallel = first.setup.config.parallel
        elsewhere = [plan for plan in others if plan.setup.config.parallel.sequence != parallel.sequence]
        for name, rivals in (("the second", others), ("the best of other degrees", elsewhere)):
            if rivals:
                said.append(f"{name} {_difference(first, rivals[0])}")
        return "; ".join(said)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "num_candidates": self.num_candidates,
            "num_planned": self.num_planned,
            "is_settled": self.is_settled,
            "num_fitting": len(self.plans),
            "best": [to_dict(plan, None) for plan in self.plans[:SHOWN]],
            "why": self.why(),
            "command": command_of(self.plans[0]),
        }


def _row(plan: Plan) -> tuple[str, ...]:
    config = plan.setup.config
    return (
        f"{config.parallel.data} x {config.parallel.sequence}",
        str(config.train.batch),
        config.attention.gather,
        kept(plan),
        "yes" if config.train.recompute else "",
        "yes" if config.parallel.shard_parameters else "",
        f"{plan.peak.total / 1e9:.2f}",
        f"{plan.timeline.total:.4f}",
        f"{plan.communication_share:.0%}",
    )


def _difference(first: Plan, other: Plan) -> str:
    """Where another plan loses its time."""
    config, line, best = other.setup.config, other.timeline, first.timeline
    parts = {
        "computation": line.computation - best.computation,
        "communication": line.communication - best.communication,
        "waiting": line.waiting - best.waiting,
    }
    told = ", ".join(
        f"{seconds:+.4f} s of {name}" for name, seconds in parts.items() if abs(seconds) > 1e-3 * best.total
    )
    what = f"{config.parallel.data} x {config.parallel.sequence}, {config.attention.gather}, {kept(other)}"
    return f"({what}) {told or 'takes as long'}"


def kept(plan: Plan) -> str:
    """What becomes of gathered tensors."""
    attention = plan.setup.config.attention
    if attention.chunks > 1:
        return f"{attention.chunks} chunks"
    return "kept" if attention.keep else "gathered again"


def command_of(plan: Plan) -> str:
    """What runs a plan."""
    setup, config = plan.setup, plan.setup.config
    parallel, ranks = config.parallel, setup.num_ranks
    if setup.target:
        told = ", ".join(f"{name}={value!r}" for name, value in asdict(config.attention).items())
        extra = "; fully_shard it over all ranks" if parallel.shard_parameters else ""
        extra += "; checkpoint its layers" if config.train.recompute else ""
        mesh = f"mesh = lss.init_mesh(sequence={parallel.sequence}, data={parallel.data})"
        return f"{mesh}; model = lss.parallelize(model, mesh, {told}){extra}"
    node = max(number for number in range(1, plan.hardware.ranks_per_node + 1) if ranks % number == 0)
    start = f"torchrun --nnodes {ranks // node} --nproc-per-node {node} -m lss" if ranks > 1 else "lss"
    return " ".join([start, "train", *_flags(config)])


def _flags(config: Config) -> Iterator[str]:
    """What is not as by default."""
    given, usual = asdict(config), asdict(Config())
    for section, keys in given.items():
        for key, value in keys.items():
            if value != usual[section][key]:
                yield f"--{section}.{key} {quote(str(value).lower() if isinstance(value, bool) else str(value))}"
