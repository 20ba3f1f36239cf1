"""Which kernel computes."""

from __future__ import annotations

from typing import Literal, get_args

from lss.attention.kernels.base import Kernel, Needs
from lss.attention.kernels.flash_cpu import FLASH_CPU
from lss.attention.kernels.math import MATH
from lss.errors import KernelError

KernelName = Literal["auto", "flash_cpu", "math"]
# fastest first
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (FLASH_CPU, MATH)}


def choose(name: str, needs: Needs) -> Kernel:
    """The kernel of this name; `auto` is the fastest that can do what is needed.

    Raises:
        KernelError: There is none of this name, or it cannot do it: the message says why.
    """
    if name == "auto":
        return next(kernel for kernel in KERNELS.values() if not kernel.refuses(needs))
    if name not in KERNELS:
        raise KernelError(f"attention.kernel = {name!r}", allowed=", ".join(get_args(KernelName)))
    reason = KERNELS[name].refuses(needs)
    if reason:
        others = [other.name for other in KERNELS.values() if not other.refuses(needs)]
        raise KernelError(f"attention.kernel = {name!r}: {reason}", allowed=f"auto, or {', '.join(others)}")
    return KERNELS[name]


def why(kernel: Kernel, needs: Needs) -> str:
    """A kernel's name and why faster ones were not taken, for people."""
    faster = list(KERNELS.values())[: list(KERNELS).index(kernel.name)]
    reasons = [f"{other.name}: {other.refuses(needs)}" for other in faster if other.name.endswith(needs.device.type)]
    return f"{kernel.name} ({'; '.join(reasons)})" if reasons else kernel.name
