"""Processes that work out plans beside this one: each is a loop of Python over operators, and fills one core."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager


def all_cores() -> ProcessPoolExecutor:
    """One process a core, begun from a server that has imported what is needed and runs no thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lss.plan"])
    return ProcessPoolExecutor(os.cpu_count() or 1, context)


@contextmanager
def another_process() -> Iterator[Executor | None]:
    """A copy of this process, there at once; None on one core, and where it cannot be copied: it runs threads."""
    if sys.platform != "linux" or threading.active_count() > 1 or os.cpu_count() == 1:
        yield None
        return
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as executor:
        executor.submit(os.getpid)  # copies it now
        yield executor
