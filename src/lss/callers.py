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
    """

    module: str = ""
    code: CodeType | None = None
    instruction: int = 0

    @classmethod
    def of(cls, frame: FrameType | None) -> Caller:
        """The place where a frame is, or the first one outside of torch that led to it."""
        while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] == "torch":
            frame = frame.f_back
        if frame is None:
            return cls()
        return cls(str(frame.f_globals.get("__name__", "")), frame.f_code, frame.f_lasti)

    @property
    def is_this_package(self) -> bool:
        """Whether code of this package computes for itself, and not what a model computes."""
        return self.module.startswith("lss.") and not self.module.startswith(_OF_MODELS)
