"""How keys and values travel to the ranks that need them, and their gradients back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lss.attention.plan import Chunk
from lss.collectives import Axis

Wait = Callable[[], Tensor]


@dataclass
class Transport(ABC):
    """One call's messages, in forward or in backward. Each is [S, B, ...] of this rank's tokens.

    Args:
        chunks: What arrives, in order.
        axis: The sequence axis.
        layer: Its name, for the ledger.
        phase: `forward` or `backward`.
    """

    chunks: tuple[Chunk, ...]
    axis: Axis
    layer: str
    phase: str

    @abstractmethod
    def arriving(self, messages: list[Tensor]) -> Iterator[tuple[Chunk, list[Tensor]]]:
        """Each chunk as it arrives; the first is on its way at once, the next ones while one is computed."""

    @abstractmethod
    def send_back(self, gradients: list[Tensor]) -> None:
        """Send the gradients of the chunk that came last to whoever sent it."""

    @abstractmethod
    def received_back(self) -> list[Tensor]:
        """Gradients of this rank's messages, of all ranks; empty where nothing was sent."""


@dataclass
class Gathered(Transport):
    """The paper's: an all-gather a chunk forward, a reduce-scatter back; at most one of each is on its way.

    A chunk is the slots [start, stop) of every rank's segment.
    """

    parts: list[list[Tensor]] = field(default_factory=list)  # of each chunk, a gradient [S / c, B, ...] of each message
    pending: list[Wait] = field(default_factory=list)

    def arriving(self, messages: list[Tensor]) -> Iterator[tuple[Chunk, list[Tensor]]]:
        """What a chunk brings is [N * (stop - start), B, ...], in rank order."""
        first = [self._gather(self.chunks[0], messages)] if self.chunks else []
        return self._arriving(first, messages)

    def send_back(self, gradients: list[Tensor]) -> None:
        """[N * (stop - start), B, ...] each."""
        self._receive()
        begin = self.axis.start_reduce_scatter
        self.pending = [begin(gradient, layer=self.layer, phase=self.phase) for gradient in gradients]

    def received_back(self) -> list[Tensor]:
        """Of all chunks."""
        self._receive()
        return [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*self.parts, strict=True)]

    def _arriving(self, pending: list[list[Wait]], messages: list[Tensor]) -> Iterator[tuple[Chunk, list[Tensor]]]:
        for index, chunk in enumerate(self.chunks):
            waits = pending.pop()
            for following in self.chunks[index + 1 : index + 2]:
                pending.append(self._gather(following, messages))
            yield chunk, [wait() for wait in waits]

    def _gather(self, chunk: Chunk, messages: list[Tensor]) -> list[Wait]:
        parts = (message[chunk.start : chunk.stop] for message in messages)
        return [self.axis.start_all_gather(part, layer=self.layer, phase=self.phase) for part in parts]

    def _receive(self) -> None:
        if self.pending:
            self.parts.append([wait() for wait in self.pending])
            self.pending = []


@dataclass
class Passed(Transport):
    """Ring attention (Li et al., 2021; Liu et al., 2023): every rank hands on to the next what it had last.

    N - 1 sends bring the segments of all ranks, the nearest before this one first. Their gradients follow them, each
    rank adding its own, and come home with the N-1st send. A chunk is the whole segment of one rank.
    """

    pending: Callable[[], list[Tensor]] | None = None

    def arriving(self, messages: list[Tensor]) -> Iterator[tuple[Chunk, list[Tensor]]]:
        """What a step brings is [S, B, ...], of another rank."""
        return self._arriving(self._pass_on(messages)) if self.chunks else iter(())

    def send_back(self, gradients: list[Tensor]) -> None:
        """[S, B, ...] each, together with those that came from the ranks before."""
        for gradient, before in zip(gradients, self.received_back(), strict=False):
            gradient += before
        self.pending = self._pass_on(gradients)

    def received_back(self) -> list[Tensor]:
        """What the rank before handed on last."""
        return self.pending() if self.pending else []

    def _arriving(self, wait: Callable[[], list[Tensor]]) -> Iterator[tuple[Chunk, list[Tensor]]]:
        for index, chunk in enumerate(self.chunks):
            held = wait()
            if index + 1 < len(self.chunks):
                wait = self._pass_on(held)
            yield chunk, held

    def _pass_on(self, held: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Send to the next rank and receive as much from the one before."""
        axis, sent = self.axis, [tensor.contiguous() for tensor in held]
        received = [torch.empty_like(tensor) for tensor in sent]
        following, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
        to, of = [(tensor, following) for tensor in sent], [(tensor, before) for tensor in received]
        wait = axis.start_send(to, of, layer=self.layer, phase=self.phase)
        return lambda: wait() or received
