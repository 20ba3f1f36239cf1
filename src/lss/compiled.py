"""Keeping `torch.compile` out of what it cannot compile: collectives, plans, and masks that are drawn by the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch._compile import _disable_dynamo

Given = ParamSpec("Given")
Result = TypeVar("Result")


def eager(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Run a function, and all that it calls, as it is, in a model that is compiled: a graph ends before it.

    As `torch.compiler.disable`, which imports the compiler at once, for seconds in every process; torch's own parts use
    this form, which imports it at the first call.
    """
    return _disable_dynamo(function)
