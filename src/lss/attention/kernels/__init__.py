"""Kernels of attention: each gives the output and the log-sum-exp of its rows, and a backward that takes both."""

from lss.attention.kernels.base import Kernel, Needs, Operands, dense
from lss.attention.kernels.choice import KERNELS, STORED, KernelName, choose, why
from lss.attention.kernels.math import MATH

__all__ = ["KERNELS", "MATH", "STORED", "Kernel", "KernelName", "Needs", "Operands", "choose", "dense", "why"]
