"""Torch's kernels on CUDA, called below `scaled_dot_product_attention` for their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lss.attention.kernels.base import Gradients, Kernel, Needs, Operands, fused_cannot
from lss.attention.plan import Limits

_HALF = (torch.float16, torch.bfloat16)


def _flash_forward(given: Operands) -> tuple[Tensor, Tensor]:
    output, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        given.query, given.key, given.value, 0.0, given.is_causal, scale=given.scale
    )
    return output, log_sum_exp


def _flash_backward(given: Operands, gradient: Tensor, output: Tensor, log_sum_exp: Tensor) -> Gradients:
    grad_query, grad_key, grad_value = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *(gradient, given.query, given.key, given.value, output, _rows(log_sum_exp)),
        *(None, None, given.query.size(2), given.key.size(2)),
        *(0.0, given.is_causal, *_no_random_state(given.query, torch.uint64)),
        scale=given.scale,
    )
    return grad_query, grad_key, grad_value, None


def _flash_cannot(needs: Needs) -> str:
    if needs.masks or needs.biases:
        return "it takes no mask but the causal one, and no bias"
    return _half_cannot(needs, widest=256)


def _cudnn_forward(given: Operands) -> tuple[Tensor, Tensor]:
    output, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(given.query, given.key, given.value, _added(given)), True, 0.0, given.is_causal, scale=given.scale
    )
    return output, _without_keys(given, log_sum_exp.reshape(output.shape[:3]))  # [B, H, S, 1] in some versions


def _cudnn_backward(given: Operands, gradient: Tensor, output: Tensor, log_sum_exp: Tensor) -> Gradients:
    grad_query, grad_key, grad_value = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(gradient.contiguous(), given.query, given.key, given.value, output.contiguous()),
        *(_rows(log_sum_exp).unsqueeze(-1), *_no_random_state(given.query, torch.int64), _added(given)),
        *(None, None, given.query.size(2), given.key.size(2), 0.0, given.is_causal),
        scale=given.scale,
    )
    return grad_query, grad_key, grad_value, None


def _cudnn_cannot(needs: Needs) -> str:
    return _half_cannot(needs, widest=128)


def _efficient_forward(given: Operands) -> tuple[Tensor, Tensor]:
    output, log_sum_exp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        *(given.query, *_for_each_query_head(given), _added(given)), True, 0.0, given.is_causal, scale=given.scale
    )
    return output, _without_keys(given, log_sum_exp.narrow(-1, 0, given.query.size(2)))


def _efficient_backward(given: Operands, gradient: Tensor, output: Tensor, log_sum_exp: Tensor) -> Gradients:
    rows = F.pad(_rows(log_sum_exp), (0, -log_sum_exp.size(-1) % 32), value=torch.inf)  # as its forward pads them
    output = output.transpose(1, 2).contiguous().transpose(1, 2)  # it takes these strides for granted
    grad_query, grad_key, grad_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        *(gradient, given.query, *_for_each_query_head(given), _added(given), output, rows),
        *(*_no_random_state(given.query, torch.int64), 0.0, [True, True, True, False], given.is_causal),
        scale=given.scale,
    )
    groups = given.key.size(1)
    grad_key, grad_value = (part.unflatten(1, (groups, -1)).sum(2) for part in (grad_key, grad_value))
    return grad_query, grad_key, grad_value, None


def _efficient_cannot(needs: Needs) -> str:
    if needs.dtype not in (*_HALF, torch.float32):
        return f"it takes float32, float16 and bfloat16, not {needs.dtype}"
    return _widths_cannot(needs, multiple=4 if needs.dtype == torch.float32 else 8)


def _half_cannot(needs: Needs, widest: int) -> str:
    if needs.dtype not in _HALF:
        return f"it takes float16 and bfloat16, not {needs.dtype}"
    if needs.head_width > widest:
        return f"it takes heads up to {widest} wide, and these are {needs.head_width}"
    return _widths_cannot(needs, multiple=8)


def _widths_cannot(needs: Needs, multiple: int) -> str:
    if needs.head_width != needs.value_width:
        return "it needs keys and values of one width"
    if needs.head_width % multiple:
        return f"it takes heads whose width is a multiple of {multiple}, and these are {needs.head_width} wide"
    return fused_cannot(needs)


def _added(given: Operands) -> Tensor | None:
    """Mask and bias [B, H, S, T] in the dtype of the query, each row aligned in memory."""
    if given.added is None:
        return None
    padded = F.pad(given.added.clamp(min=_lowest(given)).to(given.query.dtype), (0, -given.added.size(-1) % 16))
    return padded.narrow(-1, 0, given.added.size(-1)).expand(*given.query.shape[:2], -1, -1)


def _lowest(given: Operands) -> float:
    """What stands for minus infinity, so that rows of nothing else give no NaN."""
    return torch.finfo(given.query.dtype).min / 2


def _without_keys(given: Operands, log_sum_exp: Tensor) -> Tensor:
    """The log-sum-exp with -inf for queries that see no key."""
    return log_sum_exp.masked_fill(log_sum_exp < _lowest(given) / 2, -torch.inf)


def _rows(log_sum_exp: Tensor) -> Tensor:
    """The log-sum-exp as kernels take it: float32, contiguous; of no account where a query sees no key."""
    return log_sum_exp.float().nan_to_num(neginf=0.0).contiguous()


def _for_each_query_head(given: Operands) -> tuple[Tensor, Tensor]:
    """Keys and values [B, H, T, D]: copies of the block's, where query heads share them."""
    key, value = (
        part.unsqueeze(2).expand(-1, -1, given.query.size(1) // part.size(1), -1, -1).flatten(1, 2)
        for part in (given.key, given.value)
    )
    return key, value


def _no_random_state(query: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Seed and offset, which are not looked at without dropout."""
    return torch.empty(2, dtype=dtype, device=query.device), torch.empty((), dtype=dtype, device=query.device)


# they skip what a causal mask hides by themselves, so that causal blocks stay whole
_WHOLE = Limits(edge=None)
FLASH = Kernel("flash", "cuda", _flash_forward, _flash_backward, _flash_cannot, _WHOLE)
EFFICIENT = Kernel("efficient", "cuda", _efficient_forward, _efficient_backward, _efficient_cannot, _WHOLE)
CUDNN = Kernel("cudnn", "cuda", _cudnn_forward, _cudnn_backward, _cudnn_cannot, _WHOLE)
