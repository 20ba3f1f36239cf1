"""The folder of a run: resolved configuration, metrics, weights."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lss.config import Config
from lss.errors import RunError
from lss.flags import parse, parser
from lss.models import GPT

CONFIG, METRICS, WEIGHTS = "config.toml", "metrics.jsonl", "model.safetensors"


def with_folder(config: Config) -> Config:
    """The configuration with the folder that a run gets unless one was given: `runs/PRESET-DATE-TIME`."""
    name = config.run.folder or f"runs/{config.model.preset}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    return replace(config, run=replace(config.run, folder=name))


@dataclass(frozen=True)
class RunFolder:
    """Files of a run under `path`."""

    path: Path

    def create(self, config: Config) -> None:
        """Make the folder and write the resolved configuration.

        Raises:
            RunError: The folder holds a run already, or cannot be written.
        """
        with _named(self.path, "cannot be made"):
            if self.path.exists() and any((self.path / name).exists() for name in (CONFIG, METRICS, WEIGHTS)):
                raise RunError(
                    f"run folder {str(self.path)!r} already holds a run",
                    allowed="a folder without one",
                    remedy="choose another run.folder, or remove this one",
                )
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / CONFIG).open("x", encoding="utf-8") as file:  # fails if another run took it meanwhile
                file.write(config.to_toml())

    def config_file(self) -> Path:
        """The resolved configuration of a run that has ended.

        Raises:
            RunError: There is no such run in the folder.
        """
        for name in (CONFIG, WEIGHTS):
            if not (self.path / name).is_file():
                raise RunError(
                    f"{str(self.path)!r} holds no {name}", allowed="the folder of a run of lss train that has ended"
                )
        return self.path / CONFIG

    def append(self, line: dict[str, Any]) -> None:
        """Add a line to the metrics; what is not finite becomes null, as JSON has no NaN."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        with _named(self.path, "cannot be written"), (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")

    def save(self, state: dict[str, Tensor]) -> None:
        """Write the weights, whole or not at all."""
        seen: set[int] = set()
        apart = {}
        for name, tensor in state.items():
            shared = tensor.data_ptr() in seen  # tied weights: the format wants each tensor for itself
            seen.add(tensor.data_ptr())
            apart[name] = tensor.clone() if shared else tensor.contiguous()
        partial = self.path / f"{WEIGHTS}.partial"
        with _named(self.path, "cannot be written"):
            save_file(apart, partial)
            partial.replace(self.path / WEIGHTS)

    def build(self) -> GPT:
        """The plain model of the run, as it was saved.

        Raises:
            RunError: The weights are damaged, or belong to another shape.
        """
        config, _ = parse(parser("eval"), [str(self.config_file())])
        model = GPT(config.gpt())
        model = model.double() if config.train.precision == "fp64" else model
        with _named(self.path, "holds weights that do not fit its configuration"):
            model.load_state_dict(load_file(self.path / WEIGHTS))
        return model


@contextmanager
def _named(path: Path, trouble: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError, RuntimeError) as error:
        raise RunError(
            f"run folder {str(path)!r} {trouble}: {error}", remedy="check the path, or choose another"
        ) from error
