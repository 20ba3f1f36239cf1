"""Whose code calls a function of torch, for modes that change what a model's own code computes."""

from __future__ import annotations

from types import FrameType

# What of this package runs a model's own operations.
_OF_MODELS = ("lss.models.", "lss.adapters.functions", "lss.adapters.losses", "lss.verification.reference")


def calling_module(frame: FrameType | None) -> str:
    """Name of the module whose code is running in a frame, or in the first one outside of torch that led to it."""
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "torch":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def is_of_this_package(module: str) -> bool:
    """Whether code of this package computes for itself, and not what a model computes."""
    return module.startswith("lss.") and not module.startswith(_OF_MODELS)
