"""Ranks for tests: processes that are started once and then run one function after the other over gloo."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from lss.errors import MeshError
from lss.mesh import World, init_world


class RanksFailedError(AssertionError):
    """A function raised on some rank; holds the traceback of each."""


class RankPool:
    """Processes that run functions over ranks; starting them takes seconds, a call milliseconds.

    Args:
        size: The largest number of ranks of a call.
        preload: Modules that are imported once for all of them, unless this process has started others before.

    Example:
        `with RankPool(4) as pool: results = pool.run(function, 3, argument)` calls `function(argument)` on ranks
        0, 1, 2 of a fresh process group and returns what each returned. Functions must belong to a module.
    """

    def __init__(self, size: int = 4, preload: Sequence[str] = ()) -> None:
        self.size, self.preload = size, preload
        self._workers: list[tuple[ForkServerProcess, Connection]] = []

    def run(self, function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call `function(*args)` on every rank of a new world of `num_ranks` on the CPU, one thread each.

        Raises:
            RanksFailedError: A rank raised, died, or was not ready within `timeout` seconds.
            MeshError: There are not so many ranks in the pool.
        """
        if not 1 <= num_ranks <= self.size:
            raise MeshError(f"{num_ranks} ranks of a pool of {self.size}", allowed=f"1 to {self.size}")
        self._start()
        with tempfile.TemporaryDirectory(prefix="lss-") as folder:
            for rank in range(num_ranks):
                world = World("lss", rank, num_ranks, rank, num_ranks, f"file://{Path(folder) / 'store'}")
                self._workers[rank][1].send_bytes(pickle.dumps((function, world, args)))
            results = [self._receive(rank, timeout) for rank in range(num_ranks)]
        failures = {rank: result for rank, (good, result) in enumerate(results) if not good}
        if failures:
            self.close()  # other ranks may hang in a collective, or hold half a group
            raise RanksFailedError("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))
        return [result for _, result in results]

    def close(self) -> None:
        """End the processes; the next `run` starts new ones."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lss.testing", "torch._dynamo", *self.preload])
        while len(self._workers) < self.size:
            here, there = context.Pipe()
            process = context.Process(target=_work, args=(there,), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))

    def _receive(self, rank: int, timeout: float) -> tuple[bool, Any]:
        connection = self._workers[rank][1]
        if not connection.poll(timeout):
            return False, f"no answer within {timeout:.0f} s"
        try:
            good, result = pickle.loads(connection.recv_bytes())
        except EOFError:
            return False, "the process died"
        return good, result


def _work(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, world, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        answer = _answer(function, world, args)
        try:
            message = pickle.dumps(answer)
        except Exception:  # what a result holds is the user's
            message = pickle.dumps((False, f"the result cannot be pickled: {traceback.format_exc()}"))
        connection.send_bytes(message)


def _answer(function: Callable[..., Any], world: World, args: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        init_world(world, device="cpu", timeout_seconds=60)
        return True, function(*args)
    except Exception:
        return False, traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
