"""The command `lss`."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import torch.distributed as dist
from rich.progress import Progress

import lss
from lss.bench import BenchConfig, bench
from lss.bench.jobs import AttentionShape
from lss.collectives import agree, agree_equal
from lss.config import AttentionConfig, Config, ParallelConfig
from lss.data import default_cache_folder, enwik8
from lss.errors import ConfigError, LssError
from lss.flags import parse, parser
from lss.launch import launch
from lss.mesh import World, check_degrees, detect_world, init_world
from lss.models import PRESETS
from lss.train import evaluate_run, train
from lss.train.folder import RunFolder
from lss.verification.command import verify_target
from lss.verification.target import Target

_USAGE = """\
usage: lss COMMAND ...

  lss train [CONFIG.toml] [--key.sub value ...]   train a model; starts its ranks, or joins torchrun, srun or mpirun
  lss eval RUN [--key.sub value ...]              bits per byte of a run on its test split
  lss verify TARGET [--sequence N] [--data M]     prove that a run over ranks equals the serial one
  lss bench attention|step [--lengths L,L]        time it serially and over ranks, side by side
  lss data enwik8 [--from FILE]                   fetch and check a data set

lss COMMAND --help tells more."""


@dataclass(frozen=True)
class Job:
    """What every rank runs, and the configuration that says how many there are."""

    run: Callable[[World], None]
    config: Config
    words: str  # what must be the same on every rank, beside the configuration


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
        if command == "data":
            return _data(rest)
        if command in _READERS:
            return _run(partial(_READERS[command], rest))
        raise ConfigError(
            f"unknown command {command!r}", allowed="train, eval, verify, bench, data", remedy="see lss --help"
        )
    except LssError as error:
        return _report(error)
    except KeyboardInterrupt:
        print("lss: interrupted before the end: no weights were saved", file=sys.stderr)
        return 130


def _read_train(arguments: Sequence[str]) -> Job:
    config, _ = parse(parser("train [CONFIG.toml]"), arguments)
    return Job(partial(train, config=config), config, f"train into {config.run.folder!r}")


def _read_eval(arguments: Sequence[str]) -> Job:
    made = parser("eval RUN")
    made.add_argument("--split", type=Literal["train", "validation", "test"], default="test", help="part of the data")
    made.add_argument("--sequences", type=int, default=0, help="sequences, evenly spaced; 0 takes the whole split")
    if {"--help", "-h"} & set(arguments):
        made.parse_args(["--help"])
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("no run was given", allowed="lss eval RUN, the folder of a run, and then flags")
    folder = RunFolder(Path(arguments[0]))
    config, parsed = parse(made, [str(folder.config_file()), *arguments[1:]], _EVAL_KEYS)
    if parsed.sequences < 0:
        raise ConfigError(f"sequences = {parsed.sequences}", allowed="0 or more")
    job = partial(evaluate_run, folder=folder, config=config, part=parsed.split, limit=parsed.sequences)
    return Job(job, config, f"eval {arguments[0]} {parsed.split} {parsed.sequences}")


# What an evaluation can take from flags; the model, its weights and their precision are the run's.
_EVAL_KEYS = ("data.", "parallel.", "attention.", "train.batch")


_AS_TRAIN = "as attention.%(dest)s of lss train (default %(default)s)"


def _read_verify(arguments: Sequence[str]) -> Job:
    made = ArgumentParser(prog="lss verify", description="Prove that a run over ranks equals the serial one.")
    made.add_argument("target", help="a preset, a .toml file, or module:function, which returns a model and a batch")
    made.add_argument("--sequence", type=int, default=2, help="ranks that hold one sequence together (default 2)")
    made.add_argument("--data", type=int, default=1, help="data groups (default 1)")
    _add_attention(made)
    made.add_argument("--length", type=int, default=0, help="tokens of a sequence, for presets and .toml files")
    made.add_argument("--sequences", type=int, default=1, help="sequences a data group, for presets and .toml files")
    made.add_argument("--steps", type=int, default=2, help="optimizer steps (default 2)")
    made.add_argument("--device", choices=["cpu", "cuda", "auto"], default="cpu", help="where to run (default cpu)")
    made.add_argument("--json", default="", help="a file for the report")
    given = made.parse_args(list(arguments))
    for name in ("sequences", "steps"):
        if getattr(given, name) < 1:
            raise ConfigError(f"{name} = {getattr(given, name)}", allowed="at least 1")
    if given.length < 0:
        raise ConfigError(f"length = {given.length}", allowed="at least 1, or 0 for the default")
    check_degrees(given.sequence, given.data)
    target = Target(given.target, given.length, given.sequences * given.data)
    parallel = ParallelConfig(given.sequence, given.data, given.device)
    run = partial(
        verify_target, target=target, parallel=parallel, attention=_attention(given), steps=given.steps, file=given.json
    )
    return Job(run, Config(parallel=parallel), f"verify {given}")


def _read_bench(arguments: Sequence[str]) -> Job:
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
    _add_attention(made)
    given = made.parse_args(list(arguments))
    lengths = tuple(_natural("lengths", length) for length in given.lengths.split(","))
    batch, heads, key_value_heads, head_width = (
        _natural(name, getattr(given, name)) for name in ("batch", "heads", "key_value_heads", "head_width")
    )
    if heads % key_value_heads:
        raise ConfigError(f"heads = {heads} with key_value_heads = {key_value_heads}", allowed="a divisor of heads")
    shape = AttentionShape(batch, heads, key_value_heads, head_width, not given.full)
    parallel = ParallelConfig(_natural("sequence", given.sequence), 1, given.device)
    config = BenchConfig(
        given.what,
        lengths,
        parallel.sequence,
        _natural("repeats", given.repeats),
        given.preset,
        batch,
        shape,
        _attention(given),
        given.device,
        given.json,
    )
    return Job(partial(bench, config=config), Config(parallel=parallel), f"bench {given}")


def _add_attention(made: ArgumentParser) -> None:
    for name in ("gather", "kernel", "layout"):
        kind = get_type_hints(AttentionConfig)[name]
        made.add_argument(f"--{name}", choices=get_args(kind), default=getattr(AttentionConfig, name), help=_AS_TRAIN)
    made.add_argument("--chunks", type=int, default=1, help=_AS_TRAIN)
    made.add_argument("--regather", action="store_true", help="gather again in backward: attention.keep false")


def _attention(given: Namespace) -> AttentionConfig:
    return AttentionConfig(
        given.gather, given.kernel, not given.regather, _natural("chunks", given.chunks), given.layout
    )


def _natural(name: str, value: object) -> int:
    if not str(value).strip().isdigit() or int(str(value)) < 1:
        raise ConfigError(f"{name} = {value}", allowed="a number of at least 1")
    return int(str(value))


_READERS: dict[str, Callable[[Sequence[str]], Job]] = {
    "train": _read_train,
    "eval": _read_eval,
    "verify": _read_verify,
    "bench": _read_bench,
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
