"""Which blocks of queries and keys a rank computes: made on the host from masks and layouts, no tensor is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from torch import Tensor

from lss.documents import Span
from lss.layout import Layout, Piece
from lss.masks import Mask, View

# Share of the computed area that blocks on the edge of a mask may waste before they are cut smaller.
WASTE = 0.05
# Blocks that documents' edges run through are computed with a mask if they are not longer than this.
_SMALL = 64


@dataclass(frozen=True)
class Limits:
    """How large the blocks of a kernel may be; None for any size.

    Args:
        queries: Queries of any block.
        keys: Keys of any block.
        edge: Size of blocks on the edge of a mask, at first; smaller while they waste too much. None leaves causal
            blocks whole and cuts others only where they waste too much.
        joined: Whether full blocks may be joined where their keys are neighbours in memory, though not in the sequence.
    """

    queries: int | None = None
    keys: int | None = None
    edge: int | None = 512
    smallest_edge: int = 32
    joined: bool = True


@dataclass(frozen=True)
class Block:
    """Some queries and some keys of some sequences.

    Args:
        rows: Sequences of the batch.
        queries: Their slots in the tensor of queries, and positions.
        keys: The same of the keys; positions are not those of every key where blocks were joined.
        view: FULL, CAUSAL or PARTIAL.
    """

    rows: slice
    queries: Piece
    keys: Piece
    view: View

    @property
    def area(self) -> int:
        """Pairs, of one sequence."""
        return len(self.queries) * len(self.keys)

    def of_queries(self, tensor: Tensor) -> Tensor:
        """The block's part of a tensor [B, H, S, ...]."""
        return tensor[self.rows, :, self.queries.slot : self.queries.slot + len(self.queries)]

    def of_keys(self, tensor: Tensor) -> Tensor:
        """The block's part of a tensor [B, K, T, ...]."""
        return tensor[self.rows, :, self.keys.slot : self.keys.slot + len(self.keys)]


@dataclass(frozen=True)
class Run:
    """Neighbouring slots of a gathered tensor that this rank needs.

    Args:
        start: First slot.
        stop: The one behind the last.
        blocks: What is computed with them; their keys' slots count from `start`.
    """

    start: int
    stop: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Chunk:
    """What arrives at once: the slots [start, stop) of every rank's segment, or in a ring of one other rank's.

    Args:
        start: First slot of a segment.
        stop: The one behind the last.
        runs: What of it is needed; the rank's own slots are not.
    """

    start: int
    stop: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Plan:
    """What a rank computes in one attention layer.

    Args:
        own: Blocks of the keys of its own segment.
        chunks: The other keys, in the order in which they arrive.
    """

    own: tuple[Block, ...]
    chunks: tuple[Chunk, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All of them."""
        return self.own + tuple(block for chunk in self.chunks for run in chunk.runs for block in run.blocks)

    @property
    def area(self) -> int:
        """Pairs that are computed, of a sequence where all are alike."""
        return sum(block.area for block in self.blocks)

    @property
    def has_partial(self) -> bool:
        """Whether some block needs a mask."""
        return any(block.view is View.PARTIAL for block in self.blocks)


@lru_cache(maxsize=256)
def plan(
    mask: Mask, num_sequences: int, queries: Layout, keys: Layout, rank: int, limits: Limits, num_chunks: int | None = 1
) -> Plan:
    """Cut the work of `rank` into blocks that its kernel takes, as small at the edges of the mask as it pays.

    Plans are kept: the same mask, layouts and limits give the same one again.

    Args:
        mask: Who sees whom.
        num_sequences: B.
        queries: The layout of the queries.
        keys: The layout of the keys.
        rank: The rank in the sequence group.
        limits: Of the kernel.
        num_chunks: Pieces in which the other ranks' keys arrive; None for rank by rank, the nearest before it first.
    """
    edge = limits.edge or max(queries.length, keys.length)
    edges = (View.PARTIAL,) if limits.edge is None else (View.PARTIAL, View.CAUSAL)
    largest: Plan | None = None
    while True:
        found = _plan(mask, num_sequences, queries, keys, rank, replace(limits, edge=edge), num_chunks)
        largest = largest or found
        wasted = sum(block.area / 2 for block in found.blocks if block.view in edges)
        if wasted <= WASTE * (found.area - wasted) or edge // 2 < limits.smallest_edge:
            return found if found.area < (1 - WASTE / 5) * largest.area else largest
        edge //= 2


def _plan(
    mask: Mask, num_sequences: int, queries: Layout, keys: Layout, rank: int, limits: Limits, num_chunks: int | None
) -> Plan:
    own_queries = queries.pieces(rank)
    if keys.num_ranks == 1:  # every rank has them all
        return Plan(_blocks(mask, num_sequences, own_queries, keys.pieces(0), limits), ())
    own = _blocks(mask, num_sequences, own_queries, keys.pieces(rank), limits)
    arriving = _rank_by_rank(keys, rank) if num_chunks is None else _of_all_ranks(keys, rank, num_chunks)
    chunks = [
        Chunk(start, stop, tuple(_runs(_blocks(mask, num_sequences, own_queries, pieces, limits))))
        for (start, stop), pieces in arriving
    ]
    return Plan(own, tuple(chunks))


def _rank_by_rank(keys: Layout, rank: int) -> Iterator[tuple[Span, list[Piece]]]:
    """Slots and pieces of each other rank."""
    for step in range(1, keys.num_ranks):
        yield (0, keys.segment_length), list(keys.pieces((rank - step) % keys.num_ranks))


def _of_all_ranks(keys: Layout, rank: int, num_chunks: int) -> Iterator[tuple[Span, list[Piece]]]:
    """The same slots of all ranks, and the pieces there that are not this rank's."""
    size = -(-keys.segment_length // num_chunks)
    for start in range(0, keys.segment_length, size):
        stop = min(keys.segment_length, start + size)
        yield (
            (start, stop),
            [
                replace(piece, slot=piece.slot + other * (stop - start))
                for other in range(keys.num_ranks)
                if other != rank
                for piece in _clipped(keys.pieces(other), start, stop)
            ],
        )


def _clipped(pieces: Iterable[Piece], start: int, stop: int) -> Iterator[Piece]:
    """The parts of pieces at the slots [start, stop), at slots that count from `start`."""
    for piece in pieces:
        first, last = max(piece.slot, start), min(piece.slot + len(piece), stop)
        if first < last:
            yield Piece(first - start, piece.start + first - piece.slot, piece.start + last - piece.slot)


def _runs(blocks: tuple[Block, ...]) -> Iterator[Run]:
    """Blocks by neighbouring keys."""
    used = sorted({(block.keys.slot, block.keys.slot + len(block.keys)) for block in blocks})
    edges: list[list[int]] = []
    for start, stop in used:
        if edges and start <= edges[-1][1]:
            edges[-1][1] = max(edges[-1][1], stop)
        else:
            edges.append([start, stop])
    for start, stop in edges:
        inside = (block for block in blocks if start <= block.keys.slot < stop)
        yield Run(
            start,
            stop,
            tuple(replace(block, keys=replace(block.keys, slot=block.keys.slot - start)) for block in inside),
        )


def _blocks(
    mask: Mask, num_sequences: int, queries: Iterable[Piece], keys: Iterable[Piece], limits: Limits
) -> tuple[Block, ...]:
    rows = [slice(row, row + 1) for row in range(num_sequences)] if mask.num_rows else [slice(None)]
    queries, keys = tuple(queries), tuple(keys)
    found = [
        block
        for row, own in enumerate(rows)
        for query in queries
        for key in keys
        for block in _cut(mask, row, own, query, key, limits)
    ]
    return tuple(_joined(found, limits.keys) if limits.joined else found)


def _cut(mask: Mask, row: int, rows: slice, query: Piece, key: Piece, limits: Limits) -> Iterator[Block]:
    """Blocks of one piece of queries and one of keys, cut until each is full, empty, or small enough."""
    view = mask.view(row, (query.start, query.stop), (key.start, key.stop))
    if view is View.EMPTY:
        return
    edge = None if view is View.FULL else limits.edge
    most_queries, most_keys = _least(limits.queries, edge), _least(limits.keys, edge)
    if view is View.CAUSAL:  # cut alike, so that the parts on the diagonal are causal again
        most_queries = most_keys = _least(most_queries, most_keys)
    edges = _edges(mask, row, query, key) if view is View.PARTIAL else []
    query_parts, key_parts = _parts(query, most_queries, edges), _parts(key, most_keys, edges)
    if len(query_parts) == len(key_parts) == 1:
        yield Block(rows, query, key, view)
        return
    for query_part in query_parts:
        for key_part in key_parts:
            yield from _cut(mask, row, rows, query_part, key_part, limits)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit), default=None)


