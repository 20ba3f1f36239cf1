"""The command `lss`."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist
from rich.progress import Progress

import lss
from lss.bench.command import read_bench
from lss.collectives import agree, agree_equal
from lss.command import Job
from lss.compare.command import read_compare
from lss.data import default_cache_folder, enwik8
from lss.errors import ConfigError, LssError
from lss.launch import launch
from lss.mesh import World, check_degrees, detect_world, init_world
from lss.paper.command import paper
from lss.plan.calibrate import read_calibrate
from lss.plan.command import run_plan
from lss.train.command import read_eval, read_train
from lss.verification.command import read_verify

_USAGE = """\
usage: lss COMMAND ...

  lss train [CONFIG.toml] [--key.sub value ...]   train a model; starts its ranks, or joins torchrun, srun or mpirun
  lss eval RUN [--key.sub value ...]              bits per byte of a run on its test split
  lss verify TARGET [--sequence N] [--data M]     prove that a run over ranks equals the serial one
  lss bench attention|step [--lengths L,L]        time it serially and over ranks, side by side
  lss bench compare [--strategies S,S]            time a step by rival strategies, side by side
  lss plan TARGET --ranks N [--length L]          bytes, messages and seconds of a run, before it is paid for
  lss calibrate FILE [--ranks N]                  measure this machine, for lss plan --hardware FILE
  lss paper [--html FILE] [--json FILE]           the paper's tables and figures beside the planner's
  lss data enwik8 [--from FILE]                   fetch and check a data set

lss COMMAND --help tells more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0; 2 for bad input; 3 for a lost rank; 4 where `lss verify` finds a difference; 1 for anything else.
    """
    command, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("--help", "-h", "--version"):
        print(lss.__version__ if command == "--version" else _USAGE)
        return 0
    try:
        if command in _ALONE:
            return _ALONE[command](rest)
        if command in _READERS:
            return _run(partial(_READERS[command], rest))
        known = ", ".join([*_READERS, *_ALONE])
        raise ConfigError(f"unknown command {command!r}", allowed=known, remedy="see lss --help")
    except LssError as error:
        return _report(error)
    except KeyboardInterrupt:
        print("lss: interrupted before the end: no weights were saved", file=sys.stderr)
        return 130


def _read_bench(arguments: Sequence[str]) -> Job:
    """`compare` needs plans and trainer; the others do not."""
    return read_compare(arguments[1:]) if list(arguments[:1]) == ["compare"] else read_bench(arguments)


_READERS: dict[str, Callable[[Sequence[str]], Job]] = {
    "train": read_train,
    "eval": read_eval,
    "verify": read_verify,
    "bench": _read_bench,
    "calibrate": read_calibrate,
}


def _run(read: Callable[[], Job]) -> int:
    """Join the ranks that a launcher started, or start them here."""
    world = detect_world(os.environ)
    if world.launcher != "none":
        return _rank(world, read)
    job = read()  # bad input ends here, before any rank is started
    return launch(_rank, job.config.parallel.sequence * job.config.parallel.data, partial(_given, job))


def _given(job: Job) -> Job:
    return job


def _rank(world: World, read: Callable[[], Job]) -> int:
    """One rank from start to end."""
    try:
        job = _agreed_job(world, read)
        job.run(world)
    except LssError as error:
        return _report(error, world.rank)
    except BrokenPipeError:  # whoever read the output has gone
        return 141
    except (MemoryError, RuntimeError) as error:
        if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
            raise
        return _report(_out_of_memory(error), world.rank)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _out_of_memory(error: BaseException) -> LssError:
    return LssError(
        f"out of memory: {str(error).splitlines()[0] if str(error) else 'allocation failed'}",
        allowed="what fits into the memory of a rank",
        remedy="take more ranks (parallel.sequence), a shorter data.length, a smaller batch or a smaller model",
    )


def _agreed_job(world: World, read: Callable[[], Job]) -> Job:
    """Read the job and join the other ranks, whether it could be read or not: so all end if one cannot go on."""
    outcome: Job | LssError
    try:
        outcome = read()
        parallel = outcome.config.parallel
        check_degrees(parallel.sequence, parallel.data, world.size)
        init_world(world, device=parallel.device, timeout_seconds=parallel.timeout)
    except LssError as error:
        outcome = error
        init_world(world, device="cpu")

    def result() -> Job:
        if isinstance(outcome, LssError):
            raise outcome
        return outcome

    job = agree(result)
    agree_equal("the command", job.words, "give every rank the same command")
    agree_equal("the configuration", job.config.to_toml(), "give every rank the same file and flags")
    return job


def _data(arguments: Sequence[str]) -> int:
    made = ArgumentParser(prog="lss data", description="Fetch a data set, check it, and keep it in the cache folder.")
    made.add_argument("name", choices=["enwik8"], help="the data set")
    made.add_argument("--from", dest="file", default="", help="a file to take instead of a download")
    made.add_argument("--cache_folder", default="", help="where to keep it; see data.cache_folder")
    given = made.parse_args(list(arguments))
    cache = Path(given.cache_folder) if given.cache_folder else default_cache_folder()
    with Progress(transient=True) as progress:
        task = progress.add_task("enwik8", total=None)
        path = enwik8.install(
            cache,
            Path(given.file) if given.file else None,
            lambda done, total: progress.update(task, completed=done, total=total or None),
        )
    print(f"enwik8: {enwik8.LENGTH:,} bytes, SHA-1 right, at {path}")
    return 0


def _report(error: LssError, rank: int = 0) -> int:
    """Print an error once: where all ranks end with the same one, the first rank speaks for them."""
    if rank == 0 or not error.on_all_ranks:
        print(f"lss: {error}", file=sys.stderr, flush=True)
    return error.exit_code


# Commands that run in this process alone.
_ALONE: dict[str, Callable[[Sequence[str]], int]] = {"plan": run_plan, "paper": paper, "data": _data}
