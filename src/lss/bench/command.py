"""`lss bench`: its flags."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lss.bench.jobs import AttentionShape
from lss.bench.run import BenchConfig, bench
from lss.command import Job, add_attention, attention_of, natural
from lss.config import Config, ParallelConfig
from lss.errors import ConfigError
from lss.models import PRESETS


def read_bench(arguments: Sequence[str]) -> Job:
    """The job that flags of `lss bench` ask for."""
    given = _flags().parse_args(list(arguments))
    if given.json and not Path(given.json).absolute().parent.is_dir():
        raise ConfigError(f"json = {given.json}", allowed="a file in a folder that exists")
    parallel = ParallelConfig(natural("sequence", given.sequence), 1, given.device)
    config = BenchConfig(
        given.what,
        tuple(natural("lengths", length) for length in given.lengths.split(",")),
        parallel.sequence,
        natural("repeats", given.repeats),
        given.preset,
        natural("batch", given.batch),
        _shape(given),
        attention_of(given),
        given.device,
        given.json,
    )
    return Job(partial(bench, config=config), Config(parallel=parallel), f"bench {given}")


def _flags() -> ArgumentParser:
    made = ArgumentParser(prog="lss bench", description="Forward and backward, serially and over ranks, in turn.")
    made.add_argument(
        "what", choices=["attention", "step"], help="one call of attention, or a training step; see also compare"
    )
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
    return made


def _shape(given: Namespace) -> AttentionShape:
    names = ("batch", "heads", "key_value_heads", "head_width")
    batch, heads, key_value_heads, head_width = (natural(name, getattr(given, name)) for name in names)
    if heads % key_value_heads:
        raise ConfigError(f"heads = {heads} with key_value_heads = {key_value_heads}", allowed="a divisor of heads")
    return AttentionShape(batch, heads, key_value_heads, head_width, not given.full)
