"""`lss verify`: its flags, and what one rank does."""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial

from rich.console import Console

from lss.batch import CUTS, Cut
from lss.collectives import agree
from lss.command import Job, add_attention, attention_of, write_json
from lss.config import AttentionConfig, Config, ParallelConfig
from lss.errors import ConfigError, DifferentError
from lss.mesh import World, check_degrees, init_mesh
from lss.strategies import STRATEGY_NAMES
from lss.target import Target
from lss.verification.verify import verify


def read_verify(arguments: Sequence[str]) -> Job:
    """The job that flags of `lss verify` ask for."""
    made = ArgumentParser(prog="lss verify", description="Prove that a run over ranks equals the serial one.")
    made.add_argument("target", help="a preset, a .toml file, or module:function, which returns a model and a batch")
    made.add_argument("--sequence", type=int, default=2, help="ranks that hold one sequence together (default 2)")
    made.add_argument("--data", type=int, default=1, help="data groups (default 1)")
    add_attention(made)
    made.add_argument("--strategy", choices=STRATEGY_NAMES, default="lss", help="lss, or a rival (default lss)")
    made.add_argument("--length", type=int, default=0, help="tokens of a sequence, for presets and .toml files")
    made.add_argument("--sequences", type=int, default=1, help="sequences a data group, for presets and .toml files")
    made.add_argument("--shift-labels", type=int, help="as of lss.shard (default: 1 where the model's own loss shifts)")
    made.add_argument("--cut", choices=CUTS, help="as of lss.parallelize (default: as there)")
    made.add_argument("--steps", type=int, default=2, help="optimizer steps (default 2)")
    made.add_argument("--device", choices=["cpu", "cuda", "auto"], default="cpu", help="where to run (default cpu)")
    made.add_argument("--json", default="", help="a file for the report")
    given = made.parse_args(list(arguments))
    for name in ("sequences", "steps"):
        if getattr(given, name) < 1:
            raise ConfigError(f"{name} = {getattr(given, name)}", allowed="at least 1")
    for name in ("length", "shift_labels"):
        if (getattr(given, name) or 0) < 0:
            raise ConfigError(f"{name} = {getattr(given, name)}", allowed="at least 0")
    check_degrees(given.sequence, given.data)
    target = Target(given.target, given.length, given.sequences * given.data)
    parallel = ParallelConfig(given.sequence, given.data, given.device, strategy=given.strategy)
    run = partial(
        verify_target,
        target=target,
        parallel=parallel,
        attention=attention_of(given),
        shift_labels=given.shift_labels,
        cut=given.cut,
        steps=given.steps,
        file=given.json,
    )
    return Job(run, Config(parallel=parallel), f"verify {given}")


def verify_target(
    world: World,
    target: Target,
    parallel: ParallelConfig,
    attention: AttentionConfig,
    shift_labels: int | None,
    cut: Cut | None,
    steps: int,
    file: str,
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
            shift_labels=target.shift_labels(model) if shift_labels is None else shift_labels,
            cut=cut,
            strategy=parallel.strategy,
            steps=steps,
            progress=status.update,
        )
    if world.rank == 0:
        console.print(report.render())
        console.print(f"{time.perf_counter() - started:.1f} s", style="dim")
    agree(lambda: write_json(report.to_dict(), file) if file and world.rank == 0 else None)
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
