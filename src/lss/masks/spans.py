"""Masks by spans of tokens: documents, prefix, padding."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lss.documents import Documents as Spans
from lss.documents import Span
from lss.errors import MaskError
from lss.masks.base import Mask, View, require_sequences


@dataclass(frozen=True)
class Documents(Mask):
    """A query sees the keys of its own document; padding, which no span holds, sees nothing and is not seen.

    Args:
        queries: Spans of each sequence, in order.
        keys: The same of the keys, where they are another sequence: document i of the queries sees document i of the
            keys. None where the two are one.
    """

    queries: Spans
    keys: Spans | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "queries", _spans_of(self.queries))
        if self.keys is not None:
            object.__setattr__(self, "keys", _spans_of(self.keys))
            if len(self.keys) != len(self.queries):
                raise MaskError(f"documents of {len(self.queries)} sequences of queries and {len(self.keys)} of keys")

    def check(self, num_sequences: int, num_queries: int, num_keys: int) -> None:
        """Spans end in the sequence."""
        require_sequences("documents", len(self.queries), num_sequences)
        _require_inside(self.queries, num_queries)
        _require_inside(self.keys or self.queries, num_keys)

    @cached_property
    def num_rows(self) -> int:
        """Number of sequences, or 0 where all are cut alike."""
        same = all(spans == self.queries[0] for spans in self.queries)
        same = same and (self.keys is None or all(spans == self.keys[0] for spans in self.keys))
        return 0 if same else len(self.queries)

    def view(self, row: int, queries: Span, keys: Span) -> View:
        """Full inside of a document, empty between two."""
        of_queries, of_keys = self._spans(row, of_keys=False), self._spans(row, of_keys=True)
        first, last = _touched(of_queries, queries)
        first_key, last_key = _touched(of_keys, keys)
        first, last = max(first, first_key), min(last, last_key)
        if first >= last:
            return View.EMPTY
        inside = _holds(of_queries[first], queries) and _holds(of_keys[first], keys)
        return View.FULL if inside else View.PARTIAL

    def pairs(self, row: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Same document."""
        number = _numbers(self._spans(row, of_keys=False), queries)
        other = _numbers(self._spans(row, of_keys=True), keys)
        return (number[:, None] == other) & (number >= 0)[:, None]

    def edges(self, row: int, span: Span, *, of_keys: bool) -> list[int]:
        """Where documents begin and end."""
        spans = self._spans(row, of_keys=of_keys)
        first, last = _touched(spans, span)
        found = {edge for document in spans[first:last] for edge in document}
        return sorted(edge for edge in found if span[0] < edge < span[1])

    def _spans(self, row: int, *, of_keys: bool) -> tuple[Span, ...]:
        return (self.keys if of_keys and self.keys is not None else self.queries)[row]


