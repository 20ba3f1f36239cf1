"""Attention of one segment's queries over all keys, block by block, merged by log-sum-exp (paper, Equation 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lss.attention.kernels import Kernel, kernel_for


@dataclass(frozen=True)
class Block:
    """Keys [start, stop) that the queries see: all of them, or causally from the first query on."""

    start: int
    stop: int
    is_causal: bool


def plan(start: int, num_queries: int, num_keys: int, is_causal: bool) -> list[Block]:
    """Blocks for queries at positions start, start + 1, ... over keys at 0, 1, ...; what nobody sees costs nothing."""
    if not is_causal:
        return [Block(0, num_keys, False)]
    own = Block(start, start + num_queries, True)
    return [Block(0, start, False), own] if start else [own]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    start: int,
    num_keys: int,
    is_causal: bool,
    scale: float | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """What `scaled_dot_product_attention` of the whole sequence gives at this segment's queries.

    Args:
        query: [B, H, S, D], the queries of one segment.
        key: [B, K, T, D], the keys of all segments in order; H is a multiple of K.
        value: [B, K, T, D].
        start: Position of the first query.
        num_keys: Real keys, at most T; later ones are padding that only padded queries may see.
        is_causal: Whether a query sees no key after its own position; needs T >= start + S.
        scale: Factor of the scores; 1 / sqrt(D) by default.
        kernel: The kernel; by device where not given.

    Returns:
        [B, H, S, D], in the dtype of `query`.
    """
    blocks = plan(start, query.size(2), num_keys, is_causal)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    output: Tensor = _Blocks.apply(query, key, value, blocks, scale, kernel or kernel_for(query))  # type: ignore[no-untyped-call]
    return output


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: list[Block], scale: float, kernel: Kernel
    ) -> Tensor:
        parts = [
            kernel.forward(query, _keys(key, block), _keys(value, block), block.is_causal, scale) for block in blocks
        ]
        output, log_sum_exp = parts[0]
        for part in parts[1:]:
            output, log_sum_exp = merge(output, log_sum_exp, *part)
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        ctx.blocks, ctx.scale, ctx.kernel = blocks, scale, kernel
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, key, value, output, log_sum_exp = ctx.saved_tensors
        # blocks do not overlap: each key's gradient is written once, and keys of no block get none
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        grad_query: Tensor | None = None
        for block in ctx.blocks:
            to_query, to_key, to_value = ctx.kernel.backward(
                gradients[0],
                query,
                _keys(key, block),
                _keys(value, block),
                output,
                log_sum_exp,
                block.is_causal,
                ctx.scale,
            )
            grad_query = to_query if grad_query is None else grad_query + to_query
            _keys(grad_key, block).copy_(to_key)
            _keys(grad_value, block).copy_(to_value)
        assert grad_query is not None
        return grad_query, grad_key, grad_value, None, None, None


def merge(output: Tensor, log_sum_exp: Tensor, other: Tensor, other_log_sum_exp: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of keys, in the dtype of the log-sum-exp (float32 or wider)."""
    total = torch.logaddexp(log_sum_exp, other_log_sum_exp)
    weight, other_weight = (log_sum_exp - total).exp(), (other_log_sum_exp - total).exp()
    joined = output * weight.unsqueeze(-1) + other * other_weight.unsqueeze(-1)
    return joined.to(output.dtype), total


def _keys(tensor: Tensor, block: Block) -> Tensor:
    return tensor[:, :, block.start : block.stop]
