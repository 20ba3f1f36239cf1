"""An attention layer over segments: what it gathers, and where (paper, Principle 3 and "Fused communication")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from lss.attention.blocks import attend
from lss.collectives import gather
from lss.context import SequenceContext, autocast_dtype
from lss.errors import LayoutError

Gather = Literal["x", "kv", "separate"]
GATHERS: tuple[str, ...] = get_args(Gather)


class AttentionLayer(Protocol):
    """What an attention layer must offer to be run over segments.

    Attributes:
        is_causal: Whether a token sees no later token.
        attention_dropout: Rate of dropout on the attention weights.
        scale: Factor of the scores, or None for 1 / sqrt(D).
    """

    is_causal: bool
    attention_dropout: float
    scale: float | None

    def project_query(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B, S, E] at `positions` [S] to [B, H, S, D]."""

    def project_key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, E] at `positions` [S] to keys and values, each [B, K, S, D]."""

    def project_output(self, attended: Tensor) -> Tensor:
        """[B, H, S, D] to [B, S, E]."""


def distributed_attention(
    layer: AttentionLayer, context: SequenceContext, choice: Gather, name: str, x: Tensor
) -> Tensor:
    """Run `layer` on this rank's segment: queries stay, keys and values of all segments are collected.

    Args:
        layer: The layer.
        context: The context of the parallelized model.
        choice: What to gather.
        name: Qualified name of the layer, for the ledger.
        x: [B, S, E], the segment's input of the layer.

    Returns:
        [B, S, E], the segment of the layer's output.
    """
    rank, layout = context.sequence.rank, context.layout
    if x.size(1) != layout.segment_length:
        raise LayoutError(
            f"{name} was given {x.size(1)} tokens of a segment that has {layout.segment_length} slots",
            allowed="the tokens that lss.shard returned, with the segment that it returned beside them",
        )
    query = layer.project_query(x, context.positions(x.device))
    key, value = _COLLECT[choice](layer, context, name, x)
    attended = attend(
        query,
        key,
        value,
        start=layout.start(rank),
        num_keys=layout.length,
        is_causal=layer.is_causal,
        scale=layer.scale,
    )
    return layer.project_output(attended)


def _collect_x(layer: AttentionLayer, context: SequenceContext, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """One message of the layer's input; every rank projects K and V of the whole sequence from it."""
    if context.sequence.size == 1:
        return layer.project_key_value(x, context.positions(x.device))
    sequence_first = x.to(autocast_dtype(x)).transpose(0, 1)  # [B, S, E] -> [S, B, E]
    whole = gather(sequence_first, context.sequence, name).transpose(0, 1)  # [N * S, B, E] -> [B, N * S, E]
    # a linear layer would copy a strided input once for K and once for V, and keep both copies for backward
    return layer.project_key_value(whole.contiguous(), context.layout.all_positions(x.device))


def _collect_kv(layer: AttentionLayer, context: SequenceContext, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """One message of K and V, packed."""
    key, value = layer.project_key_value(x, context.positions(x.device))
    if context.sequence.size == 1:
        return key, value
    packed = torch.stack((key, value)).permute(3, 1, 0, 2, 4)  # [2, B, K, S, D] -> [S, B, 2, K, D]
    whole = gather(packed, context.sequence, name)
    keys, values = whole.permute(2, 1, 3, 0, 4).unbind()  # [N * S, B, 2, K, D] -> 2 of [B, K, N * S, D]
    return keys, values


def _collect_separate(layer: AttentionLayer, context: SequenceContext, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two messages: K, then V. Where their widths differ, this is the only form that fits both."""
    key, value = layer.project_key_value(x, context.positions(x.device))
    return _gather_heads(key, context, name), _gather_heads(value, context, name)


def _gather_heads(heads: Tensor, context: SequenceContext, name: str) -> Tensor:
    whole = gather(heads.permute(2, 0, 1, 3), context.sequence, name)  # [B, K, S, D] -> [S, B, K, D]
    return whole.permute(1, 2, 0, 3) if context.sequence.size > 1 else heads  # [N * S, B, K, D] -> [B, K, N * S, D]


_COLLECT: dict[str, Callable[[AttentionLayer, SequenceContext, str, Tensor], tuple[Tensor, Tensor]]] = {
    "x": _collect_x,
    "kv": _collect_kv,
    "separate": _collect_separate,
}
