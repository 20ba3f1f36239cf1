"""Scores are stored, as in the paper: for everything that no faster kernel does, in any dtype, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from lss.attention.kernels.base import Gradients, Kernel, Operands
from lss.attention.plan import Limits
from lss.dtypes import wide


def _forward(given: Operands) -> tuple[Tensor, Tensor]:
    scores = _scores(given)
    log_sum_exp = scores.logsumexp(-1)
    weights = _dropped(given, _weights(scores, log_sum_exp))
    output = torch.einsum("bkgst,bktd->bkgsd", weights, wide(given.value))
    return output.flatten(1, 2), log_sum_exp.flatten(1, 2)


def _backward(given: Operands, gradient: Tensor, output: Tensor, log_sum_exp: Tensor) -> Gradients:
    query, gradient, output, log_sum_exp = (
        wide(_grouped(given, part)) for part in (given.query, gradient, output, log_sum_exp)
    )
    weights = _weights(_scores(given), log_sum_exp)
    grad_value = torch.einsum("bkgst,bkgsd->bktd", _dropped(given, weights), gradient)
    grad_weights = _dropped(given, torch.einsum("bkgsd,bktd->bkgst", gradient, wide(given.value)))
    row = (gradient * output).sum(-1, keepdim=True)  # of all keys, with dropout too
    grad_scores = weights * (grad_weights - row)
    grad_query = torch.einsum("bkgst,bktd->bkgsd", grad_scores, wide(given.key)).flatten(1, 2) * given.scale
    grad_key = torch.einsum("bkgst,bkgsd->bktd", grad_scores, query) * given.scale
    return grad_query, grad_key, grad_value, _of_bias(given, grad_scores)


def _scores(given: Operands) -> Tensor:
    """Scaled, biased and masked scores: [B, K, H / K, S, T]."""
    query, key = wide(_grouped(given, given.query)), wide(given.key)
    scores = torch.einsum("bkgsd,bktd->bkgst", query, key) * given.scale
    if given.added is not None:
        heads = given.added.expand(-1, given.query.size(1), -1, -1)
        scores = scores + _grouped(given, heads)
    if given.is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores


def _weights(scores: Tensor, log_sum_exp: Tensor) -> Tensor:
    """Softmax; zeros in rows without a visible key, whose log-sum-exp is -inf."""
    return (scores - log_sum_exp.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()


def _dropped(given: Operands, weights: Tensor) -> Tensor:
    """Weights, or their gradients, after dropout: [B, K, H / K, S, T]."""
    return weights if given.keep is None else weights * _grouped(given, given.keep) * given.keep_scale


def _of_bias(given: Operands, grad_scores: Tensor) -> Tensor | None:
    if given.bias is None:
        return None
    by_head = grad_scores.flatten(1, 2).sum(0)  # [B, K, H / K, S, T] -> [H, S, T]
    return by_head if given.bias.size(0) > 1 else by_head.sum(0, keepdim=True)


def _grouped(given: Operands, tensor: Tensor) -> Tensor:
    """[B, H, ...] to [B, K, H / K, ...]."""
    split: Tensor = tensor.unflatten(1, (given.key.size(1), -1))
    return split


MATH = Kernel("math", "", _forward, _backward, lambda needs: "", Limits(queries=256, keys=4096, edge=256))
