"""Losses that a model works out itself, of its own segment's tokens: made those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lss.context import SequenceContext, wide
from lss.errors import ModelError

_CROSS_ENTROPY = signature(F.cross_entropy)
_OTHERS = (
    F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.ctc_loss, F.cosine_embedding_loss, F.margin_ranking_loss, F.multi_margin_loss,
    F.hinge_embedding_loss, F.triplet_margin_loss, F.gaussian_nll_loss, F.poisson_nll_loss,
)  # fmt: skip


def with_whole_losses(model: nn.Module, context: SequenceContext) -> None:
    """Have cross-entropies that the model's forward takes be means over the tokens of all ranks, in place."""
    forward = model.forward

    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _WholeLosses(context):
            return forward(*args, **kwargs)

    model.forward = wrapped


class _WholeLosses(TorchFunctionMode):
    """Takes cross-entropies in hand; refuses other losses, whose mean would be one rank's, and masks of no position."""

    def __init__(self, context: SequenceContext) -> None:
        super().__init__()
        self.context = context

    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if function is F.cross_entropy:
            return self._cross_entropy(args, given)
        if function is F.dropout:
            _refuse_dropout(*args, **given)
        if function in _OTHERS and given.get("reduction", "mean") != "none":
            raise ModelError(
                f"the model takes a {function.__name__} of its own segment's tokens",
                allowed="F.cross_entropy inside of the model",
                remedy="call the model without labels, and take a loss of lss.losses of its outputs",
            )
        return function(*args, **given)

    def _cross_entropy(self, args: Any, kwargs: Any) -> Any:
        bound = _CROSS_ENTROPY.bind(*args, **kwargs)
        bound.apply_defaults()
        named = bound.arguments
        logits, labels, reduction = wide(named["input"]), named["target"], named["reduction"]
        if reduction == "none":
            return F.cross_entropy(*args, **kwargs)
        if labels.is_floating_point() or named["weight"] is not None:
            raise ModelError("a cross-entropy with weights or soft labels", allowed="integer labels without weights")
        options = {name: named[name] for name in ("ignore_index", "label_smoothing")}
        total = F.cross_entropy(logits, labels, reduction="sum", **options)
        number = (labels != named["ignore_index"]).sum() if reduction == "mean" else None
        return _Whole.apply(total, number, self.context)  # type: ignore[no-untyped-call]


def _refuse_dropout(values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> None:
    if training and p:
        raise ModelError(
            f"the model drops values by F.dropout at a rate of {p}, whose masks know no position",
            allowed="nn.Dropout modules, which are keyed by position",
            remedy="set the rate to 0 in the model's configuration",
        )


class _Whole(torch.autograd.Function):
    """The sum over all ranks, or the mean; backward is that of the rank's own share, which averaging adds up."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, number: Tensor | None, context: SequenceContext) -> Tensor:
        if number is None:
            ctx.number = 1.0
            return context.sum_over_ranks(total.detach())
        found = context.sum_over_ranks(torch.stack([total.detach().double(), number.double()]))
        ctx.number = found[1].clamp(min=1)
        mean: Tensor = (found[0] / ctx.number).to(total.dtype)
        return mean

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return (gradients[0] / ctx.number).to(gradients[0].dtype), None, None
