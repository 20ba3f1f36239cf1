"""Losses over segments: local sum divided by the global count (paper, Principle 4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lss.batch import IGNORE_INDEX
from lss.context import context_of


def count_tokens(model: nn.Module, *labels: Tensor) -> Tensor:
    """Number of labels that are not ignored, over all given segments and all ranks: a scalar. A collective call.

    Give the labels of all micro-batches of a step at once: the mean is over all of them.
    """
    device = labels[0].device
    local = torch.stack([(part != IGNORE_INDEX).sum() for part in labels]).sum().to(device, torch.float64)
    return context_of(model).sum_over_ranks(local)


def token_mean_cross_entropy(logits: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    """This rank's part of the mean cross-entropy over all tokens of the global batch, in nats.

    The sum over ranks (and micro-batches) of what it returns is the mean; so is the sum of its gradients, which
    `average_gradients` takes. A rank without one valid token returns 0 and sends zero gradients.

    Args:
        logits: [B, S, vocabulary].
        labels: int64 [B, S], already shifted; -100 is ignored.
        count: The global number of valid labels, from `count_tokens`.

    Returns:
        A scalar in float32, or in float64 for float64 logits.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    total = F.cross_entropy(wide.flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return total / count.clamp(min=1).to(total.dtype)
