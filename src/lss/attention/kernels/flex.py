"""Torch's FlexAttention: any mask and any bias, compiled for the GPU at the first call, keys of groups not expanded."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from lss.attention.kernels.base import Gradients, Kernel, Needs, Operands, fused_cannot
from lss.attention.plan import Limits
from lss.dtypes import wide


def _forward(given: Operands) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return _attend(given, given.query, given.key, given.value)


def _backward(given: Operands, gradient: Tensor, output: Tensor, log_sum_exp: Tensor) -> Gradients:
    """Of the block's own output and log-sum-exp, which have their share in those of all keys.

    With w = exp(log_sum_exp of the block - that of all), output = sum of w * (the block's): so the block's output has
    the gradient w * gradient, and its log-sum-exp w * <gradient, the block's output - output>.
    """
    leaves = [part.detach().requires_grad_() for part in (given.query, given.key, given.value)]
    with torch.enable_grad():
        own, own_log_sum_exp = _attend(given, *leaves)
    share = (own_log_sum_exp.detach() - log_sum_exp).exp().nan_to_num(0.0)  # no key at all: -inf - -inf
    to_output = share.unsqueeze(-1) * wide(gradient)
    to_log_sum_exp = (to_output * (wide(own.detach()) - wide(output))).sum(-1)
    gradients = (to_output.to(own.dtype), to_log_sum_exp.to(own_log_sum_exp.dtype))
    grad_query, grad_key, grad_value = torch.autograd.grad((own, own_log_sum_exp), leaves, gradients)
    return grad_query, grad_key, grad_value, None


def _attend(given: Operands, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp (natural)."""
    output, found = _compiled()(
        query,
        key,
        value,
        score_mod=_score_mod(given),
        scale=given.scale,
        enable_gqa=query.size(1) != key.size(1),
        return_aux=AuxRequest(lse=True),
    )
    return output, found.lse


def _score_mod(given: Operands) -> Callable[..., Tensor] | None:
    """What FlexAttention does to a score of head h at query i and key j."""
    added = given.added
    if added is not None:
        by_head = added.size(1) > 1
        return lambda score, b, h, i, j: score + added[0, h if by_head else 0, i, j]
    if given.is_causal:
        return lambda score, b, h, i, j: torch.where(i >= j, score, -torch.inf)
    return None


@cache
def _compiled() -> Callable[..., Any]:
    """FlexAttention stores all scores where it is not compiled."""
    return torch.compile(flex_attention)


def _cannot(needs: Needs) -> str:
    if needs.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"it takes float32, float16 and bfloat16, not {needs.dtype}"
    if min(needs.head_width, needs.value_width) < 16:
        return f"it takes heads at least 16 wide, and these are {needs.head_width}"
    return fused_cannot(needs)


FLEX = Kernel("flex", "cuda", _forward, _backward, _cannot, Limits())
