"""What bounds a step over ranks: the same step where what travels costs one copy in memory, and the serial one.

python benchmarks/step_bound.py [--length 8192] [--ranks 2] [--repeats 3]
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import lss
from lss import collectives
from lss.bench import jobs, measure
from lss.config import AttentionConfig
from lss.models import PRESETS
from lss.testing import RankPool

SHAPE, CPU = PRESETS["gpt-20m"], torch.device("cpu")


class Done:
    """The handle of a collective that is over."""

    def wait(self) -> None:
        """At once."""


@contextmanager
def free_communication() -> Iterator[None]:
    """Every rank takes its own data for the others': nothing is sent, and results are wrong."""

    def all_gather(whole: torch.Tensor, segment: torch.Tensor, **options: Any) -> Done:
        whole.view(-1, segment.numel()).copy_(segment.reshape(1, -1))
        return Done()

    def receive(part: torch.Tensor, **options: Any) -> Done:
        part.zero_()
        return Done()

    with (
        patch.object(collectives, "_all_gather", all_gather),
        patch.object(dist, "isend", lambda part, **options: Done()),
        patch.object(dist, "irecv", receive),
        patch.object(dist, "all_reduce", lambda tensor, **options: None),
    ):
        yield


def on_rank(ranks: int, length: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, until the slowest rank is done; the serial one on rank 0, with all cores."""
    mesh = lss.init_mesh(ranks, device="cpu")
    cores = os.cpu_count() or 1
    serial = jobs.serial_step(SHAPE, 1, length, CPU) if dist.get_rank() == 0 else None
    parallel = jobs.lss_step(SHAPE, 1, length, mesh, AttentionConfig(gather="kv"))
    found: dict[str, list[float]] = {}
    for index in range(repeats + 1):
        for name in ("serial", "over ranks", "free communication"):
            dist.barrier()
            if name == "serial":
                torch.set_num_threads(cores)
                seconds = measure.seconds(serial.run, CPU) if serial else 0.0
            else:
                torch.set_num_threads(max(1, cores // ranks))
                with free_communication() if name == "free communication" else nullcontext():
                    seconds = measure.seconds(parallel.run, CPU)
            slowest = torch.tensor(seconds)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if index:  # the first run warms up
                found.setdefault(name, []).append(slowest.item())
    return found


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--length", type=int, default=8192)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--repeats", type=int, default=3)
    given = made.parse_args()
    with RankPool(given.ranks) as pool:
        found = pool.run(on_rank, given.ranks, given.ranks, given.length, given.repeats, timeout=3600)[0]
    for name, seconds in found.items():
        ratio = min(found["serial"]) / min(seconds)
        print(f"{name}: {min(seconds):.2f} s, {ratio:.3f} ({', '.join(f'{one:.2f}' for one in sorted(seconds))})")


if __name__ == "__main__":
    main()
