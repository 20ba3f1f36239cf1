"""DeepSpeed Ulysses (Jacobs et al., 2023): each rank computes whole sequences for some of the heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lss.attention.schedule import Scene
from lss.bias import Bias
from lss.collectives import Axis
from lss.documents import Span
from lss.duals import exchange
from lss.errors import ModelError
from lss.layout import Layout
from lss.masks import Mask, View

# Attention of whole sequences on this rank alone: of queries, keys and values, what they see, and sinks.
Serial = Callable[[tuple[Tensor, Tensor, Tensor], Scene, Tensor | None], Tensor]


def attend_by_heads(
    tensors: tuple[Tensor, Tensor, Tensor], scene: Scene, sinks: Tensor | None, axis: Axis, name: str, serial: Serial
) -> Tensor:
    """Attention by four all-to-alls forward, of queries, keys, values and outputs, and four backward.

    Each rank sends of every tensor what the other ranks' heads need, (N - 1) / N of it. Keys and values of fewer heads
    than ranks are sent several times, to all ranks whose queries share them.

    Args:
        tensors: Query [B, H, S, D], key and value [B, K, S, D], of this rank's segment.
        scene: Who sees whom.
        sinks: [H], or None.
        axis: The sequence axis, of N ranks.
        name: Of the layer, for the ledger.
        serial: What computes whole sequences of this rank's heads.

    Returns:
        [B, H, S, D].

    Raises:
        ModelError: The heads cannot be shared out evenly.
    """
    query, key, value = tensors
    heads = query.size(1)
    if heads % axis.size:
        raise ModelError(
            f"{name} has {heads} heads, for {axis.size} ranks",
            allowed="with strategy ulysses, a number of ranks that divides the heads: each computes some of them",
            remedy="fewer ranks a sequence, or strategy lss or ring, which cut no heads",
        )
    copies = math.lcm(key.size(1), axis.size) // key.size(1)  # of a head of keys, for the ranks that share it
    key, value = (part.repeat_interleave(copies, 1) if copies > 1 else part for part in (key, value))
    queries, keys = scene.queries, scene.keys
    if keys.num_ranks == 1:  # which every rank has whole
        (whole_query,) = _to_heads([query], [queries], axis, name)
        whole_key, whole_value = (part.chunk(axis.size, 1)[axis.rank] for part in (key, value))
    else:
        layouts = [queries, keys, keys]
        whole_query, whole_key, whole_value = _to_heads([query, key, value], layouts, axis, name)
    part = _Part(axis.rank * (heads // axis.size), (axis.rank + 1) * (heads // axis.size))
    own_sinks = None if sinks is None else sinks[part.start : part.stop]
    attended = serial((whole_query, whole_key, whole_value), part.of_scene(scene, axis), own_sinks)
    return _to_tokens(attended, queries, axis, name)


def _to_heads(tensors: list[Tensor], layouts: list[Layout], axis: Axis, name: str) -> list[Tensor]:
    """[B, H, S, D] of this rank's tokens to [B, H / N, L, D] of its heads."""
    parts = [tensor.unflatten(1, (axis.size, -1)).permute(1, 3, 0, 2, 4) for tensor in tensors]  # [N, S, B, H / N, D]
    received = exchange(parts, axis, name)
    ordered = (layout.unshard(part.flatten(0, 1), dim=0) for part, layout in zip(received, layouts, strict=True))
    return [whole.permute(1, 2, 0, 3) for whole in ordered]


def _to_tokens(attended: Tensor, layout: Layout, axis: Axis, name: str) -> Tensor:
    """[B, H / N, L, D] of this rank's heads to [B, H, S, D] of its tokens."""
    whole = attended.permute(2, 0, 1, 3)
    parts = torch.stack([layout.shard(whole, rank, dim=0, fill=0) for rank in range(axis.size)])
    (received,) = exchange([parts], axis, name)
    return received.permute(2, 0, 3, 1, 4).flatten(1, 2)  # [N, S, B, H / N, D]


@dataclass(frozen=True)
class _Part:
    """Heads [start, stop)."""

    start: int
    stop: int

    def of_scene(self, scene: Scene, axis: Axis) -> Scene:
        """The same for whole sequences and these heads alone."""
        queries, keys = (Layout.contiguous(layout.length, 1) for layout in (scene.queries, scene.keys))
        mask = _MaskOfHeads(scene.mask, self) if scene.mask.num_heads else scene.mask
        bias = None if scene.bias is None else _BiasOfHeads(scene.bias, self)
        dropout = scene.dropout and replace(scene.dropout, part=(axis.rank, axis.size))
        return replace(scene, mask=mask, queries=queries, keys=keys, bias=bias, dropout=dropout)

    def of(self, values: Tensor) -> Tensor:
        """These heads of [H or 1, S, T]."""
        return values if values.size(0) == 1 else values[self.start : self.stop]


class _BiasOfHeads(nn.Module):
    """A bias for some heads; what it learns is still its own."""

    def __init__(self, bias: Bias, part: _Part) -> None:
        super().__init__()
        self.bias, self.part = bias, part

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[H / N or 1, S, T]."""
        return self.part.of(self.bias(queries, keys))


@dataclass(frozen=True)
class _MaskOfHeads(Mask):
    """A mask that says something of each head, for some heads."""

    mask: Mask
    part: _Part

    @property
    def num_rows(self) -> int:
        """As of the mask."""
        return self.mask.num_rows

    @property
    def num_heads(self) -> int:
        """Of these."""
        return self.part.stop - self.part.start

    def view(self, row: int, queries: Span, keys: Span) -> View:
        """As of the mask, which holds for all heads."""
        return self.mask.view(row, queries, keys)

    def pairs(self, row: int, queries: Tensor, keys: Tensor) -> Tensor:
        """[H / N, S, T]."""
        return self.part.of(self.mask.pairs(row, queries, keys))

    def edges(self, row: int, span: Span, *, of_keys: bool) -> list[int]:
        """As of the mask."""
        return self.mask.edges(row, span, of_keys=of_keys)

    def check(self, num_sequences: int, num_queries: int, num_keys: int) -> None:
        """As of the mask."""
        self.mask.check(num_sequences, num_queries, num_keys)
