"""Which strategy is the fastest over which links: measured between network namespaces, the plan beside it.

As root, after `source .venv/bin/activate`:

    python benchmarks/crossovers.py FOLDER [--hosts 2,4,8] [--rates 100mbit,1gbit,10gbit] [--lengths 1024,4096]

For each number of hosts and each rate, benchmarks/hosts.sh runs `lss calibrate` and then `lss bench compare`. FOLDER
keeps what they wrote, and `crossovers.md`, a table of the fastest. What is there already is not measured again.
"""

import argparse
import json
import subprocess
from pathlib import Path

from lss.page import Points, Table, markdown

WAYS = "lss/kv,lss/x,lss/kv/regather,ring,lightseq,ulysses,megatron,megatron-tp"
HOSTS = Path(__file__).parent / "hosts.sh"


def measured(folder: Path, hosts: int, rate: str, given: argparse.Namespace) -> list[dict]:
    """Rows of `lss bench compare`."""
    rows, links = folder / f"{hosts}-{rate}.json", folder / f"{hosts}-{rate}.toml"
    run = ["sh", str(HOSTS), str(hosts), rate, "-m", "lss"]
    if not rows.exists():
        subprocess.run([*run, "calibrate", str(links), "--ranks", str(hosts)], check=True)
        told = ["--preset", given.preset, "--lengths", given.lengths, "--strategies", given.strategies]
        told += ["--sequence", str(hosts), "--repeats", str(given.repeats), "--hardware", str(links)]
        subprocess.run([*run, "bench", "compare", *told, "--json", str(rows)], check=True)
    return json.loads(rows.read_text())


def order(rows: list[dict], key: str) -> list[dict]:
    """Those that ran, by seconds."""
    return sorted((row for row in rows if "seconds_min" in row), key=lambda row: row[key])


def main() -> None:
    """Measure and write the table."""
    made = argparse.ArgumentParser()
    made.add_argument("folder", type=Path)
    made.add_argument("--hosts", default="2,4,8")
    made.add_argument("--rates", default="100mbit,1gbit,10gbit")
    made.add_argument("--lengths", default="1024,4096")
    made.add_argument("--preset", default="gpt-tiny")
    made.add_argument("--strategies", default=WAYS)
    made.add_argument("--repeats", type=int, default=3)
    given = made.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    cells, deviations = [], []
    for hosts in map(int, given.hosts.split(",")):
        for rate in given.rates.split(","):
            found = measured(given.folder, hosts, rate, given)
            for length in map(int, given.lengths.split(",")):
                rows = [row for row in found if row["length"] == length]
                cells.append((f"{hosts}", rate, f"{length:,}", *fastest(rows)))
                deviations += [
                    row["planned_seconds"] / row["seconds_median"] - 1 for row in order(rows, "seconds_median")
                ]
    right = sum(float(cell[-1].rstrip("%")) <= 2 for cell in cells)
    near = sum(abs(deviation) <= 0.25 for deviation in deviations)
    told = (
        f"the plan's choice is the fastest, or within 2 % of it, in {right} of {len(cells)} cases",
        f"{near} of {len(deviations)} planned steps are within 25 % of the measured median",
    )
    head = ("hosts", "links", "length", "fastest", "s", "second", "plan's fastest", "is slower by")
    table = Table(f"{given.preset}, median seconds of a step", head, tuple(cells))
    text = markdown("Crossovers", [table, Points(told)])
    (given.folder / "crossovers.md").write_text(text)
    print(text)


def fastest(rows: list[dict]) -> tuple[str, ...]:
    """The fastest, its seconds, the second, and what the plan takes for the fastest, with what that costs."""
    first, second, *_ = order(rows, "seconds_median")
    chosen = order(rows, "planned_seconds")[0]
    best = first["seconds_median"]
    behind = f"{second['strategy']} +{second['seconds_median'] / best - 1:.0%}"
    return first["strategy"], f"{best:.3f}", behind, chosen["strategy"], f"{chosen['seconds_median'] / best - 1:.0%}"


if __name__ == "__main__":
    main()
