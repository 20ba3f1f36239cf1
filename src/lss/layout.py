"""Which tokens of a sequence a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lss.errors import LayoutError

LayoutName = Literal["contiguous", "zigzag", "balanced"]
LAYOUTS: tuple[str, ...] = get_args(LayoutName)

# Chunks that a rank gets of a balanced layout: more balance the work better, and cut it into smaller blocks.
BALANCED_CHUNKS = 16


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of the whole sequence, at the slots from `slot` on."""

    slot: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """A sequence of any length cut over ranks, each of which holds some spans of it: its segment (paper, Principle 1).

    Every segment has `segment_length` slots. A segment with fewer tokens has empty slots at its end: they hold padding
    that no real token attends to and that no loss counts.

    Args:
        length: L, tokens of the whole sequence, at least 1.
        spans: Tokens [start, stop) that each rank holds, in order; every token once.
    """

    length: int
    spans: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self) -> None:
        if self.length < 1 or not self.spans:
            raise LayoutError(
                f"a sequence of {self.length} tokens over {len(self.spans)} ranks",
                allowed="at least 1 token and 1 rank",
            )
        held = sorted(span for spans in self.spans for span in spans)
        edges = [edge for span in held for edge in span]
        if edges[::2] != [0, *edges[1:-1:2]] or edges[-1] != self.length or any(start >= stop for start, stop in held):
            raise LayoutError(
                f"a layout of {self.length} tokens by the spans {self.spans}",
                allowed="spans that hold every token once",
            )

    @classmethod
    def named(cls, name: str, length: int, num_ranks: int) -> Layout:
        """`contiguous`, or `zigzag`; `balanced` needs the work of the batch.

        Raises:
            LayoutError: There is no such layout.
        """
        makers = {"contiguous": cls.contiguous, "zigzag": cls.zigzag}
        if name not in makers:
            raise LayoutError(f"the layout {name!r}", allowed=", ".join(LAYOUTS))
        return makers[name](length, num_ranks)

    @classmethod
    def contiguous(cls, length: int, num_ranks: int) -> Layout:
        """The paper's: rank r holds the r-th of N parts; all but the last ones are equally long."""
        size = -(-length // max(1, num_ranks))
        edges = [min(length, rank * size) for rank in range(num_ranks + 1)]
        return cls(length, tuple(_some([span]) for span in pairwise(edges)))

    @classmethod
    def zigzag(cls, length: int, num_ranks: int) -> Layout:
        """Rank r holds the parts r and 2N - 1 - r of 2N: equal work under a causal mask.

        What is missing to segments of one length is missing to few ranks, so that the others' are neighbours in memory.
        """
        size = -(-length // max(1, num_ranks))
        missing, most = size * num_ranks - length, max(1, size - 1)
        lacks = [min(most, max(0, missing - most * rank)) for rank in reversed(range(num_ranks))]
        firsts = [size // 2 - max(0, lack - (size - size // 2)) for lack in lacks]
        lasts = [size - first - lack for first, lack in zip(firsts, lacks, strict=True)]
        parts = list(pairwise(accumulate([*firsts, *reversed(lasts)], initial=0)))
        return cls(length, tuple(_some([parts[rank], parts[-1 - rank]]) for rank in range(num_ranks)))

    @classmethod
    def balanced(cls, length: int, num_ranks: int, work: Sequence[float]) -> Layout:
        """Ranks hold equally many chunks whose work adds up to much the same.

        The heaviest chunk goes first, to the rank with the least work among those that still have room.

        Args:
            length: L.
            num_ranks: N.
            work: Of each token, L values, in any unit: the number of keys that it sees, say.
        """
        if min(length, num_ranks) < 1:
            return cls(length, ((),) * num_ranks)  # which is refused
        num_chunks = min(length, BALANCED_CHUNKS * num_ranks)
        edges = [length * chunk // num_chunks for chunk in range(num_chunks + 1)]
        sums = [0.0, *accumulate(work)]
        chunks = sorted(pairwise(edges), key=lambda chunk: sums[chunk[0]] - sums[chunk[1]])
        room = -(-num_chunks // num_ranks)
        held: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
        load = [0.0] * num_ranks
        for start, stop in chunks:
            rank = min((r for r in range(num_ranks) if len(held[r]) < room), key=lambda r: (load[r], r))
            held[rank].append((start, stop))
            load[rank] += sums[stop] - sums[start]
        return cls(length, tuple(_some(sorted(spans)) for spans in held))

    @property
    def num_ranks(self) -> int:
        """N."""
        return len(self.spans)

    @cached_property
    def segment_length(self) -> int:
        """S, slots of a segment; the same on every rank."""
        return max(self.num_tokens(rank) for rank in range(self.num_ranks))

    @property
    def padded_length(self) -> int:
        """N * S, slots of all segments."""
        return self.segment_length * self.num_ranks

    def num_tokens(self, rank: int) -> int:
        """Real tokens in the segment of `rank`."""
        return sum(stop - start for start, stop in self.spans[rank])

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The spans of `rank`, at the slots of its segment."""
        slots = accumulate((stop - start for start, stop in self.spans[rank]), initial=0)
        return tuple(Piece(slot, *span) for slot, span in zip(slots, self.spans[rank], strict=False))

    def all_pieces(self) -> tuple[Piece, ...]:
        """The spans of all ranks, at the slots of the segments in rank order."""
        return tuple(
            Piece(rank * self.segment_length + piece.slot, piece.start, piece.stop)
            for rank in range(self.num_ranks)
            for piece in self.pieces(rank)
        )

    def positions(self, rank: int, device: torch.device | None = None) -> Tensor:
        """Index in the whole sequence of each slot of `rank`: int64 [S]; 0 in empty slots."""
        found = torch.zeros(self.segment_length, dtype=torch.int64)
        for piece in self.pieces(rank):
            found[piece.slot : piece.slot + len(piece)] = torch.arange(piece.start, piece.stop)
        return found.to(device)

    def all_positions(self, device: torch.device | None = None) -> Tensor:
        """`positions` of all ranks in rank order: int64 [N * S]."""
        return torch.tensor(self._order, device=device)

    @cached_property
    def _order(self) -> npt.NDArray[np.int64]:
        """`all_positions` on the host."""
        found = np.zeros(self.padded_length, np.int64)
        for piece in self.all_pieces():
            found[piece.slot : piece.slot + len(piece)] = np.arange(piece.start, piece.stop)
        return found

    def shard(self, whole: Tensor, rank: int, *, dim: int, fill: float | None) -> Tensor:
        """Cut the segment of `rank` out of a whole tensor.

        Args:
            whole: A tensor of L entries along `dim`.
            rank: The rank in the sequence group.
            dim: The sequence dimension.
            fill: The value of empty slots; None repeats the last token, on which any model can be run.

        Returns:
            The same tensor with S entries along `dim`.
        """
        if whole.size(dim) != self.length:
            raise LayoutError(
                f"a tensor of shape {tuple(whole.shape)} was cut along dim {dim}",
                allowed=f"size {self.length}, the length of the sequence, along that dim",
            )
        parts = [whole.narrow(dim, start, stop - start) for start, stop in self.spans[rank]]
        missing = self.segment_length - self.num_tokens(rank)
        if missing:
            last = whole.narrow(dim, self.length - 1, 1)
            shape = [missing if index == dim % whole.dim() else size for index, size in enumerate(whole.shape)]
            parts.append((last if fill is None else torch.full_like(last, fill)).expand(shape))
        return torch.cat(parts, dim)

    def unshard(self, slots: Tensor, *, dim: int) -> Tensor:
        """Segments of all ranks, one behind the other, to the whole in order: N * S entries along `dim` become L."""
        pieces = sorted(self.all_pieces(), key=lambda piece: piece.start)
        return torch.cat([slots.narrow(dim, piece.slot, len(piece)) for piece in pieces], dim)


def _some(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Without empty spans, and with neighbours joined."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif stop > start:
            joined.append((start, stop))
    return tuple(joined)
