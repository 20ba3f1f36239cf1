"""Faults of what attention layers send."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest.mock import patch

import torch

from lss.collectives import Axis
from tests.faults.registry import fault, replaced


def gathers(change: Callable) -> AbstractContextManager:
    """Change what an all-gather of an attention layer returns."""
    return waits("start_all_gather", change)


def waits(operation: str, change: Callable) -> AbstractContextManager:
    """Change what a collective of an attention layer returns when it has been waited for."""

    def wrap(original: Callable) -> Callable:
        def start(self: Axis, tensor: torch.Tensor, *, layer: str, phase: str) -> Callable:
            wait = original(self, tensor, layer=layer, phase=phase)
            return (lambda: change(self, wait())) if "attention" in layer else wait

        return start

    return replaced(Axis, operation, wrap)


@fault
def stale_gather() -> Iterator[None]:
    kept: list[torch.Tensor] = []

    def change(axis: Axis, whole: torch.Tensor) -> torch.Tensor:
        kept.append(whole)
        return kept[-2] if len(kept) > 1 else whole

    with gathers(change):
        yield


@fault
def segments_in_the_wrong_order() -> Iterator[None]:
    with gathers(lambda axis, whole: whole.roll(whole.size(0) // axis.size, 0)):
        yield


@fault
def sent_in_float32() -> Iterator[None]:
    def narrowed(axis: Axis, whole: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():  # as a cast by the package itself, which `verify` leaves as it is
            return whole.float().double()

    with gathers(narrowed):
        yield


@fault
def reduce_scatter_left_out() -> Iterator[None]:
    def own_part(self: Axis, whole: torch.Tensor, *, layer: str, phase: str) -> Callable:
        return lambda: whole.chunk(self.size)[self.rank].clone()

    with patch.object(Axis, "start_reduce_scatter", own_part):
        yield


@fault
def reduce_scatter_averages() -> Iterator[None]:
    with waits("start_reduce_scatter", lambda axis, part: part / axis.size):
        yield


@fault
def gather_without_gradient() -> Iterator[None]:
    with waits("start_reduce_scatter", lambda axis, part: torch.zeros_like(part)):
        yield
