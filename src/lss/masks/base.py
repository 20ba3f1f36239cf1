"""What a mask is, and how two combine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from lss.documents import Span
from lss.errors import MaskError


class View(Enum):
    """What the queries of a block see of its keys."""

    EMPTY = "no query sees a key"
    FULL = "every query sees every key"
    CAUSAL = "queries and keys are the same tokens, and each sees itself and those before it"
    PARTIAL = "anything else"


class Mask:
    """The pairs of query and key that attention counts. Base class; combine masks with `&` and `|`."""

    @property
    def num_rows(self) -> int:
        """Sequences for which the mask says something each; 0 where it is the same for all."""
        return 0

    @property
    def num_heads(self) -> int:
        """Heads for which the mask says something each; 0 where it is the same for all."""
        return 0

    def view(self, row: int, queries: Span, keys: Span) -> View:
        """What queries [start, stop) of sequence `row` see of keys [start, stop). Reads no tensor of a device."""
        raise NotImplementedError

    def pairs(self, row: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Which of these queries see which of these keys: int64 [S] and [T] to bool [S, T], or [H, S, T]."""
        raise NotImplementedError

    def edges(self, row: int, span: Span, *, of_keys: bool) -> list[int]:
        """Positions inside of `span` where blocks are best cut: there another document begins, say."""
        return []

    def __and__(self, other: Mask) -> Mask:
        """Pairs of both."""
        return Both(self, other)

    def __or__(self, other: Mask) -> Mask:
        """Pairs of either."""
        return Either(self, other)


@dataclass(frozen=True)
class Both(Mask):
    """Pairs of two masks at once: `one & other`."""

    one: Mask
    other: Mask

    @property
    def num_rows(self) -> int:
        """Of either."""
        return _common("sequences", self.one.num_rows, self.other.num_rows)

    @property
    def num_heads(self) -> int:
        """Of either."""
        return _common("heads", self.one.num_heads, self.other.num_heads)

    def view(self, row: int, queries: Span, keys: Span) -> View:
        """Empty where one is."""
        views = self.one.view(row, queries, keys), self.other.view(row, queries, keys)
        if View.EMPTY in views:
            return View.EMPTY
        return views[0] if views[1] in (View.FULL, views[0]) else views[1] if views[0] is View.FULL else View.PARTIAL

    def pairs(self, row: int, queries: Tensor, keys: Tensor) -> Tensor:
        """And."""
        return self.one.pairs(row, queries, keys) & self.other.pairs(row, queries, keys)

    def edges(self, row: int, span: Span, *, of_keys: bool) -> list[int]:
        """Of both."""
        return _edges(self, row, span, of_keys)


@dataclass(frozen=True)
class Either(Mask):
    """Pairs of one mask or another: `one | other`."""

    one: Mask
    other: Mask

    @property
    def num_rows(self) -> int:
        """Of either."""
        return _common("sequences", self.one.num_rows, self.other.num_rows)

    @property
    def num_heads(self) -> int:
        """Of either."""
        return _common("heads", self.one.num_heads, self.other.num_heads)

    def view(self, row: int, queries: Span, keys: Span) -> View:
        """Full where one is."""
        views = self.one.view(row, queries, keys), self.other.view(row, queries, keys)
        if View.FULL in views:
            return View.FULL
        return views[0] if views[1] in (View.EMPTY, views[0]) else views[1] if views[0] is View.EMPTY else View.PARTIAL

    def pairs(self, row: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Or."""
        return self.one.pairs(row, queries, keys) | self.other.pairs(row, queries, keys)

    def edges(self, row: int, span: Span, *, of_keys: bool) -> list[int]:
        """Of both."""
        return _edges(self, row, span, of_keys)


def _edges(mask: Both | Either, row: int, span: Span, of_keys: bool) -> list[int]:
    found = (part.edges(row, span, of_keys=of_keys) for part in (mask.one, mask.other))
    return sorted({edge for edges in found for edge in edges})


def _common(what: str, one: int, other: int) -> int:
    if one and other and one != other:
        raise MaskError(f"masks of {one} and of {other} {what}", allowed="one number of them")
    return one or other
