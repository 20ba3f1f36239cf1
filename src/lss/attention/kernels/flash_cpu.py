"""Torch's flash attention on the CPU, called below `scaled_dot_product_attention` for its log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor

from lss.attention.kernels.base import Gradients, Kernel, Needs, Operands, fused_cannot, without_keys
from lss.attention.plan import Limits
from lss.dtypes import wide


def _forward(given: Operands) -> tuple[Tensor, Tensor]:
    output, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        wide(given.query),
        wide(given.key),
        wide(given.value),
        0.0,
        given.is_causal,
        attn_mask=given.added,
        scale=given.scale,
    )
    return output, without_keys(given, log_sum_exp)


def _backward(given: Operands, gradient: Tensor, output: Tensor, log_sum_exp: Tensor) -> Gradients:
    tensors = (gradient, given.query, given.key, given.value, output)
    grad_query, grad_key, grad_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(wide(tensor) for tensor in tensors),
        log_sum_exp.nan_to_num(neginf=0.0),
        0.0,
        given.is_causal,
        attn_mask=given.added,
        scale=given.scale,
    )
    return grad_query, grad_key, grad_value, None


def _cannot(needs: Needs) -> str:
    one_width = needs.head_width == needs.value_width
    return fused_cannot(needs) or ("" if one_width else "it needs keys and values of one width")


# small blocks on the diagonal and large full ones are faster than its own causal form
FLASH_CPU = Kernel("flash", "cpu", _forward, _backward, _cannot, Limits(edge=512))
