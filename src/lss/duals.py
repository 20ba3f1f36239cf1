"""Collectives in the graph of a model, each with its dual in backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lss.collectives import Axis


class _Gather(torch.autograd.Function):
    """All-gather along dim 0 forward; its dual, a reduce-scatter of the gradient, backward."""

    @staticmethod
    def forward(ctx: Any, segment: Tensor, axis: Axis, layer: str) -> Tensor:
        ctx.axis, ctx.layer = axis, layer
        return axis.all_gather(segment, layer=layer, phase="forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.reduce_scatter(gradients[0], layer=ctx.layer, phase="backward"), None, None


def gather(segment: Tensor, axis: Axis, layer: str) -> Tensor:
    """Concatenate the segments of all ranks along dim 0, in the graph; the dual in backward is a reduce-scatter.

    Args:
        segment: [S, ...], of the same shape on every rank.
        axis: The axis to gather over.
        layer: The name under which the ledger counts it.

    Returns:
        [N * S, ...], sequence first, so that the message is in order as it arrives.
    """
    if axis.size == 1:
        return segment
    whole: Tensor = _Gather.apply(segment, axis, layer)  # type: ignore[no-untyped-call]
    return whole


class _Scatter(torch.autograd.Function):
    """Reduce-scatter along dim 0 forward; its dual, an all-gather of the gradient, backward."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, axis: Axis, layer: str) -> Tensor:
        ctx.axis, ctx.layer = axis, layer
        return axis.reduce_scatter(whole, layer=layer, phase="forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.all_gather(gradients[0], layer=ctx.layer, phase="backward"), None, None


def scatter(whole: Tensor, axis: Axis, layer: str) -> Tensor:
    """Sum over the ranks and keep this rank's part of dim 0, in the graph; the dual in backward is an all-gather.

    Args:
        whole: [N * S, ...], of the same shape on every rank.
        axis: The axis to sum over.
        layer: The name under which the ledger counts it.

    Returns:
        [S, ...].
    """
    if axis.size == 1:
        return whole
    part: Tensor = _Scatter.apply(whole, axis, layer)  # type: ignore[no-untyped-call]
    return part


class _Exchange(torch.autograd.Function):
    """All-to-alls forward; backward the same again, of the gradients."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, layer: str, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.layer = axis, layer
        return _exchanged(parts, axis, layer, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_exchanged(gradients, ctx.axis, ctx.layer, "backward")


def _exchanged(parts: Sequence[Tensor], axis: Axis, layer: str, phase: str) -> tuple[Tensor, ...]:
    waits = [axis.start_all_to_all(part, layer=layer, phase=phase) for part in parts]
    return tuple(wait() for wait in waits)


def exchange(parts: Sequence[Tensor], axis: Axis, layer: str) -> tuple[Tensor, ...]:
    """Send part r of each tensor to rank r, in the graph; the dual in backward sends the gradients back.

    Args:
        parts: [N, ...] each, of the same shape on every rank; all are on their way at once.
        axis: The axis to exchange over.
        layer: The name under which the ledger counts them.

    Returns:
        Of each, one part of every rank: [N, ...].
    """
    if axis.size == 1:
        return tuple(parts)
    received: tuple[Tensor, ...] = _Exchange.apply(axis, layer, *parts)  # type: ignore[no-untyped-call]
    return received


class _Sum(torch.autograd.Function):
    """Sum over the ranks forward; its dual, the sum of the gradients over the ranks, backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, layer: str) -> Tensor:
        ctx.axis, ctx.layer = axis, layer
        return axis.all_reduce_(tensor.clone(), layer=layer, phase="forward")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.all_reduce_(gradients[0].clone(), layer=ctx.layer, phase="backward"), None, None


def sum_over(tensor: Tensor, axis: Axis, layer: str) -> Tensor:
    """Sum over the ranks of an axis, in the graph; the dual in backward is the sum of the gradients.

    Args:
        tensor: Of the same shape on every rank.
        axis: The axis to sum over.
        layer: The name under which the ledger counts it.
    """
    if axis.size == 1:
        return tensor
    total: Tensor = _Sum.apply(tensor, axis, layer)  # type: ignore[no-untyped-call]
    return total
