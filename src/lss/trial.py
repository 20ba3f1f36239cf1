"""A few tokens of a segment, on which a model's code is tried before its first call, and what it makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lss.layout import Layout, Piece
from lss.segment import Segment, Whole


@dataclass(frozen=True)
class TrialLayout(Layout):
    """Some tokens of one rank as if they were all of its segment.

    Args:
        length: As the layout's that it is made of.
        spans: The same.
        rank: The rank.
        slots: Of the rank's segment; a slot may stand there twice.
    """

    rank: int = 0
    slots: tuple[int, ...] = ()

    @property
    def segment_length(self) -> int:
        """Tokens of the trial."""
        return len(self.slots)

    def num_tokens(self, rank: int) -> int:
        """All of them are real."""
        return len(self.slots)

    def positions(self, rank: int, device: torch.device | None = None) -> Tensor:
        """Index in the whole sequence of each of them: int64."""
        real = Layout(self.length, self.spans)
        return real.positions(self.rank)[list(self.slots)].to(device)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """One for each."""
        found = self.positions(rank).tolist()
        return tuple(Piece(slot, position, position + 1) for slot, position in enumerate(found))

    def shard(self, whole: Tensor, rank: int, *, dim: int, fill: float | None) -> Tensor:
        """The tokens of the trial, out of a whole tensor."""
        return whole.index_select(dim, self.positions(rank, whole.device))


@dataclass
class Trial:
    """What stands in for other ranks, and what the code of a model came to.

    Args:
        rank: Of the sequence group.
        num_ranks: N.
        half: Tokens of half a trial, of which either half has others, if there are as many.
        tokens: Those that are tried together.
        looks_into: The module of which what each function gives that it calls is noted too.
        seen: Tensors that modules were given or returned, and that attention was given, in order: by the module whose
            code made them, what they are, and how many such there were before.
        running: Names of the modules that are running.
    """

    rank: int
    num_ranks: int
    half: int
    tokens: range
    looks_into: str | None = None
    seen: dict[tuple[str, str, int], Tensor] = field(default_factory=dict)
    running: list[str] = field(default_factory=lambda: [""])
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    def slots(self, layout: Layout) -> tuple[int, ...]:
        """Those of the rank's segment that are tried."""
        number = max(1, layout.num_tokens(self.rank))
        middle = min(self.half, number // 2)
        return tuple(
            middle + (token - self.half) % (number - middle) if token >= self.half else token % max(1, middle)
            for token in self.tokens
        )

    def layout(self, layout: Layout) -> TrialLayout:
        """Of the tokens of the trial, in the place of that of whole segments."""
        return TrialLayout(layout.length, layout.spans, self.rank, self.slots(layout))

    def segment(self, batch: Segment | Whole) -> Segment | Whole:
        """A batch of which the rank has the tokens of the trial."""
        if isinstance(batch, Whole):
            return batch
        source = None if batch.source is None else self.segment(batch.source)
        return replace(batch, layout=self.layout(batch.layout), source=source)

    def note(self, what: str, values: Any) -> None:
        """Keep floating tensors of what the running module's code made; of integers what becomes of them tells."""
        if isinstance(values, Tensor):
            if not (values.is_floating_point() or values.is_complex()):
                return
            place = (self.running[-1], what)
            self.seen[(*place, self._counts[place])] = torch.view_as_real(values) if values.is_complex() else values
            self._counts[place] += 1
        elif isinstance(values, Mapping):
            self.note(what, list(values.values()))
        elif isinstance(values, tuple | list):
            for value in values:
                self.note(what, value)

    def note_call(self, function: str, result: Any) -> None:
        """Keep what a function gives, if it is to be looked at."""
        if self.running[-1] == self.looks_into:
            self.note(f"calls {function}, which gives", result)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What stands in for attention: a function of each token alone.

        Args:
            query: [B, H, S, D].
            key: [B, K, T, D].
            value: [B, K, T, E].

        Returns:
            [B, H, S, E].
        """
        self.note("gives attention", (query, key, value))
        if key.size(2) == query.size(2):
            return value.repeat_interleave(query.size(1) // value.size(1), 1)
        return query.mean(-1, keepdim=True).expand(*query.shape[:3], value.size(-1))
