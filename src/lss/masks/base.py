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

    def check(self, num_sequences: int, num_queries: int, num_keys: int) -> None:
        """Raise MaskError unless the mask is one of so many sequences, queries and keys."""

    def __and__(self, other: Mask) -> Mask:
        """Pairs of both."""
        return Both(self, other)

    def __or__(self, other: Mask) -> Mask:
        """Pairs of either."""
        return Either(self, other)


@dataclass(frozen=True)
class _Pair(Mask):
    """Two masks."""

    one: Mask
    other: Mask

    def __post_init__(self) -> None:
        for part in (self.one, self.other):
            require_mask(part)

    def check(self, num_sequences: int, num_queries: int, num_keys: int) -> None:
        """Both."""
        for part in (self.one, self.other):
            part.check(num_sequences, num_queries, num_keys)

    @property
    def num_rows(self) -> int:
        """Of either."""
        return _common("sequences", self.one.num_rows, self.other.num_rows)

    @property
    def num_heads(self) -> int:
        """Of either."""
        return _common("heads", self.one.num_heads, self.other.num_heads)

    def edges(self, row: int, span: Span, *, of_keys: bool) -> list[int]:
        """Of both."""
        found = (part.edges(row, span, of_keys=of_keys) for part in (self.one, self.other))
        return sorted({edge for edges in found for edge in edges})

    def _joined(self, row: int, queries: Span, keys: Span, decides: View, neutral: View) -> View:
        """One view of two, of which one decides alone and one leaves it to the other."""
        views = {part.view(row, queries, keys) for part in (self.one, self.other)}
        if decides in views:
            return decides
        left = views - {neutral}
        return left.pop() if len(left) == 1 else View.PARTIAL if left else neutral


class Both(_Pair):
    """Pairs of two masks at once: `one & other`."""

    def view(self, row: int, queries: Span, keys: Span) -> View:
        """Empty where one is."""
        return self._joined(row, queries, keys, View.EMPTY, View.FULL)

    def pairs(self, row: int, queries: Tensor, keys: Tensor) -> Tensor:
        """And."""
        return self.one.pairs(row, queries, keys) & self.other.pairs(row, queries, keys)


class Either(_Pair):
    """Pairs of one mask or another: `one | other`."""

    def view(self, row: int, queries: Span, keys: Span) -> View:
        """Full where one is."""
        return self._joined(row, queries, keys, View.FULL, View.EMPTY)

    def pairs(self, row: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Or."""
        return self.one.pairs(row, queries, keys) | self.other.pairs(row, queries, keys)


def _common(what: str, one: int, other: int) -> int:
    if one and other and one != other:
        raise MaskError(f"masks of {one} and of {other} {what}", allowed="one number of them")
    return one or other


def require_mask(given: object) -> None:
    """Raise MaskError unless it is a mask."""
    if not isinstance(given, Mask):
        name = given.__name__ if isinstance(given, type) else type(given).__name__
        raise MaskError(
            f"{name} as a mask",
            allowed="an object of lss.masks, such as Causal() or Causal() & Window(1023)",
            remedy="wrap a boolean tensor as lss.masks.Dense, a function of positions as lss.masks.Function",
        )


def require_sequences(what: str, number: int, num_sequences: int) -> None:
    """Raise MaskError unless a mask that says something of each sequence does so for all of them."""
    if number != num_sequences:
        raise MaskError(f"{what} of {number} sequences in a batch of {num_sequences}", allowed="one for each sequence")