def _edges(mask: Mask, row: int, query: Piece, key: Piece) -> list[int]:
    """Where documents and the like begin; the same for both, so that diagonals stay aligned. None in small blocks."""
    if max(len(query), len(key)) <= _SMALL:
        return []
    found = mask.edges(row, (query.start, query.stop), of_keys=False)
    return sorted({*found, *mask.edges(row, (key.start, key.stop), of_keys=True)})


def _parts(piece: Piece, most: int | None, edges: list[int]) -> list[Piece]:
    """The piece in two, at the edge nearest to its middle, or there if it is too long; else whole."""
    inside = [edge for edge in edges if piece.start < edge < piece.stop]
    if not inside and (most is None or len(piece) <= most):
        return [piece]
    middle = (piece.start + piece.stop) // 2
    cut = min(inside, key=lambda edge: abs(edge - middle), default=middle)
    return [
        Piece(piece.slot + start - piece.start, start, stop) for start, stop in pairwise((piece.start, cut, piece.stop))
    ]


def _joined(blocks: list[Block], most_keys: int | None) -> Iterator[Block]:
    """Full blocks of the same queries whose keys are neighbours in memory become one."""
    full = [block for block in blocks if block.view is View.FULL]
    yield from (block for block in blocks if block.view is not View.FULL)
    full.sort(key=lambda block: (block.rows.start or 0, block.queries.slot, len(block.queries), block.keys.slot))
    last: Block | None = None
    for block in full:
        if last and _are_neighbours(last, block) and len(last.keys) + len(block.keys) <= (most_keys or math.inf):
            last = replace(last, keys=replace(last.keys, stop=last.keys.stop + len(block.keys)))
            continue
        if last:
            yield last
        last = block
    if last:
        yield last


def _are_neighbours(first: Block, second: Block) -> bool:
    same = (first.rows, first.queries) == (second.rows, second.queries)
    return same and second.keys.slot == first.keys.slot + len(first.keys)
