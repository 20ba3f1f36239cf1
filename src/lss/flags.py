"""From flags and TOML files to a configuration: defaults, then the file, then flags."""

from __future__ import annotations

import argparse
import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lss.config import Config
from lss.errors import ConfigError
from lss.mesh import check_degrees

_BARE_FLAGS = ("--help", "-h")


def parser(command: str) -> ArgumentParser:
    """The parser of all keys as flags."""
    made = ArgumentParser(prog=f"lss {command}", parser_mode="toml", exit_on_error=False, allow_abbrev=False)
    made.add_argument("--config", action="config", help="TOML file; may be given as the first argument too")
    made.add_class_arguments(Config, as_group=False)
    for action in made._actions:
        if action.dest in (*Config.__dataclass_fields__, "print_config"):
            action.help = argparse.SUPPRESS  # not offered: further ways to say what --config says
    return made


def parse(made: ArgumentParser, arguments: Sequence[str], honoured: Sequence[str] = ()) -> tuple[Config, Namespace]:
    """Read flags and TOML files into a checked Config; flags that are no part of it come apart.

    Args:
        made: From `parser`, perhaps with further flags.
        arguments: The command line.
        honoured: Beginnings of the keys that may be given as flags; all by default.

    Raises:
        ConfigError: A key is unknown, a value is of the wrong type or out of range, or a file cannot be read.
    """
    files, flags = _split_files(arguments)
    options = [option[2:] for action in made._actions for option in action.option_strings if option.startswith("--")]
    keys = [option for option in options if option not in (*Config.__dataclass_fields__, "print_config")]
    for file in files:
        check_keys(_flatten(_read_toml(Path(file))), keys, f" in {file}")
    given = [flag[2:].partition("=")[0] for flag in flags if flag.startswith("--")]
    check_keys(given, keys, "")
    for key in given:
        if honoured and "." in key and not key.startswith(tuple(honoured)):
            raise ConfigError(f"key {key!r} has no effect here", allowed=", ".join(f"{part}..." for part in honoured))
    try:
        parsed = made.parse_args([*(part for file in files for part in ("--config", file)), *flags])
    except argparse.ArgumentError as error:
        raise _value_error(str(error)) from error
    made_objects = made.instantiate(parsed)
    config = Config(**{name: made_objects[name] for name in Config.__dataclass_fields__})
    check(config)
    return config, parsed


def check_keys(given: Iterable[str], known: Sequence[str], where: str) -> None:
    """Raise ConfigError, naming the nearest key, unless every given key is known."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ConfigError(f"unknown key {key!r}{where}", allowed="the keys of --help", remedy=f"try {near[0]!r}")


def check(config: Config) -> None:
    """Raise ConfigError unless all values are in range and fit together."""
    check_degrees(config.parallel.sequence, config.parallel.data)
    train = config.train
    at_least_one = {"data.length": config.data.length, "train.steps": train.steps, "train.batch": train.batch}
    for key, value in (at_least_one | {"train.accumulation": train.accumulation}).items():
        if not 1 <= value <= 10**12:
            raise ConfigError(f"{key} = {value}", allowed="at least 1, and less than a million million")
    if train.accumulation > train.batch:
        raise ConfigError(f"train.accumulation = {train.accumulation}", allowed=f"at most train.batch = {train.batch}")
    for name in ("dropout", "attention_dropout"):
        if not 0 <= getattr(train, name) < 1:
            raise ConfigError(f"train.{name} = {getattr(train, name)}", allowed="at least 0 and less than 1")
    if not 0 <= train.seed < 2**63:
        raise ConfigError(f"train.seed = {train.seed}", allowed="from 0 to 2**63 - 1")
    if not 0 < train.learning_rate < float("inf"):
        raise ConfigError(f"train.learning_rate = {train.learning_rate}", allowed="a finite number above 0")
    if not 1 <= config.parallel.timeout <= 10**6:
        raise ConfigError(f"parallel.timeout = {config.parallel.timeout}", allowed="from 1 to 1,000,000 seconds")
    if not config.data.source:
        raise ConfigError("data.source is empty", allowed="stdlib, enwik8, a file or a folder")
    for name in ("warmup_steps", "weight_decay", "clip_norm", "eval_every", "eval_sequences"):
        if not 0 <= getattr(train, name) < float("inf"):
            raise ConfigError(f"train.{name} = {getattr(train, name)}", allowed="0 or a finite number above it")
    config.gpt()


def _split_files(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """TOML files, given bare or by --config, apart from the flags, which win over them wherever they stand."""
    files: list[str] = []
    flags: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--config":
            files.append(next(remaining, ""))
        elif argument.startswith("--config="):
            files.append(argument.removeprefix("--config="))
        elif not argument.startswith("-"):
            files.append(argument)
        else:
            flags.append(argument)
            if "=" not in argument and argument not in _BARE_FLAGS:
                flags.extend(value for value in [next(remaining, None)] if value is not None)
    return files, flags


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"configuration {str(path)!r} cannot be read: {error}",
            allowed="a TOML file, then flags of the form --key.sub value",
        ) from error


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _value_error(message: str) -> ConfigError:
    """From the parser's words to ours: what was given, and what is allowed."""
    found = re.search(r'Parser key "(?P<key>[^"]+)":\s*(?P<reason>.*)', message, re.DOTALL)
    if not found:
        return ConfigError(message.splitlines()[0], remedy="see --help")
    value = re.search(r"(?:Got|Given) value: (.*)", found["reason"])
    kinds = re.findall(r"Expected (?:an? )?(<class '\w+'>|typing\.Literal\[.*?\])", found["reason"])
    names = {"<class 'int'>": "a whole number", "<class 'float'>": "a number", "<class 'bool'>": "true or false"}
    allowed = [names.get(kind, kind.removeprefix("typing.Literal")) for kind in kinds if kind != "<class 'NoneType'>"]
    return ConfigError(
        f"{found['key']} = {value[1] if value else '?'}", allowed=" or ".join(allowed) or found["reason"]
    )
