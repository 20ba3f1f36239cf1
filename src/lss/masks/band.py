"""Masks by distance: full, causal, window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lss.documents import Span
from lss.errors import MaskError
from lss.masks.base import Mask, View


@dataclass(frozen=True)
class Full(Mask):
    """Everybody sees everybody."""

    def view(self, row: int, queries: Span, keys: Span) -> View:
        """Full."""
        return View.FULL

    def pairs(self, row: int, queries: Tensor, keys: Tensor) -> Tensor:
        """All."""
        return torch.ones(len(queries), len(keys), dtype=torch.bool, device=queries.device)


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees itself and the keys before it.

    Args:
        offset: Added to a query's position. L_key - L_query aligns the last query with the last key, where the two
            differ in number; 0 aligns the first ones, as torch's `is_causal` does.
    """

    offset: int = 0

    def view(self, row: int, queries: Span, keys: Span) -> View:
        """Empty above the diagonal, full below."""
        if self.offset == 0 and queries == keys and queries[1] - queries[0] > 1:
            return View.CAUSAL
        return _of_distances(queries, keys, -self.offset, None)

    def pairs(self, row: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Key at most query."""
        return keys <= queries[:, None] + self.offset


@dataclass(frozen=True)
class Window(Mask):
    """A query sees the keys near it: `left` before it and `right` behind it, and itself.

    Args:
        left: Keys before; None for all.
        right: Keys behind; 0 for none, as in a causal model; None for all.
    """

    left: int | None
    right: int | None = 0

    def __post_init__(self) -> None:
        if any(side is not None and side < 0 for side in (self.left, self.right)):
            raise MaskError(f"a window of {self.left} and {self.right} keys", allowed="at least 0, or None, a side")

    def view(self, row: int, queries: Span, keys: Span) -> View:
        """Full inside of the band, empty outside."""
        size = queries[1] - queries[0]
        if queries == keys and self.right == 0 and size > 1 and (self.left is None or size <= self.left + 1):
            return View.CAUSAL
        return _of_distances(queries, keys, None if self.right is None else -self.right, self.left)

    def pairs(self, row: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Distance within the window."""
        distance = queries[:, None] - keys
        seen = torch.ones_like(distance, dtype=torch.bool)
        seen = seen if self.left is None else seen & (distance <= self.left)
        return seen if self.right is None else seen & (-distance <= self.right)


def _of_distances(queries: Span, keys: Span, least: int | None, most: int | None) -> View:
    """View of pairs whose distance, query minus key, is from `least` to `most`; None has no end."""
    nearest, farthest = queries[0] - (keys[1] - 1), queries[1] - 1 - keys[0]
    if (least is not None and farthest < least) or (most is not None and nearest > most):
        return View.EMPTY
    inside = (least is None or nearest >= least) and (most is None or farthest <= most)
    return View.FULL if inside else View.PARTIAL
