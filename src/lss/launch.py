"""Ranks started by `lss` itself, as processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, cast

import torch

from lss.errors import MeshError
from lss.mesh import World

# After one rank has ended badly, the others may still say why themselves; then they are stopped.
GRACE_SECONDS = 5.0
# Codes of ranks that have said themselves why they ended: bad input, a lost rank, a difference, a closed pipe.
_EXPLAINED = (2, 3, 4, 141)


def launch(entry: Callable[..., int], num_ranks: int, *args: Any) -> int:
    """Run `entry(world, *args)` on `num_ranks` ranks of this machine and return the exit code of the run.

    The cores are shared among the ranks. If a rank ends badly the others are ended too, and a message names it; if
    this process is killed, the ranks end themselves.

    Args:
        entry: A function of a module, which returns an exit code.
        num_ranks: Processes to start; one runs in this process.
        args: Further arguments, which can be pickled.
    """
    most = max(16, 4 * (os.cpu_count() or 1))
    if num_ranks > most:
        raise MeshError(
            f"{num_ranks} ranks on a machine of {os.cpu_count()} cores",
            allowed=f"at most {most} where lss starts them itself",
            remedy="start them over several machines with torchrun, srun or mpirun",
        )
    if num_ranks == 1:
        return entry(World("none", 0, 1, 0, 1, ""), *args)
    with tempfile.TemporaryDirectory(prefix="lss-") as folder:
        ranks = _start(entry, num_ranks, f"file://{Path(folder) / 'store'}", args)
        try:
            return _watch(ranks)
        finally:
            _stop(ranks)


def _start(entry: Callable[..., int], num_ranks: int, store: str, args: tuple[Any, ...]) -> list[ForkServerProcess]:
    context = multiprocessing.get_context("forkserver")  # torch is imported once, and no thread is ever forked
    context.set_forkserver_preload(["lss", "torch._dynamo", entry.__module__])
    num_threads = max(1, (os.cpu_count() or 1) // num_ranks)
    ranks = []
    for rank in range(num_ranks):
        world = World("lss", rank, num_ranks, rank, num_ranks, store)
        process = context.Process(target=_run, args=(_Outputs(), entry, world, num_threads, args), name=f"rank {rank}")
        process.start()
        ranks.append(process)
    return ranks


class _Outputs:
    """Where this process prints to: a fork server that has run before may print elsewhere."""

    def __init__(self, *duplicates: Any) -> None:
        self.duplicates = duplicates

    def __reduce__(self) -> tuple[type[_Outputs], tuple[Any, ...]]:
        return _Outputs, (DupFd(1), DupFd(2))

    def take(self) -> None:
        """Print there too."""
        for descriptor, duplicate in enumerate(self.duplicates, 1):
            os.dup2(duplicate.detach(), descriptor)


def _run(outputs: _Outputs, entry: Callable[..., int], world: World, num_threads: int, args: tuple[Any, ...]) -> None:
    outputs.take()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too and ends the ranks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(num_threads)
    sys.exit(entry(world, *args))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _watch(ranks: Sequence[ForkServerProcess]) -> int:
    """Wait until all ranks have ended well, or one badly."""
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        for sentinel in wait(list(running)):
            rank = running.pop(cast(int, sentinel))
            ranks[rank].join()
            code = ranks[rank].exitcode or 0
            if code:
                _await_the_others(ranks)
                killed = [other for other, process in enumerate(ranks) if (process.exitcode or 0) < 0]
                rank = killed[0] if killed else rank
                return _report(rank, ranks[rank])
    return 0


def _await_the_others(ranks: Sequence[ForkServerProcess]) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))


def _report(rank: int, process: ForkServerProcess) -> int:
    """Name a rank that could not say itself why it ended."""
    code = process.exitcode or 0
    if code < 0:
        name = signal.Signals(-code).name
        print(
            f"lss: rank {rank} (process {process.pid}) was lost: killed by {name}; all ranks are ended", file=sys.stderr
        )
        return 128 - code
    if code not in _EXPLAINED:
        print(f"lss: rank {rank} (process {process.pid}) failed ({code}); all ranks are ended", file=sys.stderr)
    return code


def _stop(ranks: Sequence[ForkServerProcess]) -> None:
    for process in ranks:
        if process.is_alive():
            process.kill()
    for process in ranks:
        process.join()
