"""What a run is made of: defaults, then a TOML file, then flags."""

from __future__ import annotations

import argparse
import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tomli_w
from jsonargparse import ArgumentParser, Namespace

from lss.attention import Gather
from lss.data import default_cache_folder
from lss.errors import ConfigError
from lss.mesh import check_degrees
from lss.models import PRESETS, GPTConfig


@dataclass(frozen=True)
class ModelConfig:
    """The model.

    Args:
        preset: Shape to start from; the keys below change it where they are given.
        positions: Learned table or rotary.
        tie_weights: Whether the head shares the weight of the token embedding.
        width: Embedding width.
        layers: Number of blocks.
        heads: Query heads.
        key_value_heads: Key-value heads, a divisor of the query heads.
    """

    preset: Literal["gpt-tiny", "gpt-20m", "gpt-1.5b"] = "gpt-tiny"
    positions: Literal["learned", "rotary"] | None = None
    tie_weights: bool | None = None
    width: int | None = None
    layers: int | None = None
    heads: int | None = None
    key_value_heads: int | None = None


@dataclass(frozen=True)
class DataConfig:
    """The data: bytes as tokens.

    Args:
        source: `stdlib` (source text of the running Python's standard library), `enwik8`, a file (plain, .gz, .bz2,
            .xz, .zip) or a folder.
        length: Tokens of a sequence, on all ranks together.
        cache_folder: Where unpacked and downloaded data is kept; by default `lss` in the user's cache folder.
    """

    source: str = "stdlib"
    length: int = 512
    cache_folder: str = ""

    def cache(self) -> Path:
        """The cache folder as a path."""
        return Path(self.cache_folder).expanduser() if self.cache_folder else default_cache_folder()


@dataclass(frozen=True)
class ParallelConfig:
    """The ranks.

    Args:
        sequence: Ranks that hold one sequence together (context parallel degree).
        data: Sequence groups, each with other sequences.
        device: auto (CUDA where there is a GPU), cpu or cuda.
        timeout: Seconds that a collective may wait for its slowest rank.
    """

    sequence: int = 1
    data: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout: float = 1800.0


@dataclass(frozen=True)
class AttentionConfig:
    """Attention over segments.

    Args:
        gather: What a layer gathers: x (its input, one message), kv (packed, one message), separate (two).
    """

    gather: Gather = "x"


@dataclass(frozen=True)
class TrainConfig:
    """Training.

    Args:
        steps: Optimizer steps.
        batch: Sequences a data group and step.
        accumulation: Micro-batches into which a batch is cut.
        precision: fp32, bf16 (autocast over float32 weights) or fp64.
        learning_rate: Peak of the schedule.
        warmup_steps: Steps of linear warm-up, then a cosine down to a tenth.
        weight_decay: AdamW's decay, on matrices.
        clip_norm: Largest global gradient norm; 0 turns clipping off.
        dropout: Rate after the embedding, in the feed-forward and on residual branches.
        attention_dropout: Rate on attention weights; the kernel that stores scores is taken for it.
        seed: Of weights, data order and dropout.
        eval_every: Steps between evaluations on the validation split; 0 evaluates at the end only.
        eval_sequences: Sequences of such an evaluation; 0 takes the whole split.
        deterministic: Whether all sums have a fixed order, so that a run repeats bit by bit on any device.
        check_replicas: Whether to check after every step that shared parameters are bit-identical on all ranks.
    """

    steps: int = 100
    batch: int = 4
    accumulation: int = 1
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    learning_rate: float = 1e-3
    warmup_steps: int = 10
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    seed: int = 0
    eval_every: int = 50
    eval_sequences: int = 32
    deterministic: bool = False
    check_replicas: bool = False


@dataclass(frozen=True)
class RunConfig:
    """The run.

    Args:
        folder: Where configuration, metrics and weights are written; by default a new folder under `runs`.
        tensorboard: Whether to write TensorBoard events too.
    """

    folder: str = ""
    tensorboard: bool = False


@dataclass(frozen=True)
class Config:
    """Everything that a run can be told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def gpt(self) -> GPTConfig:
        """The shape of the model: the preset, changed where a key is given."""
        given = {name: value for name, value in asdict(self.model).items() if name != "preset" and value is not None}
        return replace(
            PRESETS[self.model.preset],
            max_length=self.data.length,
            dropout=self.train.dropout,
            attention_dropout=self.train.attention_dropout,
            **given,
        )

    def resolved(self) -> Config:
        """The same with every key of the model given."""
        shape = self.gpt()
        return replace(
            self,
            model=ModelConfig(
                self.model.preset,
                shape.positions,
                shape.tie_weights,
                shape.width,
                shape.layers,
                shape.heads,
                shape.num_key_value_heads,
            ),
        )

    def to_toml(self) -> str:
        """The resolved configuration, as `lss train` reads it, for another run: without the folder of this one."""
        sections = asdict(replace(self.resolved(), run=replace(self.run, folder="")))
        return tomli_w.dumps(sections)


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
