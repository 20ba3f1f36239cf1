"""One optimizer step on this rank: what `lss train` does, and what `lss plan` plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lss.config import TrainConfig
from lss.gradients import average_gradients, clip_gradient_norm, gradient_norm
from lss.losses import count_tokens, token_mean_cross_entropy
from lss.outputs import Outputs, takes_labels
from lss.train.optim import autocast


@dataclass(frozen=True)
class Update:
    """What came of a step.

    Args:
        loss: This rank's share of the mean loss; float64 scalar.
        count: Labels of all ranks.
        norm: Of the gradient, before it was clipped.
    """

    loss: Tensor
    count: Tensor
    norm: Tensor


def update(
    model: nn.Module, optimizer: Optimizer, micro_batches: Sequence[dict[str, Any]], config: TrainConfig
) -> Update:
    """Forward and backward of micro-batches, averaging, clipping, optimizer. A collective call; no value is read.

    Args:
        model: A parallelized model: of tokens to logits, or one that returns its own loss of labels.
        optimizer: Of its parameters; gradients are freed behind it.
        micro_batches: What `lss.shard` returned, `labels` among it.
        config: Precision and clipping.
    """
    count = count_tokens(model, *(batch["labels"] for batch in micro_batches))
    shares = [_backward(model, batch, count, len(micro_batches), config) for batch in micro_batches]
    average_gradients(model)
    norm = clip_gradient_norm(model, config.clip_norm) if config.clip_norm else gradient_norm(model)
    optimizer.step()
    optimizer.zero_grad()
    return Update(torch.stack(shares).sum().double(), count, norm)


def _backward(
    model: nn.Module, batch: dict[str, Any], count: Tensor, num_micro_batches: int, config: TrainConfig
) -> Tensor:
    inputs, labels = {name: part for name, part in batch.items() if name != "labels"}, batch["labels"]
    has_labels = takes_labels(model)
    with autocast(config.precision, labels.device):
        returned = model(**inputs, **({"labels": labels} if has_labels else {}))
    outputs = Outputs.of(returned, labels.shape[:2], has_labels=has_labels)
    if outputs.loss is None:
        loss = token_mean_cross_entropy(outputs.logits, labels, count)
    else:
        loss = outputs.loss / num_micro_batches
    loss.backward()
    return loss.detach()
