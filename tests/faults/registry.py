"""The list of faults, and what puts them in."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import torch

from lss.verification import runs

FAULTS: dict[str, Callable] = {}


def fault(function: Callable) -> Callable:
    FAULTS[function.__name__] = contextmanager(function)
    return FAULTS[function.__name__]


@contextmanager
def nothing() -> Iterator[None]:
    """No fault: the control."""
    yield


def replaced(owner: object, name: str, wrap: Callable) -> AbstractContextManager:
    """Patch `owner.name` with `wrap(original)`."""
    return patch.object(owner, name, wrap(getattr(owner, name)))


def changed_model(change: Callable[[torch.nn.Module], None], *, before: bool = False) -> AbstractContextManager:
    """Do something to every model before or after it is parallelized."""

    def wrap(original: Callable) -> Callable:
        def parallelize_as(strategy: str, model: torch.nn.Module, *args: object, **kwargs: object) -> torch.nn.Module:
            if before:
                change(model)
            original(strategy, model, *args, **kwargs)
            if not before:
                change(model)
            return model

        return parallelize_as

    return replaced(runs, "parallelize_as", wrap)
