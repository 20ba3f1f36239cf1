"""Attention block by block: partial outputs merged by log-sum-exp (paper, Equation 2), partial gradients added."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lss.attention.kernels import Kernel, Operands, dense
from lss.attention.plan import Block
from lss.bias import Bias, learned_of
from lss.dropout import Site, keep_weights
from lss.dtypes import wide, wide_dtype
from lss.layout import Piece
from lss.masks import Mask, View


@dataclass(frozen=True)
class Work:
    """How blocks are computed.

    Args:
        kernel: What computes full and causal blocks.
        partial: What computes blocks that need a mask: the same kernel, if it can.
        mask: Who sees whom; asked for the pairs of partial blocks.
        scale: Factor of the scores; None for 1 / sqrt(D).
        bias: What is added to the scores; None for nothing.
        dropout: Place of the dropout of attention weights; None for none.
    """

    kernel: Kernel
    partial: Kernel
    mask: Mask
    scale: float | None = None
    bias: Bias | None = None
    dropout: Site | None = None

    @property
    def learned(self) -> tuple[nn.Parameter, ...]:
        """Parameters of the bias that need a gradient."""
        return learned_of(self.bias)

    def kernel_of(self, block: Block) -> Kernel:
        """What computes a block."""
        return self.partial if block.view is View.PARTIAL else self.kernel

    def operands(self, block: Block, query: Tensor, key: Tensor, value: Tensor) -> Operands:
        """What the kernel is given of [B, H, S, D] and [B, K, T, D]."""
        queries = block.of_queries(query)
        positions = (_positions(piece, query.device) for piece in (block.queries, block.keys))
        keep: Tensor | None = None
        if self.dropout:
            rows = range(query.size(0))[block.rows]
            keep = keep_weights(self.dropout, rows, block.queries, block.keys, query.size(1), query.device)
        partial = block.view is View.PARTIAL
        wanted = tuple(positions) if partial or self.bias else ()
        return Operands(
            queries,
            block.of_keys(key),
            block.of_keys(value),
            1 / math.sqrt(query.size(-1)) if self.scale is None else self.scale,
            block.view is View.CAUSAL,
            self.mask.pairs(block.rows.start or 0, *wanted) if partial else None,
            self.bias(*wanted).detach() if self.bias else None,
            keep,
            self.dropout.scale if self.dropout else 1.0,
        )


class Output:
    """The output of a segment's queries, as blocks of keys come in.

    Args:
        query: [B, H, S, D].
        value_width: D of the output.
    """

    def __init__(self, query: Tensor, value_width: int) -> None:
        sums = wide_dtype(query)
        self.values = query.new_zeros(*query.shape[:3], value_width, dtype=sums)
        self.log_sum_exp = query.new_full(query.shape[:3], -math.inf, dtype=sums)

    def add(self, work: Work, blocks: Iterable[Block], query: Tensor, key: Tensor, value: Tensor) -> None:
        """Take in some blocks of keys and values, [B, K, T, D]."""
        key, value = dense(key), dense(value)
        for block in blocks:
            with torch.autocast(query.device.type, enabled=False):
                output, log_sum_exp = work.kernel_of(block).forward(work.operands(block, query, key, value))
            merge_(block.of_queries(self.values), block.of_queries(self.log_sum_exp), output, log_sum_exp)

    def add_sinks(self, sinks: Tensor) -> None:
        """Take in one score a head, [H], that has no value: softmax adds up to less than one."""
        total = torch.logaddexp(self.log_sum_exp, sinks.to(self.log_sum_exp.dtype).view(-1, 1))
        share = (self.log_sum_exp - total).exp().nan_to_num_(0.0)  # neither a key nor a sink: -inf - -inf
        self.values *= share.unsqueeze(-1)
        self.log_sum_exp = total


def merge_(output: Tensor, log_sum_exp: Tensor, other: Tensor, other_log_sum_exp: Tensor) -> None:
    """Join attention over two disjoint sets of keys, in place of the first; all in float32 or wider."""
    share = torch.sigmoid(other_log_sum_exp - log_sum_exp).nan_to_num_(0.0)  # neither saw a key: -inf - -inf
    output.lerp_(other.to(output.dtype), share.unsqueeze(-1))
    torch.logaddexp(log_sum_exp, other_log_sum_exp, out=log_sum_exp)


@dataclass
class Gradients:
    """Gradients of a segment's queries, and of the learned bias, as blocks go back.

    Args:
        work: How blocks are computed.
        query: [B, H, S, D].
        output: [B, H, S, D], of all keys.
        log_sum_exp: [B, H, S], of all keys.
        gradient: Of the output.
    """

    work: Work
    query: Tensor
    output: Tensor
    log_sum_exp: Tensor
    gradient: Tensor
    of_query: Tensor = field(init=False)
    of_bias: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.of_query = wide_zeros(self.query)
        self.of_bias = [torch.zeros_like(weight) for weight in self.work.learned]

    def add(self, blocks: Iterable[Block], key: Tensor, value: Tensor, of_key: Tensor, of_value: Tensor) -> None:
        """Take back some blocks of keys and values; their gradients are added to `of_key` and `of_value`."""
        key, value = dense(key), dense(value)
        for block in blocks:
            rows = (block.of_queries(tensor) for tensor in (self.gradient, self.output, self.log_sum_exp))
            with torch.autocast(self.query.device.type, enabled=False):
                given = self.work.operands(block, self.query, key, value)
                to_query, to_key, to_value, to_bias = self.work.kernel_of(block).backward(given, *rows)
            block.of_queries(self.of_query).add_(to_query)
            block.of_keys(of_key).add_(to_key)
            block.of_keys(of_value).add_(to_value)
            if self.of_bias and to_bias is not None:
                self._add_to_bias(block, to_bias)

    def of_sinks(self, sinks: Tensor) -> Tensor:
        """[H]: a sink's weight times its gradient, which is minus the row's sum of output times gradient."""
        weights = (sinks.to(self.log_sum_exp.dtype).view(-1, 1) - self.log_sum_exp).exp().nan_to_num(0.0)
        row = (wide(self.gradient) * wide(self.output)).sum(-1)
        return -(weights * row).sum((0, 2)).to(sinks.dtype)

    def _add_to_bias(self, block: Block, gradient: Tensor) -> None:
        assert self.work.bias is not None
        with torch.enable_grad(), torch.autocast(self.query.device.type, enabled=False):
            values = self.work.bias(*(_positions(piece, self.query.device) for piece in (block.queries, block.keys)))
        parts = torch.autograd.grad(values, self.work.learned, gradient.to(values.dtype), allow_unused=True)
        for total, part in zip(self.of_bias, parts, strict=True):
            if part is not None:
                total += part


def wide_zeros(tensor: Tensor) -> Tensor:
    """Zeros of its shape, in which gradients are summed."""
    return torch.zeros_like(tensor, dtype=wide_dtype(tensor), memory_format=torch.contiguous_format)


def _positions(piece: Piece, device: torch.device) -> Tensor:
    return torch.arange(piece.start, piece.stop, device=device)
