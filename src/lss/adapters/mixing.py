"""Functions that mix tokens outside attention, or pick some: on a segment they would see one rank's tokens alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lss.context import SequenceContext
from lss.errors import ModelError

# Functions along a dim, with the place of `dim` among their arguments.
_ALONG = {"roll": 2, "norm": 2, "topk": 2, "kthvalue": 2, "diff": 2, "chunk": 2, "split": 2} | dict.fromkeys(
    (
        "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "flip", "mean", "sum", "amax",
        "amin", "max", "min", "argmax", "argmin", "std", "var", "prod", "median", "logsumexp", "softmax", "log_softmax",
        "select", "narrow", "index_select", "gather", "unbind", "unfold",
    ),
    1,
)  # fmt: skip
_ANY = frozenset(
    (
        F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.avg_pool1d, F.avg_pool2d, F.max_pool1d, F.max_pool2d,
        F.adaptive_avg_pool1d, F.interpolate, F.unfold, F.batch_norm, F.group_norm, F.instance_norm, torch.fft.fft,
        torch.fft.rfft, torch.gru, torch.lstm,
    )
)  # fmt: skip
_PRODUCTS = frozenset((torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__))
_RANDOM = frozenset(
    (
        torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.bernoulli, torch.randint, torch.multinomial,
        Tensor.bernoulli, Tensor.bernoulli_, Tensor.normal_, Tensor.uniform_, F.gumbel_softmax, F.alpha_dropout,
        F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.rrelu,
    )
)  # fmt: skip
_DIMS: dict[Any, int] = {
    getattr(home, name): place for name, place in _ALONG.items() for home in (torch, Tensor, F) if hasattr(home, name)
}
# What is looked at.
WATCHED = _ANY | _PRODUCTS | _RANDOM | frozenset(_DIMS) | {Tensor.__getitem__, F.pad, torch.einsum}


def refuse(function: Callable[..., Any], args: Any, kwargs: Any, context: SequenceContext) -> None:
    """Raise ModelError if a function, called while a segment is worked on, would mix its tokens or pick some.

    Args:
        function: One of `WATCHED`, or another, which is let pass.
        args: What it was given.
        kwargs: The same by name.
        context: Of the parallelized model.
    """
    here = context.frames.innermost
    if context.layout.segment_length == 1 or _is_safe(here, context) or not _mixes(function, args, kwargs, context):
        return
    shapes = [tuple(part.shape) for part in args if isinstance(part, Tensor)]
    raise ModelError(
        f"{here or 'the model'} calls {getattr(function, '__name__', function)} on {shapes}, tokens of one rank alone: "
        "it mixes or picks them, or draws numbers that know no position",
        allowed="scaled_dot_product_attention, and functions of each token alone",
        remedy=f"lss.parallelize(model, mesh, cut='layers'), or safe=[{here!r}] if each token stays alone",
    )


def refuse_random(function: Callable[..., Any], args: Any, context: SequenceContext) -> None:
    """Raise ModelError if random numbers are drawn for whole sequences, which each rank would draw for itself."""
    here = context.frames.innermost
    if function in _RANDOM and not _is_scalar(args) and not _is_safe(here, context):
        raise ModelError(
            f"{here or 'the model'} calls {getattr(function, '__name__', function)}: other ranks draw other numbers",
            allowed="dropout",
            remedy="draw them outside of the model, alike on all ranks, and hand them in",
        )


def _is_safe(name: str, context: SequenceContext) -> bool:
    """Whether the user says that a module keeps tokens alone."""
    return any(name == safe or name.startswith(f"{safe}.") for safe in context.safe)


def _mixes(function: Callable[..., Any], args: Any, kwargs: Any, context: SequenceContext) -> bool:
    first = args[0] if args else kwargs.get("input")
    if function in _RANDOM:
        return not _is_scalar(args)
    if function is torch.einsum:
        return _contracts(*args, size=context.layout.segment_length)
    if function in _ANY or not isinstance(first, Tensor):
        return function in _ANY
    if function in _PRODUCTS:
        return _of_tokens(first, args[1] if len(args) > 1 else kwargs.get("other"), context.layout.segment_length)
    return any(_is_of_tokens(first, dim, context) for dim in _dims(function, first, args, kwargs))


def _dims(function: Callable[..., Any], tensor: Tensor, args: Any, kwargs: Any) -> Iterator[int]:
    """The dims that a function works along."""
    if function is Tensor.__getitem__:
        yield from _picked(tensor, args[1])
    elif function is F.pad:
        pad = args[1] if len(args) > 1 else kwargs["pad"]
        yield from (tensor.dim() - 1 - place // 2 for place, number in enumerate(pad) if number)
    elif function in _DIMS:
        place = _DIMS[function]
        named = (kwargs[name] for name in ("dim", "dims", "axis") if name in kwargs)
        given = next(named, args[place] if len(args) > place else None)
        if given is None and tensor.is_floating_point() and tensor.dim() > 2:
            given = tuple(range(tensor.dim()))  # over all
        for dim in given if isinstance(given, tuple | list) else (given,):
            if isinstance(dim, int) and tensor.dim():
                yield dim % tensor.dim()


def _picked(tensor: Tensor, index: Any) -> Iterator[int]:
    """The dims of which an index takes a part."""
    parts = [part for part in (index if isinstance(index, tuple) else (index,)) if part is not None]
    if any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts):
        return
    behind = len(parts) - parts.index(...) - 1 if any(part is ... for part in parts) else 0
    for place, part in enumerate(parts):
        is_whole = part is ... or (isinstance(part, slice) and not part.start and part.stop is None and not part.step)
        if (isinstance(part, int | slice) and not is_whole) or (place and isinstance(part, list | Tensor)):
            ahead = behind == 0 or place < len(parts) - behind
            yield place if ahead else tensor.dim() - len(parts) + place


def _is_of_tokens(tensor: Tensor, dim: int, context: SequenceContext) -> bool:
    """Whether a dim is that of the tokens: [B, S, ...], [B, H, S, D], integers [B, S], or [B * S, E]."""
    size = context.layout.segment_length
    is_last = dim == tensor.dim() - 1 and (tensor.is_floating_point() or tensor.dim() != 2)
    if tensor.dim() == 1:
        return tensor.size(0) == size and not tensor.is_floating_point()
    if 0 < dim < 3 and not is_last and tensor.dim() > 1 and tensor.size(dim) == size:
        return True
    return dim == 0 and tensor.dim() > 1 and tensor.size(0) == size * context.num_sequences


def _of_tokens(left: Tensor, right: Any, size: int) -> bool:
    """Whether a product is of scores, [..., S, D] by [..., D, S], or sums over tokens, [..., D, S] by [..., S, E]."""
    if isinstance(right, Tensor) and left.dim() == 2 and left.size(0) == left.size(1) == size:
        return True  # tokens by tokens
    if not isinstance(right, Tensor) or min(left.dim(), right.dim()) < 3:
        return False
    scores = left.size(-2) == size == right.size(-1) and left.size(-1) != size
    return scores or left.size(-1) == size == right.size(-2)


def _contracts(equation: Any, *operands: Any, size: int) -> bool:
    """Whether an einsum sums over tokens of tensors of sequences, or pairs them."""
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return False
    inputs, output = equation.replace(" ", "").split("->")
    tensors = operands[0] if isinstance(operands[0], tuple | list) else operands
    letters = [
        letter
        for names, tensor in zip(inputs.split(","), tensors, strict=True)
        for letter, length in zip(names, tensor.shape, strict=True)
        if length == size and tensor.dim() > 2
    ]
    return any(letter not in output for letter in letters) or len({*letters} & {*output}) > 1


def _is_scalar(args: Any) -> bool:
    return all(isinstance(part, tuple | list) and len(part) == 0 for part in args)
