"""Whose code calls a function of torch, for modes that change what a model's own code computes."""

from __future__ import annotations

from dataclasses import dataclass
from types import CodeType, FrameType

# What of this package runs a model's own operations.
_OF_MODELS = ("lss.models.", "lss.adapters.functions", "lss.adapters.losses", "lss.verification.reference")


@dataclass(frozen=True)
class Caller:
    """A place in code.

    Args:
        module: Name of the module; empty where it is not known.
        code: That holds the place.
        instruction: Number of the instruction in it.
        outer: Code that called it, and where; None where that was torch, as it does forwards, or this package.
    """

    module: str = ""
    code: CodeType | None = None
    instruction: int = 0
    outer: tuple[CodeType, int] | None = None

    @classmethod
    def of(cls, frame: FrameType | None) -> Caller:
        """The place where a frame is, or the first one outside of torch that led to it."""
        while frame is not None and _package(frame) == "torch":
            frame = frame.f_back
        if frame is None:
            return cls()
        back = frame.f_back
        outer = (back.f_code, back.f_lasti) if back is not None and _package(back) not in ("torch", "lss") else None
        return cls(_module(frame), frame.f_code, frame.f_lasti, outer)

    @property
    def is_this_package(self) -> bool:
        """Whether code of this package computes for itself, and not what a model computes."""
        return self.module.startswith("lss.") and not self.module.startswith(_OF_MODELS)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _package(frame: FrameType) -> str:
    return _module(frame).split(".")[0]
