"""One length, all ways: what each rank does. They take turns, so that a machine that slows down slows all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from lss.batch import shard
from lss.bench.jobs import Measured
from lss.bench.measure import peak_bytes, seconds
from lss.bench.run import Ranks
from lss.compare.way import Way
from lss.config import Config
from lss.context import context_of
from lss.errors import LssError
from lss.gradients import average_gradients
from lss.losses import count_tokens, token_mean_cross_entropy
from lss.models import GPT
from lss.state import full_gradients
from lss.train.metrics import Display
from lss.train.model import prepare
from lss.train.optim import make_optimizer
from lss.train.update import update


@dataclass
class Entrant:
    """A way that takes part, on this rank.

    Args:
        way: The way.
        config: Of its run.
        job: A training step; None where this rank has no part in it.
        batch: Its segment of the batch.
        seconds: Of each step, until the slowest rank was done.
        cpu_seconds: The same of the processor, of the rank that took most.
        waited: Of the seconds, in collectives, on the rank that waited longest.
    """

    way: Way
    config: Config
    job: Measured | None
    batch: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Contest:
    """A length at which ways are compared.

    Args:
        preset: Whose step it is.
        length: Tokens of a sequence.
        batch: Sequences.
        repeats: Steps of each way, after one to warm up.
        mesh: Of all ranks.
        ranks: The same, as they meet.
    """

    preset: str
    length: int
    batch: int
    repeats: int
    mesh: DeviceMesh
    ranks: Ranks

    @property
    def units(self) -> int:
        """Of work, of each way: to look at it, and its steps."""
        return self.repeats + 2

    def run(self, ways: Sequence[Way], progress: Display) -> list[dict[str, Any]]:
        """A row a way, in the order in which they were given; the same on every rank.

        Args:
            ways: What is compared.
            progress: Told of each unit of work.
        """
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(256, (self.batch, self.length), generator=generator).to(self.ranks.device)
        expected = self._serial_gradients(tokens) if self.ranks.axis.rank == 0 else {}
        rows = [self.about(way) for way in ways]
        entrants: list[tuple[Entrant, dict[str, Any]]] = []
        for way, row in zip(ways, rows, strict=True):
            entrant = self._enter(way, tokens)
            if isinstance(entrant, str):
                row["refused"] = entrant
                for _ in range(self.units):
                    progress.advance()
                continue
            row |= {"difference": self._difference(entrant, expected), **self._examined(entrant)}
            entrants.append((entrant, row))
            progress.advance(f"{self.length:,} tokens, {way.name}: {row['peak_bytes'] / 1e6:,.0f} MB")
        for repeat in range(self.repeats + 1):
            for entrant, _ in entrants:
                spent = self._step(entrant, is_counted=repeat > 0)  # the first warms up
                progress.advance(f"{self.length:,} tokens, {entrant.way.name}: {spent:.3f} s")
        for entrant, row in entrants:
            row |= self._times(entrant)
        return rows

    def about(self, way: Way) -> dict[str, Any]:
        """What it is that a way runs."""
        ranks = way.num_ranks(self.ranks.axis.size)
        return {"strategy": way.name, "preset": self.preset, "length": self.length, "batch": self.batch, "ranks": ranks}

    def _enter(self, way: Way, tokens: Tensor) -> Entrant | str:
        """The model made ready; or why the strategy does not take it, alike on all ranks."""
        config = way.config(self.preset, self.length, self.batch, self.ranks.axis.size, self.ranks.device.type)
        if way.strategy == "serial" and self.ranks.axis.rank > 0:
            return Entrant(way, config, None, {})
        mesh = None if way.strategy == "serial" else self.mesh
        try:
            model = prepare(self._model(config), mesh, config)
            batch = shard({"tokens": tokens, "labels": tokens}, mesh, shift_labels=1, layout=config.attention.layout)
            model(batch["tokens"], segment=batch["segment"])  # some refuse only what they are given
        except LssError as error:
            return str(error).splitlines()[0]
        optimizer, _ = make_optimizer(model, config.train, foreach=self.ranks.device.type == "cuda")

        def step() -> None:
            update(model, optimizer, [batch], config.train)

        return Entrant(way, config, Measured(step, context_of(model).ledger, model, optimizer), batch)

    def _model(self, config: Config) -> GPT:
        torch.manual_seed(0)
        return GPT(config.gpt()).to(self.ranks.device)

    def _serial_gradients(self, tokens: Tensor) -> dict[str, Tensor]:
        """By plain torch."""
        torch.set_num_threads(os.cpu_count() or 1)
        model = self._model(Way.of("serial").config(self.preset, self.length, self.batch, 1, self.ranks.device.type))
        F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}

    def _difference(self, entrant: Entrant, expected: dict[str, Tensor]) -> float:
        """Largest deviation of a gradient from plain torch's, as a share of the largest entry of that gradient."""
        self._take_turn(entrant)
        found = 0.0
        if entrant.job and entrant.job.model:
            model, batch = entrant.job.model, entrant.batch
            logits = model(batch["tokens"], segment=batch["segment"])
            count = count_tokens(model, batch["labels"])
            token_mean_cross_entropy(logits, batch["labels"], count).backward()
            average_gradients(model)
            gradients = full_gradients(model)
            found = max((_deviation(gradients[name], one) for name, one in expected.items()), default=0.0)
            model.zero_grad()
        return float(self.ranks.each(found).max())

    def _examined(self, entrant: Entrant) -> dict[str, Any]:
        """Bytes and messages of a step."""
        self._step(entrant, is_counted=False)  # from the second step on there are the states of the optimizer
        self._take_turn(entrant)
        job, layers = entrant.job, entrant.config.gpt().layers
        peak = self.ranks.each(peak_bytes(job) if job else 0.0).max()
        sent = [job.ledger.total(axis="sequence", phase=phase) if job else (0, 0) for phase in ("forward", "backward")]
        count, size = (sum(numbers) / layers for numbers in zip(*sent, strict=True))
        return {
            "peak_bytes": int(peak),
            "collectives_a_layer": float(self.ranks.each(count).max()),
            "bytes_a_layer": float(self.ranks.each(size).max()),
        }

    def _take_turn(self, entrant: Entrant) -> None:
        """All ranks are here, and the cores are those of this way's ranks."""
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // entrant.config.parallel.sequence))
        self.ranks.each(0.0)
        if entrant.job:
            entrant.job.ledger.clear()

    def _step(self, entrant: Entrant, *, is_counted: bool) -> float:
        """Seconds until the slowest rank was done."""
        self._take_turn(entrant)
        job, before = entrant.job, time.process_time()
        spent = seconds(job.run, self.ranks.device) if job else 0.0
        of_processor = time.process_time() - before if job else 0.0
        waited = job.ledger.waited if job else 0.0
        totals = [float(self.ranks.each(value).max()) for value in (spent, of_processor, waited)]
        if is_counted:
            for values, total in zip((entrant.seconds, entrant.cpu_seconds, entrant.waited), totals, strict=True):
                values.append(total)
        return totals[0]

    def _times(self, entrant: Entrant) -> dict[str, Any]:
        best = min(entrant.seconds)
        return {
            "seconds_min": best,
            "seconds_median": median(entrant.seconds),
            "cpu_seconds": min(entrant.cpu_seconds),
            "tokens_per_second": self.batch * self.length / best,
            "waited_seconds": min(entrant.waited),
            "repeats": self.repeats,
        }


def _deviation(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
