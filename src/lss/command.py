"""What a command hands to its ranks, and the flags that several commands take."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import get_args, get_type_hints

from lss.config import AttentionConfig, Config
from lss.errors import ConfigError, RunError
from lss.mesh import World


@dataclass(frozen=True)
class Job:
    """What every rank runs, and the configuration that says how many there are."""

    run: Callable[[World], None]
    config: Config
    words: str  # what must be the same on every rank, beside the configuration


def add_attention(made: ArgumentParser, *, as_target: bool = False) -> None:
    """Add the flags of `attention_of`.

    Args:
        made: The parser.
        as_target: Whether a flag that is not given leaves what the target says.
    """
    for name in ("gather", "kernel", "layout", "chunks"):
        kind = get_type_hints(AttentionConfig)[name]
        how = {"type": int} if kind is int else {"choices": get_args(kind)}
        default = None if as_target else getattr(AttentionConfig, name)
        usual = "as the target says" if as_target else default
        made.add_argument(
            f"--{name}", default=default, help=f"as attention.{name} of lss train (default {usual})", **how
        )
    made.add_argument("--regather", action="store_true", help="gather again in backward: attention.keep false")


def attention_of(given: Namespace, usual: AttentionConfig | None = None) -> AttentionConfig:
    """How attention is computed, from flags; where one is not given, as `usual`."""
    usual = usual or AttentionConfig()
    flags = {name: getattr(given, name) for name in ("gather", "kernel", "layout", "chunks")}
    told = {name: value for name, value in flags.items() if value is not None}
    if "chunks" in told:
        natural("chunks", told["chunks"])
    return replace(usual, keep=usual.keep and not given.regather, **told)


def natural(name: str, value: object) -> int:
    """A number of at least 1.

    Raises:
        ConfigError: It is none.
    """
    if not str(value).strip().isdecimal() or int(str(value)) < 1:
        raise ConfigError(f"{name} = {value}", allowed="a number of at least 1")
    return int(str(value))


def check_reports(html: str, **others: str) -> None:
    """Check files that a command is to write, before it does its work.

    Args:
        html: A page with drawings; empty for none.
        others: Further files, by the name of their flag.

    Raises:
        ConfigError: One of them cannot be a file, or what draws is not installed.
    """
    for name, file in {"html": html, **others}.items():
        if file and (not Path(file).absolute().parent.is_dir() or Path(file).is_dir()):
            raise ConfigError(f"{name} = {file}", allowed="a file in a folder that exists")
    if html and find_spec("matplotlib") is None:
        raise ConfigError(
            f"html = {html}: matplotlib, which draws the figures, is not installed",
            remedy='pip install "lss-transformer[report]", or leave out --html',
        )


def write_json(value: object, file: str) -> None:
    """Write what a command has found; raises as `write`."""
    write(file, json.dumps(value, indent=1))


def write(file: str, text: str) -> None:
    """Write a report.

    Raises:
        RunError: The file cannot be written.
    """
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"{file!r} cannot be written: {error}", remedy="name another file") from error
