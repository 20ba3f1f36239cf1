"""Losses that are sums over tokens: local sum divided by the global count (paper, Principle 4). They send nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lss.batch import IGNORE_INDEX
from lss.context import context_of
from lss.dtypes import wide
from lss.errors import LayoutError


def count_tokens(model: nn.Module, *labels: Tensor) -> Tensor:
    """Number of labels that count, over all given segments and all ranks: a scalar. A collective call.

    Give the labels of all micro-batches of a step at once: the mean is over all of them.

    Args:
        model: The parallelized model.
        labels: Integer labels, of which -100 is ignored, or boolean masks of what counts.
    """
    if not labels or any(part.is_floating_point() for part in labels):
        raise LayoutError("no labels to count, or a mask of numbers", allowed="integer labels, or boolean masks")
    counts = [(part if part.dtype == torch.bool else part != IGNORE_INDEX).sum() for part in labels]
    return context_of(model).sum_over_ranks(torch.stack(counts).sum().double())


def token_mean_cross_entropy(logits: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    """This rank's share of the mean cross-entropy over all tokens of the global batch, in nats.

    The sum over ranks (and micro-batches) of what it returns is the mean; so is the sum of its gradients, which
    `average_gradients` takes. A rank without one valid token returns 0 and sends zero gradients.

    Args:
        logits: [B, S, vocabulary].
        labels: int64 [B, S], already shifted; -100 is ignored.
        count: The global number of valid labels, from `count_tokens`.

    Returns:
        A scalar in float32, or in float64 for float64 logits.
    """
    total = F.cross_entropy(wide(logits).flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return _divided(total, count)


def token_mean_squared_error(outputs: Tensor, targets: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """This rank's share of the mean squared error; as `token_mean`, of squared differences."""
    if outputs.shape != targets.shape:
        raise LayoutError(f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}", allowed="one shape")
    return token_mean(F.mse_loss(wide(outputs), targets.to(wide(outputs).dtype), reduction="none"), valid, count)


def token_mean_binary_cross_entropy(logits: Tensor, targets: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """This rank's share of the mean binary cross-entropy of logits; as `token_mean`, in nats."""
    values = wide(logits)
    losses = F.binary_cross_entropy_with_logits(values, targets.to(values.dtype), reduction="none")
    return token_mean(losses, valid, count)


def token_mean(values: Tensor, valid: Tensor, count: Tensor) -> Tensor:
    """This rank's share of the mean of any value a token: over valid tokens of all ranks, and over features.

    Args:
        values: [B, S] or [B, S, F], each row of one token alone.
        valid: bool [B, S], false on padding and on empty slots.
        count: The global number of valid tokens: `count_tokens(model, valid)`.
    """
    if valid.dtype != torch.bool:
        raise LayoutError(f"a mask of {valid.dtype}", allowed="a boolean mask of what counts", remedy="valid.bool()")
    by_token = wide(values).flatten(2).mean(-1) if values.dim() > 2 else wide(values)
    return _divided(by_token.masked_fill(~valid, 0.0).sum(), count)


def _divided(total: Tensor, count: Tensor) -> Tensor:
    return total / count.clamp(min=1).to(total.dtype)
