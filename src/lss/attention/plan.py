"""Which keys each query of a segment sees, as blocks without masks: worked out on the host, no tensor is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lss.documents import Documents, Span
from lss.layout import Layout


@dataclass(frozen=True)
class Block:
    """Keys at slots [start, stop) of the whole sequence: all visible, or causally from the tile's first query on."""

    start: int
    stop: int
    is_causal: bool


@dataclass(frozen=True)
class Tile:
    """Queries of some sequences that see the same blocks of keys.

    Args:
        rows: Sequences of the batch.
        start: First local slot.
        stop: The one behind the last.
        blocks: What these queries see; blocks do not overlap.
    """

    rows: slice
    start: int
    stop: int
    blocks: tuple[Block, ...]

    def of_queries(self, tensor: Tensor) -> Tensor:
        """The tile's part of a tensor [B, H, S, ...]."""
        return tensor[self.rows, :, self.start : self.stop]

    def of_keys(self, tensor: Tensor, block: Block) -> Tensor:
        """A block's part of a tensor [B, K, T, ...]."""
        return tensor[self.rows, :, block.start : block.stop]


def plan(
    layout: Layout, rank: int, documents: Documents | None, is_causal: bool, max_queries: int | None = None
) -> tuple[Tile, ...]:
    """Tiles of the queries that `rank` holds. Nothing crosses a document; queries of padding are in no tile.

    Args:
        layout: The layout of the batch.
        rank: The rank in the sequence group.
        documents: Spans of each sequence; None where each sequence is one document.
        is_causal: Whether a query sees no later key.
        max_queries: Queries of a tile at most; None for any number.
    """
    if documents is None or all(spans == documents[0] for spans in documents):
        shared = documents[0] if documents else ((0, layout.length),)
        rows: list[tuple[slice, Sequence[Span]]] = [(slice(None), shared)]
    else:
        rows = [(slice(row, row + 1), spans) for row, spans in enumerate(documents)]
    first = layout.start(rank)
    tiles = []
    for index, spans in rows:
        for start, stop in spans:
            own_stop = min(stop, first + layout.segment_length)
            for own_start in range(max(start, first), own_stop, max_queries or layout.segment_length):
                last = min(own_stop, own_start + (max_queries or layout.segment_length))
                blocks = _blocks(start, stop, own_start, last, is_causal)
                tiles.append(Tile(index, own_start - first, last - first, blocks))
    return tuple(tiles)


def _blocks(start: int, stop: int, own_start: int, own_stop: int, is_causal: bool) -> tuple[Block, ...]:
    """Keys [start, stop) as the queries at [own_start, own_stop) see them."""
    if not is_causal:
        return (Block(start, stop, False),)
    own = Block(own_start, own_stop, True)
    return (Block(start, own_start, False), own) if start < own_start else (own,)
