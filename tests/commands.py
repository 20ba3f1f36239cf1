"""Running the command `lss` as a user does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from lss.cli import main

LSS = [sys.executable, "-m", "lss"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
SMALL = ["--data.length", "40", "--train.batch", "2", "--train.steps", "4", "--train.eval_sequences", "3"]


def run(*command: str | Path, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; cores are few, so each rank takes one thread."""
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def train(folder: Path, *flags: str | Path) -> list[dict]:
    """Train a small run that must succeed; its metrics. In this process, which has imported torch already."""
    try:
        code = main([str(part) for part in ("train", *SMALL, "--run.folder", folder, *flags)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert code == 0
    return metrics(folder)


def metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
