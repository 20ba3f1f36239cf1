"""AdamW, its schedule, and the precision of a run."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from lss.config import TrainConfig
from lss.fully_sharded import is_cut

# The cosine ends at this share of the peak.
FINAL_SHARE = 0.1


def make_optimizer(model: nn.Module, config: TrainConfig, *, foreach: bool) -> tuple[AdamW, LambdaLR]:
    """AdamW with decay on matrices only; linear warm-up, then a cosine.

    Args:
        model: Whose parameters it changes.
        config: Of the training.
        foreach: Whether all parameters are changed at once, as torch does on CUDA: faster, with copies of them.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for weight in model.parameters():
        if weight.requires_grad:
            groups.setdefault((weight.dim() > 1, is_cut(weight)), []).append(weight)  # torch takes no mixed lists
    decayed = [
        {"params": weights, "weight_decay": config.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), weights in groups.items()
    ]
    optimizer = AdamW(decayed, lr=config.learning_rate, betas=(0.9, 0.95), foreach=foreach)
    return optimizer, LambdaLR(optimizer, lambda step: learning_rate_share(step, config.warmup_steps, config.steps))


def learning_rate_share(step: int, warmup_steps: int, steps: int) -> float:
    """Share of the peak at a step, counted from 0."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return FINAL_SHARE + (1 - FINAL_SHARE) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Autocast to bfloat16 for `bf16`; nothing for the others."""
    if precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()
