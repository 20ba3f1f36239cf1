"""Kernels of attention: each gives the output and the log-sum-exp of its rows, and a backward that takes both.

A backward given the output and log-sum-exp of *all* keys returns the exact gradients of the keys that it was shown,
so that the parts of a row of scores can be computed one after the other and simply added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# (query [B, H, S, D], key [B, K, T, D], value [B, K, T, D], is_causal, scale)
#   -> (output [B, H, S, D], log_sum_exp [B, H, S] in float32 or wider)
Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
# (gradient of output, query, key, value, output, log_sum_exp, is_causal, scale) -> gradients of query, key, value
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Kernel:
    """A forward and its backward. H is a multiple of K, and keys are not expanded; `is_causal` needs S = T."""

    name: str
    forward: Forward
    backward: Backward


def kernel_for(query: Tensor) -> Kernel:
    """Flash attention on the CPU; the stored-scores form of the paper elsewhere."""
    return FLASH_CPU if query.device.type == "cpu" else MATH


def _flash_cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    output, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, scale=scale
    )
    return output, log_sum_exp


def _flash_cpu_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, log_sum_exp, 0.0, is_causal, scale=scale
    )
    return gradients


def _math_forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, is_causal, scale)
    log_sum_exp = scores.logsumexp(-1)
    weights = (scores - log_sum_exp.unsqueeze(-1)).exp()
    output = torch.einsum("bkgst,bktd->bkgsd", weights, _wide(value))
    return output.flatten(1, 2).to(query.dtype), log_sum_exp.flatten(1, 2)


def _math_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    num_kv_heads = key.size(1)
    grouped_query, grouped_gradient, grouped_output, grouped_lse = (
        _wide(part).unflatten(1, (num_kv_heads, -1)) for part in (query, gradient, output, log_sum_exp)
    )
    weights = (_scores(query, key, is_causal, scale) - grouped_lse.unsqueeze(-1)).exp()
    grad_value = torch.einsum("bkgst,bkgsd->bktd", weights, grouped_gradient)
    grad_weights = torch.einsum("bkgsd,bktd->bkgst", grouped_gradient, _wide(value))
    row = (grouped_gradient * grouped_output).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - row) * scale
    grad_query = torch.einsum("bkgst,bktd->bkgsd", grad_scores, _wide(key)).flatten(1, 2)
    grad_key = torch.einsum("bkgst,bkgsd->bktd", grad_scores, grouped_query)
    return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


def _scores(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Tensor:
    """Scaled scores in float32 or wider: [B, K, H / K, S, T]."""
    grouped = _wide(query).unflatten(1, (key.size(1), -1))
    scores = torch.einsum("bkgsd,bktd->bkgst", grouped, _wide(key)) * scale
    if is_causal:
        future = torch.ones(query.size(2), key.size(2), dtype=torch.bool, device=query.device).triu_(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


FLASH_CPU = Kernel("flash_cpu", _flash_cpu_forward, _flash_cpu_backward)
MATH = Kernel("math", _math_forward, _math_backward)
