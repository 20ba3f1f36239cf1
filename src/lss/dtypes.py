"""Dtypes in which sums are taken and products run."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which matrix products of `tensor` run: autocast's where it is on, else its own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def wide(tensor: Tensor) -> Tensor:
    """In float32, or float64 as it is: the dtype in which sums are taken."""
    return tensor.to(wide_dtype(tensor))


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of `wide(tensor)`."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
