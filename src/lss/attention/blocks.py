"""Attention of a segment's queries over the keys of all, block by block, merged by log-sum-exp (paper, Equation 2)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lss.attention.kernels import Kernel, Operands
from lss.attention.plan import Block, Tile
from lss.dropout import Site, keep_weights


@dataclass(frozen=True)
class Work:
    """What a rank has to compute in one attention layer.

    Args:
        tiles: Who sees what, from `plan`.
        kernel: What computes a block.
        scale: Factor of the scores; None for 1 / sqrt(D).
        first_slot: Slot in the whole sequence of the first query.
        dropout: Place of the dropout of attention weights; None for none.
    """

    tiles: tuple[Tile, ...]
    kernel: Kernel
    scale: float | None = None
    first_slot: int = 0
    dropout: Site | None = None


def attend(query: Tensor, key: Tensor, value: Tensor, work: Work) -> Tensor:
    """What `scaled_dot_product_attention` of the whole sequence gives at this segment's queries.

    Args:
        query: [B, H, S, D], the queries of one segment.
        key: [B, K, T, D], the keys of all slots in order; H is a multiple of K.
        value: [B, K, T, D].
        work: Who sees what, and how it is computed.

    Returns:
        [B, H, S, D], in the dtype of `query`; zeros for queries that see no key.
    """
    output: Tensor = _Attend.apply(query, key, value, work)  # type: ignore[no-untyped-call]
    return output


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, work: Work) -> Tensor:
        output = torch.zeros_like(query)
        log_sum_exp = query.new_full(query.shape[:3], -math.inf, dtype=_wide_dtype(query))
        for tile in work.tiles:
            parts = (work.kernel.forward(given) for _, given in _operands(query, key, value, work, tile))
            joined = next(parts)
            for part in parts:
                joined = merge(*joined, *part)
            tile.of_queries(output).copy_(joined[0])
            tile.of_queries(log_sum_exp).copy_(joined[1])
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        ctx.work = work
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, output, log_sum_exp = ctx.saved_tensors
        sums = [torch.zeros_like(tensor, dtype=_wide_dtype(tensor)) for tensor in (query, key, value)]
        for tile in ctx.work.tiles:
            rows = [tile.of_queries(tensor) for tensor in (gradients[0], output, log_sum_exp)]
            for block, given in _operands(query, key, value, ctx.work, tile):
                to_query, to_key, to_value = ctx.work.kernel.backward(given, *rows)
                tile.of_queries(sums[0]).add_(to_query)
                tile.of_keys(sums[1], block).add_(to_key)
                tile.of_keys(sums[2], block).add_(to_value)
        grad_query, grad_key, grad_value = (total.to(query.dtype) for total in sums)
        return grad_query, grad_key, grad_value, None


def merge(output: Tensor, log_sum_exp: Tensor, other: Tensor, other_log_sum_exp: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of keys; all in float32 or wider."""
    total = torch.logaddexp(log_sum_exp, other_log_sum_exp)
    weight, other_weight = (log_sum_exp - total).exp(), (other_log_sum_exp - total).exp()
    return output * weight.unsqueeze(-1) + other * other_weight.unsqueeze(-1), total


def _operands(query: Tensor, key: Tensor, value: Tensor, work: Work, tile: Tile) -> Iterator[tuple[Block, Operands]]:
    queries = tile.of_queries(query)
    scale = 1 / math.sqrt(query.size(-1)) if work.scale is None else work.scale
    keep: Tensor | None = None
    if work.dropout:
        rows = range(query.size(0))[tile.rows]
        start = work.first_slot + tile.start
        keep = keep_weights(work.dropout, rows, start, queries.size(2), query.size(1), query.device)
    for block in tile.blocks:
        kept = None if keep is None else keep[..., block.start : block.stop]
        kept_scale = work.dropout.scale if work.dropout else 1.0
        keys, values = tile.of_keys(key, block), tile.of_keys(value, block)
        yield block, Operands(queries, keys, values, block.is_causal, scale, kept, kept_scale)


def _wide_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
