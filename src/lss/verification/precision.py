"""Computation in one dtype, whatever a model casts to."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lss.callers import Caller

_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


def computing_in(dtype: torch.dtype) -> AbstractContextManager[object]:
    """In float64, a model's casts to narrower floating dtypes, as in `x.float()`, become casts to float64.

    Models often take norms, softmax or rotary angles in float32: in a comparison in float64 that would be rounding.
    What this package itself casts is left, as it is what is verified. Other dtypes change nothing.
    """
    return _Widened() if dtype == torch.float64 else nullcontext()


class _Widened(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if Caller.of(sys._getframe(1)).is_this_package:
            return function(*args, **given)
        if function in _CASTS:
            return args[0].double()
        result = function(*map(_widened, args), **{name: _widened(value) for name, value in given.items()})
        from_integers = not any(isinstance(part, Tensor) and part.is_floating_point() for part in args)
        return result.double() if from_integers and isinstance(result, Tensor) and result.dtype in _NARROW else result


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value
