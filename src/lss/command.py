"""What a command hands to its ranks, and the flags that several commands take."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
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


_AS_TRAIN = "as attention.%(dest)s of lss train (default %(default)s)"


def add_attention(made: ArgumentParser, **defaults: None) -> None:
    """Add the flags of `attention_of`.

    Args:
        made: The parser.
        defaults: None for flags that are told apart from their defaults, by name.
    """
    for name in ("gather", "kernel", "layout", "chunks"):
        kind = get_type_hints(AttentionConfig)[name]
        how = {"type": int} if kind is int else {"choices": get_args(kind)}
        default = defaults.get(name, getattr(AttentionConfig, name))
        text = _AS_TRAIN if default is not None else "as attention.%(dest)s of lss train (default: as the target says)"
        made.add_argument(f"--{name}", default=default, help=text, **how)
    made.add_argument("--regather", action="store_true", help="gather again in backward: attention.keep false")


def attention_of(given: Namespace) -> AttentionConfig:
    """How attention is computed, from flags."""
    return AttentionConfig(
        given.gather, given.kernel, not given.regather, natural("chunks", given.chunks), given.layout
    )


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
