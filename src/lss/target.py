"""What `lss verify` is told to verify: a preset, a configuration, or a function of the user's."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lss.config import Config
from lss.errors import ConfigError
from lss.flags import parse, parser
from lss.models import GPT, PRESETS
from lss.outputs import takes_labels

DROPOUT = 0.1


@dataclass(frozen=True)
class Target:
    """A name that every rank can turn into the same model and batch.

    Args:
        name: A preset, a TOML file, or `module:function`.
        length: Tokens of a sequence, for presets and configurations; 0 takes the configuration's.
        num_sequences: Sequences of all data groups, for presets and configurations.
    """

    name: str
    length: int
    num_sequences: int

    def shift_labels(self, model: nn.Module) -> int:
        """As of `shard`."""
        return shift_labels(self.name, model)

    def load(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """The plain model and a batch of whole sequences.

        Presets and configurations get random weights and random tokens, and dropout everywhere.

        Raises:
            ConfigError: There is no such preset, file, module or function, or it returns something else.
        """
        torch.manual_seed(0)
        if ":" in self.name and not self.name.endswith(".toml"):
            return call(self.name)
        return self._gpt(config_of(self.name, "verify"))

    def _gpt(self, config: Config) -> tuple[nn.Module, dict[str, Tensor]]:
        length = self.length or config.data.length
        shape = replace(config.gpt(), max_length=length, dropout=DROPOUT, attention_dropout=DROPOUT)
        text = torch.randint(shape.vocabulary, (self.num_sequences, length))
        return GPT(shape), {"tokens": text, "labels": text.clone()}


def config_of(name: str, command: str) -> Config:
    """The configuration of a preset or a TOML file.

    Args:
        name: Of the target.
        command: For messages.

    Raises:
        ConfigError: It is neither.
    """
    if name in PRESETS:
        return parse(parser(command), ["--model.preset", name])[0]
    if name.endswith(".toml"):
        return parse(parser(command), [name])[0]
    raise ConfigError(f"target {name!r}", allowed=f"a preset ({', '.join(PRESETS)}), a .toml file, or module:function")


def shift_labels(name: str, model: nn.Module) -> int:
    """As of `shard`: 1 where the labels of a target are the tokens.

    So they are of presets, of configurations, and of models of transformers whose own loss predicts the next token.
    """
    if ":" not in name:
        return 1
    loss = getattr(model, "loss_function", None) if takes_labels(model) else None
    return int(getattr(loss, "__name__", "") == "ForCausalLMLoss")


def call(name: str, **arguments: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """What `module:function` returns.

    Args:
        name: Of the function.
        arguments: That it is given, if it takes them.

    Raises:
        ConfigError: There is no such function, it fails, or it returns something else.
    """
    function = _function(name)
    try:
        known = signature(function).parameters
        returned = function(**{argument: value for argument, value in arguments.items() if argument in known})
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise ConfigError(
            f"target {name!r} failed: {type(error).__name__}: {error}",
            allowed="a function that returns (model, batch), without arguments"
            + (f" or with some of {', '.join(arguments)}" if arguments else ""),
        ) from error
    return _checked(name, returned)


def _function(name: str) -> Callable[[], Any]:
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as error:  # whatever importing the user's module raises
        raise ConfigError(
            f"target {name!r} cannot be imported: {error}",
            allowed="module:function, found from the present folder or installed",
            remedy=f"see that {Path(module_name.replace('.', '/') + '.py')} exists and defines {function_name}",
        ) from error
    if not callable(function):
        raise ConfigError(f"target {name!r} is a {type(function).__name__}", allowed="a function without arguments")
    return function  # type: ignore[no-any-return]


def _checked(name: str, returned: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    good = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], nn.Module)
    if not good or not isinstance(returned[1], Mapping):
        kinds = ", ".join(type(part).__name__ for part in returned) if isinstance(returned, tuple) else ""
        raise ConfigError(
            f"target {name!r} returned a {type(returned).__name__}{kinds and f' of {kinds}'}",
            allowed="(model, batch): a plain nn.Module, and tensors [B, L, ...] by name with `labels`, as of lss.shard",
        )
    model, batch = returned
    return model, dict(batch)