@dataclass(frozen=True)
class Prefix(Mask):
    """Everybody sees the first keys of the sequence; `Causal() | Prefix(n)` is a prefix language model.

    Args:
        length: Number of those keys, for all sequences, or one number a sequence.
    """

    length: int | tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.length, int):
            object.__setattr__(self, "length", tuple(self.length))

    def check(self, num_sequences: int, num_queries: int, num_keys: int) -> None:
        """One number a sequence, or one for all."""
        if not isinstance(self.length, int):
            require_sequences("prefixes", len(self.length), num_sequences)

    @property
    def num_rows(self) -> int:
        """Number of sequences, or 0."""
        return 0 if isinstance(self.length, int) else len(self.length)

    def view(self, row: int, queries: Span, keys: Span) -> View:
        """Full before the end of the prefix, empty behind it."""
        length = self._length(row)
        return View.FULL if keys[1] <= length else View.EMPTY if keys[0] >= length else View.PARTIAL

    def pairs(self, row: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Key in the prefix."""
        return (keys < self._length(row)).expand(len(queries), -1)

    def edges(self, row: int, span: Span, *, of_keys: bool) -> list[int]:
        """The end of the prefix."""
        return [self._length(row)] if of_keys and span[0] < self._length(row) < span[1] else []

    def _length(self, row: int) -> int:
        return self.length if isinstance(self.length, int) else self.length[row]


@dataclass(frozen=True)
class Padding(Mask):
    """Nobody sees the keys of padding; what its queries see is as the other masks say.

    Args:
        spans: Real keys of each sequence, as spans; `Padding.of(mask)` takes a mask.
    """

    spans: Spans

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", _spans_of(self.spans))

    def check(self, num_sequences: int, num_queries: int, num_keys: int) -> None:
        """Spans end in the sequence."""
        require_sequences("padding", len(self.spans), num_sequences)
        _require_inside(self.spans, num_keys)

    @classmethod
    def of(cls, mask: Tensor) -> Padding:
        """From a mask [B, L] that is nonzero (or True) on real keys, wherever they are."""
        if mask.dim() != 2:
            raise MaskError(f"a padding mask of shape {tuple(mask.shape)}", allowed="[B, L]")
        rows = []
        for row in mask.bool().cpu().int():
            change = torch.diff(row, prepend=row.new_zeros(1), append=row.new_zeros(1)).nonzero().flatten().tolist()
            rows.append(tuple(zip(change[::2], change[1::2], strict=True)))
        return cls(tuple(rows))

    @cached_property
    def num_rows(self) -> int:
        """Number of sequences, or 0 where all are padded alike."""
        return 0 if all(spans == self.spans[0] for spans in self.spans) else len(self.spans)

    def view(self, row: int, queries: Span, keys: Span) -> View:
        """Full in real keys, empty in padding."""
        first, last = _touched(self.spans[row], keys)
        if first >= last:
            return View.EMPTY
        return View.FULL if _holds(self.spans[row][first], keys) else View.PARTIAL

    def pairs(self, row: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Key is real."""
        return (_numbers(self.spans[row], keys) >= 0).expand(len(queries), -1)

    def edges(self, row: int, span: Span, *, of_keys: bool) -> list[int]:
        """Where padding begins and ends."""
        if not of_keys:
            return []
        first, last = _touched(self.spans[row], span)
        return sorted(edge for document in self.spans[row][first:last] for edge in document if span[0] < edge < span[1])


def _spans_of(given: Iterable[Iterable[Iterable[int]]]) -> Spans:
    """As tuples; in order, none over another."""
    found = tuple(tuple((int(start), int(stop)) for start, stop in row) for row in given)
    for row in found:
        edges = [edge for span in row for edge in span]
        if edges != sorted(edges) or any(start < 0 or start >= stop for start, stop in row):
            raise MaskError(f"spans {row}", allowed="spans (start, stop) of tokens, in order, none over another")
    if not found:
        raise MaskError("spans of no sequence", allowed="spans for each sequence of the batch")
    return found


def _require_inside(spans: Spans, length: int) -> None:
    last = max((row[-1][1] for row in spans if row), default=0)
    if last > length:
        raise MaskError(f"spans up to {last} in sequences of {length} tokens", allowed=f"spans up to {length}")


def _touched(spans: tuple[Span, ...], span: Span) -> tuple[int, int]:
    """Numbers [first, last) of the spans that share a token with `span`."""
    first = bisect_right(spans, span[0], key=lambda document: document[1])
    last = bisect_left(spans, span[1], key=lambda document: document[0])
    return first, last


def _holds(outer: Span, inner: Span) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _numbers(spans: tuple[Span, ...], positions: Tensor) -> Tensor:
    """Number of the span that holds each position, or -1."""
    if not spans:
        return torch.full_like(positions, -1)
    starts, stops = torch.tensor(spans, device=positions.device).T.contiguous()
    number = torch.searchsorted(starts, positions, right=True) - 1
    held = (number >= 0) & (positions < stops[number.clamp(min=0)])
    return number.masked_fill(~held, -1)
