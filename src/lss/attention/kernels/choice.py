"""Which kernel computes."""

from __future__ import annotations

from typing import Literal, get_args

from lss.attention.kernels.base import Kernel, Needs
from lss.attention.kernels.cuda import CUDNN, EFFICIENT, FLASH
from lss.attention.kernels.flash_cpu import FLASH_CPU
from lss.attention.kernels.flex import FLEX
from lss.attention.kernels.math import MATH
from lss.errors import KernelError

KernelName = Literal["auto", "flash", "efficient", "cudnn", "flex", "math", "stored"]
# Not block by block: all scores at once, kept for backward (attention/stored.py).
STORED = "stored"
# in the order in which `auto` asks them
KERNELS: tuple[Kernel, ...] = (FLASH_CPU, FLASH, EFFICIENT, CUDNN, FLEX, MATH)


def choose(name: str, needs: Needs) -> Kernel:
    """The kernel of this name; `auto` is the first that can do what is needed.

    Raises:
        KernelError: There is none of this name, or it cannot do it: the message says why.
    """
    if name not in get_args(KernelName):
        raise KernelError(f"attention.kernel = {name!r}", allowed=", ".join(get_args(KernelName)))
    able = [kernel for kernel in KERNELS if not kernel.refuses(needs)]
    found = able if name == "auto" else [kernel for kernel in able if kernel.name == name]
    if found:
        return found[0]
    named = [kernel for kernel in KERNELS if kernel.name == name]
    reason = min(named, key=lambda kernel: kernel.device != needs.device_type).refuses(needs)
    others = ", ".join([*(kernel.name for kernel in able), STORED])
    raise KernelError(f"attention.kernel = {name!r}: {reason}", allowed=f"auto, or {others}")


def why(kernel: Kernel, needs: Needs) -> str:
    """A kernel's name and why those before it were not taken, for people."""
    before = [other for other in KERNELS[: KERNELS.index(kernel)] if other.device == needs.device_type]
    reasons = [f"{other.name}: {reason}" for other in before if (reason := other.refuses(needs))]
    return f"{kernel.name} ({'; '.join(reasons)})" if reasons else kernel.name
