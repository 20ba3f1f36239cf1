"""An attention layer over segments: what it gathers, and where (paper, Principle 3 and "Fused communication")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Signature
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from lss.attention.blocks import Work, attend
from lss.attention.kernels import kernel_for
from lss.attention.plan import plan
from lss.collectives import gather
from lss.context import SequenceContext, autocast_dtype
from lss.dropout import Site
from lss.errors import LayoutError, ModelError

Gather = Literal["x", "kv", "separate"]
GATHERS: tuple[str, ...] = get_args(Gather)


class AttentionLayer(Protocol):
    """What an attention layer must offer to be run over segments.

    Its own forward is replaced: query, key and value are projected, keys and values collected, attention computed,
    and the output projected, by the three methods alone. So a forward that does more than these has no place in it.
    The layer may also have `attention_dropout` (rate on the attention weights) and `scale` (factor of the scores,
    1 / sqrt(D) otherwise).

    Attributes:
        is_causal: Whether a token sees no later token.
        training: Whether dropout is on; every nn.Module has it.
    """

    is_causal: bool
    training: bool

    def project_query(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B, S, E] at `positions`, [S] or [B, S], to [B, H, S, D]."""

    def project_key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, E] at `positions`, [S] or [B, S], to keys and values, each [B, K, S, D]."""

    def project_output(self, attended: Tensor) -> Tensor:
        """[B, H, S, D] to [B, S, E]."""


@dataclass(frozen=True)
class DistributedAttention:
    """Runs an attention layer on this rank's segment: queries stay, keys and values of all segments are collected.

    Args:
        layer: The layer.
        context: The context of the parallelized model.
        gather: What to gather.
        name: Qualified name of the layer, for the ledger.
        signature: Of the layer's own forward.
        dropout: Place of the dropout of attention weights; None for none.
    """

    layer: AttentionLayer
    context: SequenceContext
    gather: Gather
    name: str
    signature: Signature
    dropout: Site | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's forward: [B, S, E] to [B, S, E]; `positions` may be given too, and are known from the segment."""
        x = self._only_argument(args, kwargs)
        layout = self.context.layout
        if x.size(1) != layout.segment_length:
            raise LayoutError(
                f"{self.name} was given {x.size(1)} tokens of a segment that has {layout.segment_length} slots",
                allowed="the tokens that lss.shard returned, with the segment that it returned beside them",
            )
        query = self.layer.project_query(x, self.context.positions(x.device))
        key, value = _COLLECT[self.gather](self, x)
        self.check_widths(query, key, value)
        return self.layer.project_output(attend(query, key, value, self._work(query)))

    def _only_argument(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The first argument of the layer's own forward; a mask or anything else that is given is refused."""
        (_, x), *others = self.signature.bind(*args, **kwargs).arguments.items()
        for argument, value in others:
            if argument != "positions" and value is not None:
                raise ModelError(
                    f"{self.name} was called with {argument}=..., which cannot be honoured over segments",
                    allowed="the input and `positions`",
                    remedy="say padding and documents to lss.shard; causality is the layer's is_causal",
                )
        return x  # type: ignore[no-any-return]

    def check_widths(self, *heads: Tensor) -> None:
        """Raise ModelError unless queries, keys and values are equally wide."""
        if len({part.size(-1) for part in heads}) > 1:
            raise ModelError(
                f"{self.name} has heads of widths {[part.size(-1) for part in heads]}",
                allowed="queries, keys and values of one width",
            )

    def _work(self, query: Tensor) -> Work:
        layout, rank = self.context.layout, self.context.sequence.rank
        dropping = self.dropout is not None and self.layer.training
        kernel = kernel_for(query.device, drops_weights=dropping)
        tiles = plan(layout, rank, self.context.present.documents, self.layer.is_causal, kernel.max_queries)
        dropout = self.dropout if dropping else None
        if dropout:
            dropout.enter()
        return Work(tiles, kernel, getattr(self.layer, "scale", None), layout.start(rank), dropout)

    def own_key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of this rank's slots, each [B, K, S, D]."""
        return self.layer.project_key_value(x, self.context.positions(x.device))


def _collect_x(attention: DistributedAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """One message of the layer's input; every rank projects K and V of the whole sequence from it."""
    context = attention.context
    if context.sequence.size == 1:
        return attention.own_key_value(x)
    sequence_first = x.to(autocast_dtype(x)).transpose(0, 1)  # [B, S, E] -> [S, B, E]
    whole = gather(sequence_first, context.sequence, attention.name).transpose(0, 1)  # [N * S, B, E] -> [B, N * S, E]
    # a linear layer would copy a strided input once for K and once for V, and keep both copies for backward
    return attention.layer.project_key_value(whole.contiguous(), context.all_positions(x.device))


def _collect_kv(attention: DistributedAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """One message of K and V, packed."""
    key, value = attention.own_key_value(x)
    if attention.context.sequence.size == 1:
        return key, value
    attention.check_widths(key, value)
    packed = torch.stack((key, value)).permute(3, 1, 0, 2, 4)  # [2, B, K, S, D] -> [S, B, 2, K, D]
    whole = gather(packed, attention.context.sequence, attention.name)
    keys, values = whole.permute(2, 1, 3, 0, 4).unbind()  # [N * S, B, 2, K, D] -> 2 of [B, K, N * S, D]
    return keys, values


def _collect_separate(attention: DistributedAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two messages: K, then V."""
    key, value = attention.own_key_value(x)
    return _gather_heads(attention, key), _gather_heads(attention, value)


def _gather_heads(attention: DistributedAttention, heads: Tensor) -> Tensor:
    axis = attention.context.sequence
    whole = gather(heads.permute(2, 0, 1, 3), axis, attention.name)  # [B, K, S, D] -> [S, B, K, D]
    return whole.permute(1, 2, 0, 3) if axis.size > 1 else heads  # [N * S, B, K, D] -> [B, K, N * S, D]


_COLLECT: dict[str, Callable[[DistributedAttention, Tensor], tuple[Tensor, Tensor]]] = {
    "x": _collect_x,
    "kv": _collect_kv,
    "separate": _collect_separate,
}
