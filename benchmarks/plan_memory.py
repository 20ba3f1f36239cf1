"""Bytes at peak, planned and of runs over 1, 2 and 4 CPU ranks watched by torch's MemTracker.

python -m benchmarks.plan_memory: four models, two kernels, gathered tensors kept or gathered again.
"""

from itertools import product

from tests.planned import config_of, planned, run

from lss.testing import RankPool

MODELS, KERNELS = ("gpt", "grouped_gpt", "gpt2", "llama"), ("flash", "math")


def main() -> None:
    """Print a row a run, and the largest deviation."""
    largest = 0.0
    with RankPool(preload=("tests.planned",)) as ranks:
        for num_ranks, name, kernel, kept in product((1, 2, 4), MODELS, KERNELS, (True, False)):
            config = config_of(num_ranks, kernel=kernel, keep=kept)
            found = planned(name, config).peak.total
            real = max(size for size, _ in ranks.run(run, num_ranks, name, config))
            largest = max(largest, abs(found / real - 1))
            what = f"{name:12} {kernel:6} {'kept' if kept else 'again':6} N={num_ranks}"
            sizes = f"planned {found / 1e6:8.3f} MB  run {real / 1e6:8.3f} MB"
            print(f"{what} {sizes}  {found / real - 1:+.2%}", flush=True)
    print(f"largest deviation {largest:.2%}")


if __name__ == "__main__":
    main()
