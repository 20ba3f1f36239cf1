"""The same training run on 1 rank, 2 ranks and 2 x 2 ranks: enwik8, the 20M GPT, dropout on, float32.

Needs enwik8 in the cache (`lss data enwik8`). Takes about ten minutes on two cores:

    python benchmarks/enwik8_parity.py [FOLDER] [--key.sub value ...]

Prints the losses side by side and fails if any differs from the first run's by more than 1e-4.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 20
TOLERANCE = 1e-4
COMMON = [
    *("--model.preset", "gpt-20m"),
    *("--data.source", "enwik8"),
    *("--data.length", "2088"),
    *("--train.dropout", "0.1"),
    *("--train.steps", str(STEPS)),
    *("--train.eval_every", "0"),
    *("--train.eval_sequences", "4"),
]
# name: (sequence, data, sequences a data group)
RUNS = {"N=1": (1, 1, 4), "N=2": (2, 1, 4), "MxN=2x2": (2, 2, 2)}


def losses_of(folder: Path, sequence: int, data: int, batch: int, extra: list[str]) -> list[float]:
    """Run `lss train` and read the loss of each step."""
    degrees = ["--parallel.sequence", str(sequence), "--parallel.data", str(data), "--train.batch", str(batch)]
    command = [sys.executable, "-m", "lss", "train", *COMMON, *degrees, "--run.folder", str(folder), *extra]
    print("lss", *command[3:], flush=True)
    subprocess.run(command, check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def main() -> int:
    """Run all, print the table, and say whether they agree."""
    arguments = sys.argv[1:]
    given = arguments.pop(0) if arguments and not arguments[0].startswith("-") else tempfile.mkdtemp()
    losses = {name: losses_of(Path(given) / name, *degrees, arguments) for name, degrees in RUNS.items()}
    print(f"{'step':>4}" + "".join(f"{name:>14}" for name in losses))
    for step, row in enumerate(zip(*losses.values(), strict=True), 1):
        print(f"{step:>4}" + "".join(f"{loss:>14.7f}" for loss in row))
    first = losses["N=1"]
    worst = max(abs(a - b) for other in losses.values() for a, b in zip(first, other, strict=True))
    print(f"largest difference from N=1: {worst:.2e} (allowed {TOLERANCE:.0e})")
    return worst > TOLERANCE


if __name__ == "__main__":
    sys.exit(main())
