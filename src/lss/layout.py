"""Which tokens of a sequence a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lss.errors import LayoutError


@dataclass(frozen=True)
class Layout:
    """The contiguous layout: a sequence of any length cut into one segment a rank (paper, Principle 1).

    Every segment has `segment_length` slots. Where the length is not a multiple of the ranks, the last slots of the
    sequence are empty: they hold padding that no real token attends to and that no loss counts.

    Args:
        length: L, tokens of the whole sequence, at least 1.
        num_ranks: N, ranks of the sequence group, at least 1.
    """

    length: int
    num_ranks: int

    def __post_init__(self) -> None:
        if self.length < 1 or self.num_ranks < 1:
            raise LayoutError(
                f"a sequence of {self.length} tokens over {self.num_ranks} ranks",
                allowed="at least 1 token and 1 rank",
            )

    @property
    def segment_length(self) -> int:
        """S, slots of a segment; the same on every rank."""
        return -(-self.length // self.num_ranks)

    @property
    def padded_length(self) -> int:
        """N * S, slots of all segments."""
        return self.segment_length * self.num_ranks

    def start(self, rank: int) -> int:
        """Index in the whole sequence of the first slot of `rank`."""
        return rank * self.segment_length

    def num_tokens(self, rank: int) -> int:
        """Real tokens in the segment of `rank`; 0 where the sequence ends before it."""
        return max(0, min(self.segment_length, self.length - self.start(rank)))

    def positions(self, rank: int, device: torch.device | None = None) -> Tensor:
        """Index in the whole sequence of each slot of `rank`: int64 [S]; empty slots repeat the last index, L - 1."""
        return self._slots(self.start(rank), self.segment_length, device)

    def all_positions(self, device: torch.device | None = None) -> Tensor:
        """`positions` of all ranks in rank order: int64 [N * S]."""
        return self._slots(0, self.padded_length, device)

    def shard(self, whole: Tensor, rank: int, *, dim: int, fill: float) -> Tensor:
        """Cut the segment of `rank` out of a whole tensor, empty slots filled with `fill`.

        Args:
            whole: A tensor of L entries along `dim`.
            rank: The rank in the sequence group.
            dim: The sequence dimension.
            fill: The value of empty slots.

        Returns:
            The same tensor with S entries along `dim`.
        """
        if whole.size(dim) != self.length:
            raise LayoutError(
                f"a tensor of shape {tuple(whole.shape)} was cut along dim {dim}",
                allowed=f"size {self.length}, the length of the sequence, along that dim",
            )
        num_tokens = self.num_tokens(rank)
        segment = whole.narrow(dim, min(self.start(rank), self.length), num_tokens)
        if num_tokens == self.segment_length:
            return segment.contiguous()
        shape = list(segment.shape)
        shape[dim] = self.segment_length - num_tokens
        return torch.cat([segment, segment.new_full(shape, fill)], dim)

    def unshard(self, slots: Tensor, *, dim: int) -> Tensor:
        """Drop the empty slots from the concatenated segments of all ranks: N * S entries along `dim` become L."""
        return slots.narrow(dim, 0, self.length)

    def _slots(self, start: int, count: int, device: torch.device | None) -> Tensor:
        return torch.arange(start, start + count, device=device).clamp_(max=self.length - 1)
