"""Torch's attention operators of CUDA, written out for CPU tensors: their order of arguments is torch's own schema, and
what their kernels take for granted of memory is asserted.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

ALIGNED = 32  # rows of the log-sum-exp of the efficient kernel, and what stands behind the last


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores = query @ key.repeat_interleave(query.size(1) // key.size(1), 1).mT * scale
    if is_causal:
        assert query.size(2) == key.size(2)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores if bias is None else scores + bias


def _forward(query, key, value, bias, is_causal, scale):
    scores = _scores(query, key, bias, is_causal, scale)
    output = scores.softmax(-1) @ value.repeat_interleave(query.size(1) // value.size(1), 1)
    assert not output.isnan().any()
    return output, scores.logsumexp(-1).float()


def _backward(gradient, query, key, value, bias, output, log_sum_exp, is_causal, scale):
    groups = query.size(1) // key.size(1)
    assert log_sum_exp.shape == query.shape[:3]
    assert log_sum_exp.isfinite().all()
    weights = (_scores(query, key, bias, is_causal, scale) - log_sum_exp.unsqueeze(-1)).exp()
    row = (gradient * output).sum(-1, keepdim=True)
    of_scores = weights * (gradient @ value.repeat_interleave(groups, 1).mT - row) * scale
    of_key, of_value = of_scores.mT @ query, weights.mT @ gradient
    shared = (part.unflatten(1, (key.size(1), groups)).sum(2) for part in (of_key, of_value))
    return of_scores @ key.repeat_interleave(groups, 1), *shared


def _flash(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    output, log_sum_exp = _forward(query, key, value, None, is_causal, scale)
    none = torch.empty(0)
    return output, log_sum_exp, none, none, query.size(2), key.size(2), none, none, none


def _flash_backward(
    gradient, query, key, value, out, log_sum_exp, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, *state, scale=None
):
    assert (max_q, max_k, dropout_p) == (query.size(2), key.size(2), 0.0)
    assert cum_q is None
    assert cum_k is None
    assert log_sum_exp.is_contiguous()
    assert log_sum_exp.dtype == torch.float32
    assert [part.dtype for part in state] == [torch.uint64] * 2
    return _backward(gradient, query, key, value, None, out, log_sum_exp, is_causal, scale)


def _cudnn(query, key, value, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, debug=False, *, scale=None):
    assert compute_log_sumexp
    output, log_sum_exp = _forward(query, key, value, bias, is_causal, scale)
    none = torch.empty(0)
    return output, log_sum_exp.unsqueeze(-1), none, none, query.size(2), key.size(2), none, none, none


def _cudnn_backward(
    gradient, query, key, value, out, log_sum_exp, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout_p, is_causal,
    *, scale=None,
):  # fmt: skip
    assert (max_q, max_k, dropout_p) == (query.size(2), key.size(2), 0.0)
    assert cum_q is None
    assert cum_k is None
    assert gradient.is_contiguous()
    assert out.is_contiguous()
    assert log_sum_exp.dim() == 4
    return _backward(gradient, query, key, value, bias, out, log_sum_exp.squeeze(-1), is_causal, scale)


def _check_bias(bias: Tensor | None, query: Tensor, key: Tensor) -> None:
    if bias is not None:
        assert bias.shape == (*query.shape[:3], key.size(2))
        assert bias.dtype == query.dtype
        assert bias.stride(-1) == 1
        assert bias.stride(-2) % 8 == 0


def _efficient(query, key, value, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    assert compute_log_sumexp
    assert query.size(1) == key.size(1) == value.size(1)
    _check_bias(bias, query, key)
    output, log_sum_exp = _forward(query, key, value, bias, is_causal, scale)
    padded = torch.full((*query.shape[:2], ALIGNED * math.ceil(query.size(2) / ALIGNED)), torch.inf)
    padded[..., : query.size(2)] = log_sum_exp
    return output.transpose(1, 2).contiguous().transpose(1, 2), padded, torch.empty(0), torch.empty(0)


def _efficient_backward(
    gradient, query, key, value, bias, out, log_sum_exp, seed, offset, dropout_p, asked, is_causal=False, *, scale=None
):
    _check_bias(bias, query, key)
    assert out.transpose(1, 2).is_contiguous()
    assert list(asked) == [True, True, True, False]
    assert dropout_p == 0.0
    assert log_sum_exp.is_contiguous()
    assert log_sum_exp.size(2) % ALIGNED == 0
    behind = log_sum_exp[..., query.size(2) :]
    assert (behind == torch.inf).all()
    rows = log_sum_exp[..., : query.size(2)]
    return *_backward(gradient, query, key, value, bias, out, rows, is_causal, scale), None


@contextmanager
def cuda_operators_on_cpu() -> Iterator[None]:
    """Have torch's operators of CUDA run on CPU tensors."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in {
        "_scaled_dot_product_flash_attention": _flash,
        "_scaled_dot_product_flash_attention_backward": _flash_backward,
        "_scaled_dot_product_cudnn_attention": _cudnn,
        "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
        "_scaled_dot_product_efficient_attention": _efficient,
        "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    }.items():
        library.impl(name, function, "CPU")
    try:
        yield
    finally:
        library._destroy()
