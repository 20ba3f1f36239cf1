"""Functions that mix tokens outside attention: on a segment they would see one rank's tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lss.context import SequenceContext
from lss.errors import ModelError

# Functions along a dim, with the place of `dim` among their arguments.
_ALONG = {"roll": 2, "norm": 2, "topk": 2, "kthvalue": 2, "diff": 2} | dict.fromkeys(
    (
        "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "flip", "mean", "sum", "amax",
        "amin", "max", "min", "argmax", "argmin", "std", "var", "prod", "median", "logsumexp", "softmax", "log_softmax",
    ),
    1,
)  # fmt: skip
_ANY = (
    F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.avg_pool1d, F.avg_pool2d, F.max_pool1d, F.max_pool2d,
    F.adaptive_avg_pool1d, F.interpolate, F.unfold, F.batch_norm, F.group_norm, F.instance_norm, torch.fft.fft,
    torch.fft.rfft, torch.gru, torch.lstm,
)  # fmt: skip
_PRODUCTS = frozenset((torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__))
_RANDOM = frozenset(
    (torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.bernoulli, Tensor.bernoulli, torch.randint,
     Tensor.bernoulli_, Tensor.normal_, Tensor.uniform_, torch.multinomial, F.gumbel_softmax, F.alpha_dropout,
     F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.rrelu)
)  # fmt: skip
_DIMS: dict[Any, int] = {
    getattr(home, name): place
    for name, place in _ALONG.items()
    for home in (torch, Tensor, F)
    if name in vars(home) or hasattr(home, name)
}
# What is looked at.
WATCHED = frozenset((*_ANY, *_DIMS)) | _PRODUCTS | _RANDOM


def refuse(function: Callable[..., Any], args: Any, kwargs: Any, context: SequenceContext) -> None:
    """Raise ModelError if a function, called while a segment is worked on, would mix its tokens.

    Args:
        function: Any of torch.
        args: What it was given.
        kwargs: The same by name.
        context: Of the parallelized model.
    """
    if function in _DIMS:
        dims = kwargs.get("dim", kwargs.get("dims", args[_DIMS[function]] if len(args) > _DIMS[function] else None))
        mixes = isinstance(args[0] if args else None, Tensor) and _along_tokens(args[0], dims, context)
    elif function in _PRODUCTS:
        mixes = _of_tokens(args[0], args[1] if len(args) > 1 else kwargs.get("other"), context)
    elif function in _RANDOM:
        mixes = not (function in (torch.rand, torch.randn) and _is_scalar(args))
    else:
        mixes = function in _ANY
    if mixes and not context.is_safe(context.frames.innermost):
        shapes = [tuple(part.shape) for part in args if isinstance(part, Tensor)]
        here = context.frames.innermost or "the model"
        raise ModelError(
            f"{here} calls {getattr(function, '__name__', function)} on {shapes}, of one rank's tokens: it mixes them, "
            "or draws numbers that know no position",
            allowed="scaled_dot_product_attention, and functions of each token alone",
            remedy=f"lss.parallelize(model, mesh, cut='layers'), or safe=['{here}'] if each token stays alone",
        )


def _along_tokens(tensor: Tensor, dims: Any, context: SequenceContext) -> bool:
    """Whether a dim is that of the tokens: [B, S, ...], [B, H, S, D], or [B * S, ...]."""
    size, number = context.layout.segment_length, context.num_sequences
    if size == 1 or not isinstance(dims, int | tuple | list):
        return False
    for dim in (dims,) if isinstance(dims, int) else dims:
        place = dim % tensor.dim() if isinstance(dim, int) and tensor.dim() else -1
        is_last = place == tensor.dim() - 1 and tensor.is_floating_point()
        if 0 < place < 3 and not is_last and tensor.dim() > 1 and tensor.size(place) == size:
            return True
        if place == 0 and tensor.dim() > 1 and tensor.size(0) == size * number:
            return True
    return False


def _of_tokens(left: Any, right: Any, context: SequenceContext) -> bool:
    """Whether a product is of scores, [..., S, D] by [..., D, S], or sums over tokens, [..., D, S] by [..., S, E]."""
    if not isinstance(right, Tensor) or min(left.dim(), right.dim()) < 3:
        return False
    size = context.layout.segment_length
    scores = left.size(-2) == size == right.size(-1) and left.size(-1) != size
    return size > 1 and (scores or left.size(-1) == size == right.size(-2))


def _is_scalar(args: Any) -> bool:
    return all(isinstance(part, tuple | list) and len(part) == 0 for part in args)
