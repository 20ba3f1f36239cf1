"""Seconds, bytes and operations of a job."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lss.bench.jobs import Measured
from lss.flops import formulas

_MATRIX = 2048  # rows and columns of the matrix product that says what the machine can do


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of one call."""
    _finish(device)
    started = time.perf_counter()
    run()
    _finish(device)
    return time.perf_counter() - started


def operations(job: Measured) -> int:
    """Floating-point operations of a call, by torch's formulas for its operators."""
    counter = _Operations()
    with counter:
        job.run()
    return counter.total


class _Operations(TorchDispatchMode):
    """As torch's FlopCounterMode, which cannot watch modules that are run again inside of a backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total: int = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        formula = formulas().get(function._overloadpacket)
        if formula:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def peak_bytes(job: Measured) -> int:
    """Largest number of bytes of tensors that were alive in a call, parameters and gradients among them."""
    # brings the compiler, which every command would import at its start
    from torch.distributed._tools.mem_tracker import MemTracker  # noqa: PLC0415

    tracker = MemTracker()
    tracker.track_external(*(part for part in (job.model, job.optimizer) if part is not None))
    with tracker:
        job.run()
    devices = tracker.get_tracker_snapshot("peak").values()
    return sum(size for kinds in devices for kind, size in kinds.items() if str(kind).endswith("Total"))


def matrix_product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large matrix product, the best of five."""
    left, right = (torch.ones(_MATRIX, _MATRIX, dtype=dtype, device=device) for _ in range(2))
    best = min(seconds(lambda: _product(left, right), device) for _ in range(6))
    return 2 * _MATRIX**3 / best


def _product(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
