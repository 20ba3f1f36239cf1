"""Which windows of the data make a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lss.batch import IGNORE_INDEX
from lss.data.sources import Bytes
from lss.errors import DataError


@dataclass(frozen=True)
class Window:
    """Bytes [start, stop) of a split as inputs; each is to predict the byte behind it."""

    start: int
    stop: int


@dataclass(frozen=True)
class Sampler:
    """Random training sequences. The whole state is the step: the batch of a step depends on nothing else.

    The split is cut into as many strata as there are sequences in a step; each sequence starts at a random place of
    its own stratum, so that no two of a step start at one place as long as there are enough places.

    Args:
        data: The training split.
        length: L, tokens of a sequence.
        num_sequences: Sequences of a step over all data groups.
        seed: Of the draws.

    Raises:
        DataError: The split is shorter than one sequence and the byte behind it.
    """

    data: Bytes
    length: int
    num_sequences: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.data) < self.length + 1:
            raise DataError(
                f"the training split holds {len(self.data)} bytes, and a sequence of {self.length} needs "
                f"{self.length + 1}",
                allowed=f"data.length of at most {max(0, len(self.data) - 1)}",
                remedy="take a shorter data.length or more data",
            )

    def windows(self, step: int) -> list[Window]:
        """The windows of a step, in the order of its sequences."""
        draws = np.random.Generator(np.random.Philox(key=(self.seed, step)))
        strata = draws.permutation(self.num_sequences)
        edges = np.arange(self.num_sequences + 1) * (len(self.data) - self.length) // self.num_sequences
        offsets = np.floor(draws.random(self.num_sequences) * (edges[strata + 1] - edges[strata])).astype(np.int64)
        return [Window(start, start + self.length) for start in (edges[strata] + offsets).tolist()]

    def batch(self, step: int, chosen: slice) -> dict[str, Tensor]:
        """`tokens` and `labels`, int64 [B, L], of the chosen sequences of a step."""
        return read(self.data, self.windows(step)[chosen], self.length)


def windows(data: Bytes, length: int, limit: int = 0) -> list[Window]:
    """Windows that predict every byte of a split but its first, once; or `limit` of them, evenly spaced.

    The last window may be shorter.

    Raises:
        DataError: The split has fewer than two bytes.
    """
    last = len(data) - 1
    if last < 1:
        raise DataError(f"an evaluation split of {len(data)} bytes", allowed="at least 2", remedy="take more data")
    starts = range(0, last, length)
    if limit and limit < len(starts):
        starts_chosen: Sequence[int] = [starts[index * len(starts) // limit] for index in range(limit)]
    else:
        starts_chosen = starts
    return [Window(start, min(start + length, last)) for start in starts_chosen]


def batches(chosen: Sequence[Window], num_groups: int, group: int, size: int) -> Iterator[list[Window]]:
    """The windows of one data group, `size` at a time; empty windows fill up, so that all groups do the same."""
    for first in range(0, len(chosen), num_groups * size):
        batch = list(chosen[first + group * size : first + (group + 1) * size])
        yield batch + [Window(0, 0)] * (size - len(batch))


def read(data: Bytes, chosen: Sequence[Window], length: int) -> dict[str, Tensor]:
    """`tokens` and `labels`, int64 [B, L]; shorter windows are filled with 0 and labels that are ignored."""
    tokens = torch.zeros(len(chosen), length, dtype=torch.int64)
    labels = torch.full((len(chosen), length), IGNORE_INDEX)
    for row, window in enumerate(chosen):
        size = window.stop - window.start
        text = torch.from_numpy(data[window.start : window.stop + 1].astype(np.int64))
        tokens[row, :size], labels[row, :size] = text[:-1], text[1:]
    return {"tokens": tokens, "labels": labels}
