"""`lss.attention` against a dense softmax: all masks, layouts, schedules, ranks, heads, widths and lengths.

python -m benchmarks.attention_matrix [--ranks 1,2,3,4] [--every 1]
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.dense import matrix, over_ranks, reference

from lss.testing import RankPool

TOGETHER = 200


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--ranks", default="1,2,3,4", help="numbers of ranks")
    made.add_argument("--every", type=int, default=1, help="take every n-th case only")
    given = made.parse_args()
    torch.set_num_threads(1)
    started, number, worst = time.perf_counter(), 0, 0.0
    with RankPool() as pool:
        for num_ranks in map(int, given.ranks.split(",")):
            cases = list(matrix(ranks=(num_ranks,)))[:: given.every]
            for start in track(range(0, len(cases), TOGETHER), f"{num_ranks} ranks, {len(cases)} cases"):
                part = cases[start : start + TOGETHER]
                for case, *results in zip(part, *pool.run(over_ranks, num_ranks, part, timeout=600), strict=True):
                    worst = max(worst, error(case, results))
                    number += 1
    print(f"{number} cases, largest error {worst:.1e} of the largest value, {time.perf_counter() - started:.0f} s")


def error(case: object, results: list[dict]) -> float:
    """Largest difference of any rank's output or gradient, over the largest value of the reference."""
    found = 0.0
    for name, expected in reference(case).items():
        scale = max(expected.abs().max().item(), 1e-3)
        for result in results:
            found = max(found, (result[name] - expected).abs().max().item() / scale)
    if not found <= 1e-11:
        raise SystemExit(f"{case}: error {found:.1e}")
    return found


if __name__ == "__main__":
    main()
