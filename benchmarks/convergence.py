"""Learning curves of one training run at four degrees, over each other: enwik8, 400 steps, dropout on, float32.

Needs enwik8 in the cache (`lss data enwik8`) and matplotlib. Takes about ten minutes on two cores:

    python benchmarks/convergence.py [FOLDER] [--key.sub value ...]

Writes benchmarks/convergence.png, prints test bits per byte, and fails if they differ by more than 1e-3.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TOLERANCE = 1e-3
TRAIN = [
    *("--model.width", "64"),
    *("--model.layers", "2"),
    *("--model.heads", "4"),
    *("--data.source", "enwik8"),
    *("--data.length", "1024"),
    *("--train.dropout", "0.1"),
    *("--train.steps", "400"),
    *("--train.learning_rate", "2e-3"),
    *("--train.eval_every", "100"),
]
# name: (sequence, data, sequences a data group)
RUNS = {"serial": (1, 1, 2), "N=2": (2, 1, 2), "N=4": (4, 1, 2), "MxN=2x2": (2, 2, 1)}


def lss(*arguments: str) -> str:
    """Run the command; its output."""
    print("lss", *arguments, flush=True)
    return subprocess.run(
        [sys.executable, "-m", "lss", *arguments], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def main() -> int:
    """Train, evaluate, draw, and say whether all agree."""
    arguments = sys.argv[1:]
    given = arguments.pop(0) if arguments and not arguments[0].startswith("-") else tempfile.mkdtemp()
    curves, bits = {}, {}
    for name, (sequence, data, batch) in RUNS.items():
        folder = Path(given) / name
        degrees = ["--parallel.sequence", str(sequence), "--parallel.data", str(data), "--train.batch", str(batch)]
        lss("train", *TRAIN, *degrees, "--run.folder", str(folder), *arguments)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        curves[name] = [line["bits_per_byte"] for line in lines if "loss" in line]
        bits[name] = float(re.search(r"test: ([\d.]+)", lss("eval", str(folder), "--sequences", "200"))[1])
        print(f"{name}: last step {curves[name][-1]:.6f}, test {bits[name]:.4f} bits/byte", flush=True)
    draw(curves, Path(__file__).with_suffix(".png"))
    steps = max(abs(a - b) for curve in curves.values() for a, b in zip(curves["serial"], curve, strict=True))
    test = max(abs(value - bits["serial"]) for value in bits.values())
    print(f"largest difference from serial: {steps:.1e} bits/byte in a step, {test:.1e} on the test split")
    return test > TOLERANCE


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """All curves over each other, and their differences from the serial one below."""
    from matplotlib import pyplot as plt  # noqa: PLC0415  (only this script needs it)

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1))
    for width, (name, curve) in zip((6, 4, 2.5, 1), curves.items(), strict=True):
        steps = range(1, len(curve) + 1)
        above.plot(steps, curve, linewidth=width, label=name)
        if name != "serial":
            below.semilogy(
                steps, [abs(a - b) + 1e-12 for a, b in zip(curve, curves["serial"], strict=True)], label=name
            )
    above.set_ylabel("training bits/byte")
    below.set_ylabel("|difference from serial|")
    below.set_xlabel("step")
    above.legend()
    below.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
