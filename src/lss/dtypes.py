"""Dtypes in which sums are taken and products run."""

from __future__ import annotations

import torch
from torch import Tensor


def in_autocast(tensor: Tensor) -> Tensor:
    """As matrix products and attention of torch take it: in autocast's dtype where that is on, float64 as it is."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def wide(tensor: Tensor) -> Tensor:
    """In float32, or float64 as it is: the dtype in which sums are taken."""
    return tensor.to(wide_dtype(tensor))


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of `wide(tensor)`."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
