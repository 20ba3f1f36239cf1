"""What a kernel is given, and what it must be able to do.

A backward given the output and log-sum-exp of *all* keys returns the exact gradients of the keys that it was shown,
so that the parts of a row of scores can be computed one after the other and simply added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lss.attention.plan import Limits
from lss.dtypes import wide_dtype


@dataclass(frozen=True)
class Operands:
    """One block: queries, the keys that they see, and how.

    Args:
        query: [B, H, S, D].
        key: [B, K, T, D]; H is a multiple of K, and keys are not expanded.
        value: [B, K, T, D].
        scale: Factor of the scores.
        is_causal: Whether query i sees keys 0 to i only; S = T.
        mask: Pairs that count, bool [S, T] or [H, S, T]; None for all.
        bias: Added to the scores, [H or 1, S, T]; None for nothing.
        keep: Attention weights that are kept, bool [B, H, S, T]; None keeps all.
        keep_scale: Factor of the kept weights.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    is_causal: bool = False
    mask: Tensor | None = None
    bias: Tensor | None = None
    keep: Tensor | None = None
    keep_scale: float = 1.0

    @cached_property
    def added(self) -> Tensor | None:
        """Mask and bias as one tensor to add to the scores: [1, H or 1, S, T], in the dtype of `wide(query)`."""
        if self.mask is None and self.bias is None:
            return None
        sums = wide_dtype(self.query)
        shape = (1, 1, self.query.size(2), self.key.size(2))
        added = torch.zeros(shape, dtype=sums, device=self.query.device) if self.bias is None else self.bias.to(sums)
        added = added if added.dim() == 4 else added.unsqueeze(0)
        return added if self.mask is None else added.masked_fill(self.mask.logical_not(), -torch.inf)


# Gradients of query, key, value, and of the bias if it was asked for: [H or 1, S, T].
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


@dataclass(frozen=True)
class Needs:
    """What is asked of a kernel.

    Args:
        device_type: Where the ranks compute.
        dtype: Of the query.
        masks: Whether some block needs a mask.
        biases: Whether scores are biased.
        learns_bias: Whether the bias needs a gradient.
        drops_weights: Whether attention weights are dropped.
        head_width: D of queries and keys.
        value_width: D of values.
    """

    device_type: str
    dtype: torch.dtype
    masks: bool = False
    biases: bool = False
    learns_bias: bool = False
    drops_weights: bool = False
    head_width: int = 64
    value_width: int = 64


@dataclass(frozen=True)
class Kernel:
    """A forward and its backward.

    Args:
        name: As in `attention.kernel`.
        device: Where it runs; empty for anywhere.
        forward: Operands to output [B, H, S, D] and log-sum-exp [B, H, S], -inf where a query sees no key, both in
            float32 or wider where the kernel can.
        backward: Operands, gradient of the output, output, log-sum-exp to gradients.
        cannot: Why it cannot do what is needed on its device; empty if it can.
        limits: Sizes of the blocks that it takes.
    """

    name: str
    device: str
    forward: Callable[[Operands], tuple[Tensor, Tensor]]
    backward: Callable[[Operands, Tensor, Tensor, Tensor], Gradients]
    cannot: Callable[[Needs], str]
    limits: Limits

    def refuses(self, needs: Needs) -> str:
        """Why it cannot do what is needed; empty if it can."""
        if self.device not in ("", needs.device_type):
            return f"it runs on {self.device}, and tensors are on {needs.device_type}"
        return self.cannot(needs)


def without_keys(given: Operands, log_sum_exp: Tensor) -> Tensor:
    """The log-sum-exp with -inf for queries that mask and bias let see no key, where kernels say something else."""
    if given.added is None:
        return log_sum_exp
    return log_sum_exp.masked_fill((given.added == -torch.inf).all(-1), -torch.inf)


def fused_cannot(needs: Needs) -> str:
    """What no kernel can that does not store the scores."""
    if needs.drops_weights:
        return "it cannot drop attention weights"
    return "it gives a bias no gradient" if needs.learns_bias else ""


def dense(tensor: Tensor) -> Tensor:
    """With the features of a token next to each other in memory, which kernels take for granted."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
