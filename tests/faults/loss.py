"""Faults of the loss, its labels and its scale."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from lss.context import SequenceContext, context_of
from lss.layout import Layout
from lss.verification import runs
from tests.faults.averaging import after_averaging, scaled
from tests.faults.registry import fault, replaced


@fault
def mean_of_means() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def local(model: torch.nn.Module, *labels: torch.Tensor) -> torch.Tensor:
            own = sum((part != -100).sum() for part in labels).double()
            return own * context_of(model).sequence.size * context_of(model).data.size

        return local

    with replaced(runs, "count_tokens", wrap):
        yield


@fault
def loss_times_ranks() -> Iterator[None]:
    with replaced(SequenceContext, "sum_over_ranks", lambda original: lambda self, value: 2 * original(self, value)):
        yield


@fault
def gradients_divided_again() -> Iterator[None]:
    with after_averaging(scaled(0.5)):
        yield


@fault
def positional_gradients_divided() -> Iterator[None]:
    with after_averaging(scaled(0.5, "positions.weight")):
        yield


def changed_shard(change: Callable[[dict], object]) -> AbstractContextManager:
    """Do something to what `lss.shard` returns."""

    def wrap(original: Callable) -> Callable:
        def shard(*args: object, **kwargs: object) -> dict:
            batch = original(*args, **kwargs)
            change(batch)
            return batch

        return shard

    return replaced(runs, "shard", wrap)


@fault
def labels_shifted_inside_the_segment() -> Iterator[None]:
    with changed_shard(lambda batch: batch["labels"][:, -1].fill_(-100)):
        yield


@fault
def labels_not_shifted() -> Iterator[None]:
    with changed_shard(lambda batch: batch.update(labels=batch["tokens"])):
        yield


@fault
def last_token_dropped() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def shard(self: Layout, whole: torch.Tensor, rank: int, *, dim: int, fill: float) -> torch.Tensor:
            cut = whole.clone()
            cut.select(dim, self.length - 1).fill_(fill or 0)
            return original(self, cut, rank, dim=dim, fill=fill)

        return shard

    with replaced(Layout, "shard", wrap):
        yield
