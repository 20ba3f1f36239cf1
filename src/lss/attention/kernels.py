"""Kernels of attention: each gives the output and the log-sum-exp of its rows, and a backward that takes both.

A backward given the output and log-sum-exp of *all* keys returns the exact gradients of the keys that it was shown,
so that the parts of a row of scores can be computed one after the other and simply added. Kernels compute and answer in
float32 or wider whatever they are given, so that such sums lose nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lss.context import wide


@dataclass(frozen=True)
class Operands:
    """One block: queries, the keys that they see, and how.

    Args:
        query: [B, H, S, D].
        key: [B, K, T, D]; H is a multiple of K, and keys are not expanded.
        value: [B, K, T, D].
        is_causal: Whether query i sees keys 0 to i only; needs S = T.
        scale: Factor of the scores.
        keep: Attention weights that are kept, bool [B, H, S, T]; None keeps all.
        keep_scale: Factor of the kept weights.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool
    scale: float
    keep: Tensor | None = None
    keep_scale: float = 1.0


@dataclass(frozen=True)
class Kernel:
    """A forward and its backward.

    Args:
        name: As in `attention.kernel`.
        forward: Operands to output [B, H, S, D] and log-sum-exp [B, H, S].
        backward: Operands, gradient of the output, output, log-sum-exp to gradients of query, key and value.
        drops_weights: Whether it takes `keep`.
        max_queries: Queries that it is given at a time; None for any number.
    """

    name: str
    forward: Callable[[Operands], tuple[Tensor, Tensor]]
    backward: Callable[[Operands, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    drops_weights: bool
    max_queries: int | None


def kernel_for(device: torch.device, drops_weights: bool) -> Kernel:
    """Flash attention on the CPU; stored scores, the paper's form, elsewhere and under dropout of weights."""
    return FLASH_CPU if device.type == "cpu" and not drops_weights else MATH


def why(kernel: Kernel, device: torch.device, drops_weights: bool) -> str:
    """A kernel's name and, where it is not the device's fastest, the reason, for people."""
    if drops_weights and device.type == "cpu":
        return f"{kernel.name} ({FLASH_CPU.name} cannot drop attention weights)"
    return kernel.name


def _flash_cpu_forward(given: Operands) -> tuple[Tensor, Tensor]:
    output, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        wide(given.query), wide(given.key), wide(given.value), 0.0, given.is_causal, scale=given.scale
    )
    return output, log_sum_exp


def _flash_cpu_backward(
    given: Operands, gradient: Tensor, output: Tensor, log_sum_exp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = (gradient, given.query, given.key, given.value, output)
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(wide(tensor) for tensor in tensors), log_sum_exp, 0.0, given.is_causal, scale=given.scale
    )
    return gradients


def _math_forward(given: Operands) -> tuple[Tensor, Tensor]:
    scores = _scores(given)
    log_sum_exp = scores.logsumexp(-1)
    weights = _dropped(given, (scores - log_sum_exp.unsqueeze(-1)).exp())
    output = torch.einsum("bkgst,bktd->bkgsd", weights, wide(given.value))
    return output.flatten(1, 2), log_sum_exp.flatten(1, 2)


def _math_backward(
    given: Operands, gradient: Tensor, output: Tensor, log_sum_exp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grouped_query, grouped_gradient, grouped_output, grouped_lse = (
        _grouped(given, part) for part in (given.query, gradient, output, log_sum_exp)
    )
    weights = (_scores(given) - grouped_lse.unsqueeze(-1)).exp()
    grad_value = torch.einsum("bkgst,bkgsd->bktd", _dropped(given, weights), grouped_gradient)
    grad_weights = _dropped(given, torch.einsum("bkgsd,bktd->bkgst", grouped_gradient, wide(given.value)))
    row = (grouped_gradient * grouped_output).sum(-1, keepdim=True)  # of all keys, with dropout too
    grad_scores = weights * (grad_weights - row) * given.scale
    grad_query = torch.einsum("bkgst,bktd->bkgsd", grad_scores, wide(given.key)).flatten(1, 2)
    grad_key = torch.einsum("bkgst,bkgsd->bktd", grad_scores, grouped_query)
    return grad_query, grad_key, grad_value


def _scores(given: Operands) -> Tensor:
    """Scaled scores: [B, K, H / K, S, T]."""
    scores = torch.einsum("bkgsd,bktd->bkgst", _grouped(given, given.query), wide(given.key)) * given.scale
    if given.is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores


def _dropped(given: Operands, weights: Tensor) -> Tensor:
    """Weights, or their gradients, after dropout: [B, K, H / K, S, T]."""
    return weights if given.keep is None else weights * _grouped(given, given.keep) * given.keep_scale


def _grouped(given: Operands, tensor: Tensor) -> Tensor:
    """[B, H, ...] to [B, K, H / K, ...], masks as they are and numbers in float32 or wider."""
    split = tensor.unflatten(1, (given.key.size(1), -1))
    return split if tensor.dtype == torch.bool else wide(split)


FLASH_CPU = Kernel("flash_cpu", _flash_cpu_forward, _flash_cpu_backward, drops_weights=False, max_queries=None)
MATH = Kernel("math", _math_forward, _math_backward, drops_weights=True, max_queries=256)
