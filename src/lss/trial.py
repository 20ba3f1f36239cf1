"""A few tokens of a segment, on which a model's code is tried before its first call, and what it makes of them."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lss.layout import Layout, Piece
from lss.segment import Segment, Whole

# The module whose code made something, what it is, and how many such there were before.
Place = tuple[str, str, int]
RANDOM, RETURNS, KEEPS = "draws random numbers by", "returns", "keeps"


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
        halves: Tokens of the first half of the trial, and of the second: other ones, if the segment has as many.
        tokens: Those of both halves that are tried together, as numbers.
        notes: What the model's code made, in order: a tensor, and how often it had been changed in place.
        running: Names of the modules that are running.
        counts: How many notes there are of each kind.
        tokens_differ: Whether the tokens are not all the same.
    """

    rank: int
    num_ranks: int
    halves: tuple[int, int]
    tokens: range
    notes: dict[Place, tuple[Tensor, int]] = field(default_factory=dict)
    running: list[str] = field(default_factory=lambda: [""])
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    tokens_differ: bool = True
    _random: list[Tensor] = field(default_factory=list)
    _others: tuple[Any, ...] = ()
    _is_low: bool = False

    def slots(self, layout: Layout) -> tuple[int, ...]:
        """Those of the rank's segment that are tried."""
        number, first = max(1, layout.num_tokens(self.rank)), self.halves[0]
        middle = first if number >= sum(self.halves) else number // 2
        return tuple(
            token % max(1, middle) if token < first else middle + (token - first) % (number - middle)
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

    def seed(self) -> None:
        """Have random numbers be other ones than in trials of other tokens."""
        torch.default_generator.manual_seed(len(self.tokens))
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(len(self.tokens))
        self._random, self._others = _random_states(), _other_states()
        self._is_low = len(self.tokens) == sum(self.halves)

    def note(self, what: str, values: Any, *, integers: bool = False, by: str | None = None) -> None:
        """Keep the tensors of what a module's code made, the running one's; of integers what becomes of them tells."""
        for part in tensors_in(values):
            if not _is_plain(part) or not (part.is_floating_point() or part.is_complex() or integers):
                continue
            place = (self.running[-1] if by is None else by, what)
            part = torch.view_as_real(part) if part.is_complex() else part
            self.notes[(*place, self.counts[place])] = part, version_of(part)
            self.counts[place] += 1

    def note_call(self, function: str, result: Any) -> None:
        """Keep what a function gives; and say so if it has drawn numbers for it.

        A single number is often drawn in vain. It is made nearly 0 or nearly 1 in turns, the other way round for the
        halves of the tokens than for all of them, so that what becomes of it tells.
        """
        before, self._random = self._random, _random_states()
        has_drawn = not all(map(torch.equal, before, self._random))
        if has_drawn and any(part.numel() > 1 for part in tensors_in(result)):
            self.note(f"{RANDOM} {function}, which gives", result, integers=True)
        elif has_drawn:
            self._is_low = not self._is_low
            for part in tensors_in(result):
                if part.is_floating_point():
                    part.fill_(2**-24 if self._is_low else 1 - 2**-8)
        elif function.startswith(("empty", "new_empty")):
            for part in tensors_in(result):
                part.zero_()  # else it is whatever was there
        else:
            self.note(f"calls {function}, which gives", result)

    def note_draws(self) -> None:
        """Say so if the running module's code has drawn numbers that are not torch's."""
        before, self._others = self._others, _other_states()
        if self._others != before:
            self.note(f"{RANDOM} random or numpy, which gives", torch.zeros(()))

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

    def join(self, tokens: Tensor, length: int, dim: int) -> Tensor:
        """What stands in for whole sequences behind layers that cut them: the same in all trials."""
        shape = [length if index == dim else size for index, size in enumerate(tokens.shape)]
        numbers = torch.Generator(tokens.device).manual_seed(0)
        return torch.randn(shape, generator=numbers, device=tokens.device).to(tokens.dtype)


def _random_states() -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def _other_states() -> tuple[Any, ...]:
    return random.getstate(), pickle.dumps(np.random.get_state())


def _is_plain(tensor: Tensor) -> bool:
    """Whether it may hold values of tokens: weights do not, and what is sparse, or of a transform, cannot be read."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return type(tensor) is Tensor and tensor.layout is torch.strided and not is_wrapped


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Every tensor in what a function was given or returned."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from tensors_in(list(values.values()))
    elif isinstance(values, tuple | list):
        for value in values:
            yield from tensors_in(value)
    elif is_dataclass(values) and not isinstance(values, type):
        yield from tensors_in([getattr(values, part.name) for part in fields(values)])


def is_as_noted(tensor: Tensor, version: int) -> bool:
    """Whether it has not been changed since, nor its memory freed, as `fully_shard` does with whole weights."""
    return version_of(tensor) == version and not (tensor.numel() and tensor.untyped_storage().size() == 0)


def version_of(tensor: Tensor) -> int:
    """How often it was changed in place."""
    return 0 if tensor.is_inference() else tensor._version
