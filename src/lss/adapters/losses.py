"""Losses that a model works out itself, of its own segment's tokens or of whole sequences: those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lss.batch import IGNORE_INDEX
from lss.context import SequenceContext
from lss.dtypes import wide
from lss.errors import ModelError
from lss.trial import tensors_in

_CROSS_ENTROPY = signature(F.cross_entropy)
_BY_VALUE = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits)
_OTHERS = (
    F.nll_loss, F.kl_div, F.binary_cross_entropy, F.ctc_loss, F.cosine_embedding_loss, F.margin_ranking_loss,
    F.multi_margin_loss, F.hinge_embedding_loss, F.triplet_margin_loss, F.gaussian_nll_loss, F.poisson_nll_loss,
)  # fmt: skip
# Nodes of a graph: a loss over all ranks, whole sequences put together, a weight.
_WHOLE, _JOINED, _WEIGHT = "_WholeBackward", "_GatherBackward", "a weight"
# Functions that take the mean, or the sum, over tokens or sequences.
TAKEN = frozenset((F.cross_entropy, *_BY_VALUE, *_OTHERS))


def whole(function: Callable[..., Any], args: Any, kwargs: Any, context: SequenceContext) -> Tensor:
    """A loss over all ranks; its backward is the rank's share, which averaging adds up.

    Args:
        function: One of `TAKEN`.
        args: What it was given.
        kwargs: The same by name.
        context: Of the parallelized model.

    Raises:
        ModelError: It would be the mean of one rank's tokens.
    """
    if function is F.cross_entropy:
        args, kwargs = (), _by_name(args, kwargs, context)
    if kwargs.get("reduction", "mean") == "none":
        return function(*args, **kwargs)  # type: ignore[no-any-return]
    if context.trial is not None:
        context.trial.note(f"gives {function.__name__}", (args, kwargs))
        return torch.ones(())  # it is of all ranks
    if function is F.cross_entropy:
        return _cross_entropy(kwargs, context)
    reduction = kwargs.get("reduction", "mean")
    if context.is_cut or function in _OTHERS or len(args) > 2 or reduction not in ("mean", "sum"):
        raise ModelError(
            f"the model takes a {function.__name__} of {'its own segment' if context.is_cut else 'its sequences'}",
            allowed="F.cross_entropy inside of the model; where layers cut the tokens, squared and absolute errors and "
            "binary cross-entropy of logits too",
            remedy="call the model without labels, and take a loss of lss.losses of its outputs",
        )
    values = function(*args, **{**kwargs, "reduction": "none"})
    number = torch.tensor(values.numel(), device=values.device) if reduction == "mean" else None
    return _over_ranks(wide(values).sum(), number, context)


def _by_name(args: Any, kwargs: Any, context: SequenceContext) -> dict[str, Any]:
    """What a cross-entropy is given; labels of a segment that count nowhere are those that it ignores."""
    bound = _CROSS_ENTROPY.bind(*args, **kwargs)
    bound.apply_defaults()
    named, labels = bound.arguments, bound.arguments["target"]
    if context.is_cut and not labels.is_floating_point():
        named["target"] = labels.masked_fill(_is_ignored(labels, context), named["ignore_index"])
    return named


def _is_ignored(labels: Tensor, context: SequenceContext) -> Tensor:
    """Which labels `lss.shard` has set to -100; where it did not know them as labels, also those of empty slots."""
    ignored = labels == IGNORE_INDEX
    size, number = context.layout.segment_length, context.num_sequences
    if context.present.has_labels or labels.numel() != number * size:
        return ignored
    is_empty = torch.arange(size, device=labels.device) >= context.layout.num_tokens(context.sequence.rank)
    slots_first = not context.token_dim or (labels.dim() == 2 and labels.size(0) == size != number)
    is_empty = is_empty.repeat_interleave(number) if slots_first else is_empty.repeat(number)
    return ignored | is_empty.view(labels.shape)


def _cross_entropy(named: dict[str, Any], context: SequenceContext) -> Tensor:
    logits, labels, reduction = wide(named["input"]), named["target"], named["reduction"]
    if labels.is_floating_point() or named["weight"] is not None:
        raise ModelError("a cross-entropy with weights or soft labels", allowed="integer labels without weights")
    options = {name: named[name] for name in ("ignore_index", "label_smoothing")}
    total = F.cross_entropy(logits, labels, reduction="sum", **options)
    number = (labels != named["ignore_index"]).sum() if reduction == "mean" else None
    return _over_ranks(total, number, context)


def _over_ranks(total: Tensor, number: Tensor | None, context: SequenceContext) -> Tensor:
    """Sequences that are whole are there on every rank of a group: each counts for its part."""
    share = 1 if context.is_cut else context.sequence.size
    number = None if number is None else number.double() / share
    loss: Tensor = _Whole.apply(total / share, number, context)  # type: ignore[no-untyped-call]
    return loss


def of_its_own() -> ModelError:
    """Of a model that works out a loss in another way."""
    return ModelError(
        "the model works out a loss by code of its own, of the tokens or sequences that its rank has",
        allowed="F.cross_entropy, of torch; where layers cut the tokens, squared and absolute errors and binary "
        "cross-entropy of logits too",
        remedy="take the loss of the model's outputs, by lss.losses",
    )


def require_taken(model: nn.Module, outputs: Any, *, first: bool) -> None:
    """Raise ModelError if a number that a model returns, or keeps, is a loss with terms that are none of `TAKEN`.

    Each rank would add such terms, of weights, of whole sequences that all of them have, or of its own tokens.

    Args:
        model: The model.
        outputs: What it returned.
        first: Whether what its modules keep as attributes is looked at too.
    """
    returned = [_ends(part) for part in tensors_in(outputs)]
    kept = [_ends(part) for module in model.modules() for part in _kept(module)] if first else []
    if any(ends not in (set(), {_WHOLE}, {_WEIGHT}) for ends in returned) or any(ends - {_WHOLE} for ends in kept):
        raise of_its_own()


def _kept(module: nn.Module) -> Iterator[Any]:
    for value in vars(module).values():
        yield from value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)


def _ends(number: Any) -> set[str]:
    """Kinds of what a number's graph comes to: losses of `TAKEN`, whole sequences behind layers, weights."""
    if not isinstance(number, Tensor) or number.dim() or not number.requires_grad:
        return set()
    waiting, seen, ends = [number.grad_fn], set(), set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = _WEIGHT if hasattr(node, "variable") else type(node).__name__
        if kind in (_WHOLE, _JOINED, _WEIGHT):
            ends.add(kind)
        else:
            waiting += [other for other, _ in node.next_functions]
    return ends


class _Whole(torch.autograd.Function):
    """The sum over all ranks, or the mean; backward is that of the rank's own share, which averaging adds up."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, number: Tensor | None, context: SequenceContext) -> Tensor:
        if number is None:
            ctx.number = 1.0
            return context.sum_over_ranks(total.detach())
        found = context.sum_over_ranks(torch.stack([total.detach().double(), number.double()]))
        ctx.number = found[1].clamp(min=torch.finfo(torch.float64).tiny)
        mean: Tensor = (found[0] / ctx.number).to(total.dtype)
        return mean

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return (gradients[0] / ctx.number).to(gradients[0].dtype), None, None
