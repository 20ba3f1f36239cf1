"""`lss plan`: its flags, and what it prints."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args, get_type_hints

from rich.console import Console

from lss.command import add_attention, attention_of, check_reports, natural, write, write_json
from lss.config import Config, ParallelConfig, TrainConfig
from lss.errors import ConfigError
from lss.flags import check
from lss.plan.best import best
from lss.plan.choice import Best
from lss.plan.hardware import Hardware, shipped
from lss.plan.plan import make_plan, serial_plan
from lss.plan.processes import another_process
from lss.plan.report import Planned
from lss.plan.result import WhatIf
from lss.plan.search import longest
from lss.plan.setup import Setup
from lss.target import config_of


def run_plan(arguments: Sequence[str]) -> int:
    """Plan as flags say, print it, and write it where asked.

    Raises:
        LssError: The flags are wrong, or such a run would be refused.
    """
    given = _flags().parse_args(list(arguments))
    hardware = Hardware.named(given.hardware)
    if given.ranks_per_node is not None:
        hardware = replace(hardware, ranks_per_node=natural("ranks_per_node", given.ranks_per_node))
    if given.fit:
        hardware = replace(hardware, memory=bytes_of(given.fit))
    setup, what_if = setup_of(given, hardware), what_if_of(given)
    check_reports(html=given.html, json=given.json)
    found = _found(given, setup, hardware, what_if)
    if given.json:
        write_json(found.to_dict(), given.json)
    if given.html:
        from lss.plan.page import written  # noqa: PLC0415  (matplotlib is optional)

        write(given.html, written(found))
    return 0


def _found(given: Namespace, setup: Setup, hardware: Hardware, what_if: WhatIf) -> Best | Planned:
    """Plan, and print what was found."""
    console = Console()
    found: Best | Planned
    if given.best:
        found = best(setup, hardware, what_if, console)
    elif given.fit:
        plan = longest(setup, hardware, what_if, console)
        told = f"longest sequence that fits into {given.fit}: {plan.setup.config.data.length:,} tokens"
        found = Planned(plan, serial_plan(plan), told)
    else:
        with another_process() as beside, console.status("one step, on tensors without values"):
            plan = make_plan(setup, hardware, what_if, beside)
            found = Planned(plan, serial_plan(plan))
    found.show(console)
    return found


def setup_of(given: Namespace, hardware: Hardware) -> Setup:
    """The run that flags describe."""
    is_function = ":" in given.target
    config = Config() if is_function else config_of(given.target, "plan")
    groups = natural("data_groups", config.parallel.data if given.data_groups is None else given.data_groups)
    ranks = natural("ranks", given.ranks if given.ranks is not None else groups * config.parallel.sequence)
    if ranks % groups:
        raise ConfigError(f"{ranks} ranks in {groups} data groups", allowed="data groups that divide the ranks")
    length = natural("length", given.length if given.length is not None else config.data.length)
    if ranks // groups > length:
        raise ConfigError(
            f"{ranks // groups} ranks for a sequence of {length} tokens", allowed="at least one token a rank"
        )
    parallel = replace(
        config.parallel,
        sequence=ranks // groups,
        data=groups,
        strategy=given.strategy or config.parallel.strategy,
        shard_parameters=given.shard_parameters or config.parallel.shard_parameters,
    )
    train = replace(
        config.train,
        batch=config.train.batch if given.batch is None else natural("batch", given.batch),
        precision=given.precision or config.train.precision,
        recompute=given.recompute or config.train.recompute,
    )
    attention = attention_of(given, config.attention)
    planned = replace(
        config, data=replace(config.data, length=length), parallel=parallel, train=train, attention=attention
    )
    check(planned)
    return Setup(given.target if is_function else "", planned, hardware.device)


def what_if_of(given: Namespace) -> WhatIf:
    """The changes that flags ask for."""
    if not 1 <= given.compression < float("inf") or not 1 <= given.straggler < float("inf"):
        raise ConfigError(
            f"compression = {given.compression}, straggler = {given.straggler}", allowed="a factor of at least 1"
        )
    return WhatIf(given.hierarchical, given.overlap, given.compression, given.straggler)


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def bytes_of(text: str) -> float:
    """A number of bytes, such as `16GB`, `80GiB` or `1.6e10`."""
    number = text.strip().removesuffix("B")
    unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if number.endswith(unit)), "")
    try:
        found = float(number.removesuffix(unit)) * _UNITS[unit]
    except ValueError:
        found = -1.0
    if not 0 < found < float("inf"):
        raise ConfigError(f"{text!r} bytes", allowed="such as 16GB, 80GiB or 1.6e10")
    return found


def _flags() -> ArgumentParser:
    made = ArgumentParser(
        prog="lss plan",
        description="Bytes, operations, messages and seconds of a training step, of any model over any ranks, from one "
        "rank's real step on tensors without values.",
    )
    made.add_argument("target", help="a preset, a .toml file, or module:function, which returns a model and a batch")
    made.add_argument("--ranks", type=int, help="of the run (default: as the target says)")
    made.add_argument("--data-groups", type=int, help="into which they are divided (default: as the target says)")
    made.add_argument("--ranks-per-node", type=int, help="of a node (default: as the hardware says)")
    made.add_argument("--length", type=int, help="tokens of a sequence (default: as the target says)")
    made.add_argument("--batch", type=int, help="sequences a data group and step (default: as the target says)")
    precisions = get_args(get_type_hints(TrainConfig)["precision"])
    made.add_argument("--precision", choices=precisions, help="as train.precision (default: as the target says)")
    strategies = get_args(get_type_hints(ParallelConfig)["strategy"])
    made.add_argument("--strategy", choices=strategies, help="as parallel.strategy (default: as the target says)")
    made.add_argument("--recompute", action="store_true", help="compute layers again in backward: train.recompute")
    made.add_argument("--shard-parameters", action="store_true", help="over all ranks: parallel.shard_parameters")
    add_attention(made, as_target=True)
    names = ", ".join(sorted(shipped()))
    made.add_argument("--hardware", default="h100", help=f"{names}, or a TOML file (default h100)")
    made.add_argument(
        "--fit", default="", metavar="BYTES", help="find the longest sequence that fits such a rank: 80GB"
    )
    made.add_argument(
        "--best", action="store_true", help="find the fastest way to run it that fits (with --fit: BYTES)"
    )
    made.add_argument("--hierarchical", action="store_true", help="what if: gathers between nodes first, then inside")
    made.add_argument("--overlap", action="store_true", help="what if: all messages behind computation")
    made.add_argument("--compression", type=float, default=1.0, help="what if: messages so many times smaller")
    made.add_argument("--straggler", type=float, default=1.0, help="what if: one rank so many times slower")
    made.add_argument("--json", default="", help="a file for the plan")
    made.add_argument("--html", default="", help="a file for a page")
    return made
