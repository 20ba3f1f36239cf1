"""`lss train` and `lss eval`: their flags."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from lss.command import Job
from lss.errors import ConfigError
from lss.flags import parse, parser
from lss.train.evaluate import evaluate_run
from lss.train.folder import RunFolder
from lss.train.loop import train


def read_train(arguments: Sequence[str]) -> Job:
    """The job that flags of `lss train` ask for."""
    config, _ = parse(parser("train [CONFIG.toml]"), arguments)
    return Job(partial(train, config=config), config, f"train into {config.run.folder!r}")


def read_eval(arguments: Sequence[str]) -> Job:
    """The job that flags of `lss eval` ask for."""
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
