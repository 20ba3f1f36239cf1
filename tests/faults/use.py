"""Faults of what users call around the model."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

from lss import documents
from lss.verification import runs
from tests.faults.registry import fault, replaced


@fault
def loss_doubled() -> Iterator[None]:
    with replaced(runs, "token_mean_cross_entropy", lambda original: lambda *given: 2 * original(*given)):
        yield


def shifted(times: int) -> AbstractContextManager:
    """Shift labels that many times, not once."""
    return replaced(
        documents, "shift", lambda original: lambda labels, offset, *rest: original(labels, times * offset, *rest)
    )


@fault
def labels_shifted_twice() -> Iterator[None]:
    with shifted(2):
        yield


@fault
def outputs_joined_in_reverse() -> Iterator[None]:
    with replaced(runs, "unshard", lambda original: lambda *given, **named: original(*given, **named).flip(1)):
        yield
