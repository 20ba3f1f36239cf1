"""Cross-entropy of a linear head, without the logits of all tokens ever existing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lss.batch import IGNORE_INDEX
from lss.dtypes import wide
from lss.errors import LayoutError


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, count: Tensor, *, bias: Tensor | None = None, chunk: int = 1024
) -> Tensor:
    """This rank's share of the mean cross-entropy of `hidden @ weight.T + bias`; as `token_mean_cross_entropy`.

    Logits [B, S, vocabulary] are the peak of memory at long S and large vocabularies. Here those of `chunk` tokens
    exist at a time: their gradients are worked out in forward, and only those of hidden and weight are kept.

    Args:
        hidden: [B, S, E].
        weight: [vocabulary, E], as of `nn.Linear`.
        labels: int64 [B, S], already shifted; -100 is ignored.
        count: The global number of valid labels, from `count_tokens`.
        bias: [vocabulary].
        chunk: Tokens at a time.

    Returns:
        A scalar in float32 or wider.
    """
    if chunk < 1:
        raise LayoutError(f"chunk={chunk}", allowed="at least 1 token at a time")
    rows = hidden.flatten(0, -2)
    total: Tensor
    if torch.is_grad_enabled():
        total = _Chunked.apply(rows, weight, bias, labels.flatten(), chunk)  # type: ignore[no-untyped-call]
    else:
        parts = zip(rows.split(chunk), labels.flatten().split(chunk), strict=True)
        total = torch.stack([_loss(_logits(part, weight, bias), target) for part, target in parts]).sum()
    return total / count.clamp(min=1).to(total.dtype)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int) -> Tensor:
        grad_rows = torch.empty_like(rows)
        total, grad_weight = wide(rows.new_zeros(())), wide(torch.zeros_like(weight))
        grad_bias = None if bias is None else wide(torch.zeros_like(bias))
        for part, target, to_part in zip(rows.split(chunk), labels.split(chunk), grad_rows.split(chunk), strict=True):
            logits = _logits(part, weight, bias)
            total += _loss(logits, target)
            gradient = _gradient_of_logits(logits, target)
            to_part.copy_(gradient.to(weight.dtype) @ weight)
            grad_weight += (gradient.to(part.dtype).T @ part).to(grad_weight.dtype)
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
        ctx.save_for_backward(grad_rows, grad_weight, grad_bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        grad_rows, grad_weight, grad_bias = ctx.saved_tensors
        factor, (weight_dtype, bias_dtype) = gradients[0], ctx.dtypes
        to_bias = None if grad_bias is None else (grad_bias * factor).to(bias_dtype)
        return (
            (wide(grad_rows) * factor).to(grad_rows.dtype),
            (grad_weight * factor).to(weight_dtype),
            to_bias,
            None,
            None,
        )


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return wide(F.linear(rows, weight, bias))


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")


def _gradient_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Softmax minus one at the label; zero where the label is ignored."""
    valid = labels != IGNORE_INDEX
    gradient = logits.softmax(-1)
    index = labels.clamp(min=0).unsqueeze(-1)
    gradient.scatter_add_(-1, index, torch.full_like(index, -1, dtype=gradient.dtype))
    return gradient * valid.unsqueeze(-1)
