"""What the parts of one parallelized model share: its axes and the segment that it is working on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lss.batch import Segment
from lss.collectives import Axis
from lss.compiled import eager
from lss.errors import LayoutError, ModelError
from lss.layout import Layout
from lss.ledger import Ledger

_ATTRIBUTE = "lss_context"


@dataclass
class SequenceContext:
    """Axes, ledger and present segment of a parallelized model.

    Args:
        sequence: The axis over which sequences are cut.
        data: The axis over which batches are cut.
        seed: Keys the dropout, with the step.
        ledger: Counts the collectives of both axes.
        segment: Of the present batch.
        step: Of the present call.
        num_calls: Calls of the model so far.
        num_trained: Those in training.
        is_running: Whether such a call is going on.
        is_averaged: Whether the gradients of the last backward are; None before any.
        num_parameters: Parameters of the model, and numbers in them.
        choices: How each attention layer is computed, in a line for people.
    """

    sequence: Axis
    data: Axis
    seed: int
    ledger: Ledger
    segment: Segment | None = None
    step: int = 0
    num_calls: int = 0
    num_trained: int = 0
    is_running: bool = False
    is_averaged: bool | None = None
    num_parameters: tuple[int, int] = (0, 0)
    choices: dict[str, str] = field(default_factory=dict)

    def begin(self, segment: Segment | None, *, training: bool) -> None:
        """Take up the segment of a batch that enters the model; None is refused.

        Args:
            segment: What `shard` returned with the batch.
            training: Whether the model is in training, whose calls count as steps where the segment names none.
        """
        self.segment, self.is_running = segment, True
        segment = self.present
        if segment.layout.num_ranks != self.sequence.size:
            raise LayoutError(
                f"a batch cut for {segment.layout.num_ranks} ranks in a model parallelized over {self.sequence.size}",
                remedy="give lss.shard and lss.parallelize the same mesh",
            )
        if in_backward():
            return  # a recomputation: `resume` has set the step of its call
        self.step = self.num_trained if segment.step is None else segment.step
        self.num_trained += training
        if self.num_calls == 0 and segment.checksum is not None:
            self._require_one_batch(segment.checksum)
        self.num_calls += 1

    def _require_one_batch(self, checksum: Tensor) -> None:
        """Raise LayoutError unless all ranks of the sequence group cut the same batch; looked at once, at first."""
        found = self.sequence.all_gather(checksum.reshape(1), layer="batch", phase="setup")
        if (found != found[0]).any():
            raise LayoutError(
                "ranks of one sequence group were given different batches",
                allowed="the same whole sequences on every rank of a sequence group; other ones in other data groups",
                remedy="seed the data by mesh.get_local_rank('data'), not by rank",
            )

    def end(self) -> None:
        """The model's call is over: its parts cannot be called apart, as they would take up the wrong segment."""
        self.is_running = False

    def watch(self, outputs: Any) -> None:
        """Have backward through the outputs of a module take up the present call again, as recomputation needs it.

        Other calls may have come between a call and its backward: further micro-batches, or an evaluation.
        """
        if isinstance(outputs, Tensor):
            if outputs.requires_grad and not in_backward():
                outputs.register_hook(partial(self._resume, self.last, self.step))
        elif isinstance(outputs, Mapping):
            self.watch(tuple(outputs.values()))
        elif isinstance(outputs, tuple | list):
            for part in outputs:
                self.watch(part)

    def _resume(self, segment: Segment, step: int, gradient: Tensor) -> None:
        self.segment, self.step, self.is_averaged = segment, step, False

    def require_averaged(self, wanted: bool) -> None:
        """Raise ModelError if gradients are averaged twice, or used before they are."""
        if self.sequence.size * self.data.size == 1 or self.is_averaged in (None, wanted):
            return
        raise ModelError(
            "gradients that are not averaged yet" if wanted else "gradients that are averaged already",
            allowed="lss.average_gradients(model) once a step, after the last backward and before norm and optimizer",
        )

    def chosen(self) -> dict[str, int]:
        """How attention is computed, for people, and in how many layers."""
        return dict(Counter(self.choices.values()))

    @property
    def layout(self) -> Layout:
        """The layout of the last batch."""
        return self.last.layout

    @property
    def present(self) -> Segment:
        """The segment of the present batch.

        Raises:
            LayoutError: The model was called without one, or a part of it apart from the model.
        """
        segment = self.last
        if not self.is_running and not in_backward():
            raise LayoutError(
                "a part of the parallelized model was called apart from it",
                allowed="calls of the model itself, which is told the segment of its batch",
                remedy="call what you need in the model's forward",
            )
        return segment

    @property
    def last(self) -> Segment:
        """The segment of the last batch, whether its call is over or not."""
        if self.segment is None:
            raise LayoutError(
                "the parallelized model was called without a segment",
                remedy="batch = lss.shard(batch, mesh), then model(batch['tokens'], segment=batch['segment'])",
            )
        return self.segment

    def positions(self, device: torch.device) -> Tensor:
        """Position of each slot of this rank: int64 [S], or [B, S] where sequences differ."""
        position_ids = self.present.position_ids
        if position_ids is None:
            return self.layout.positions(self.sequence.rank, device)
        return self.layout.shard(position_ids, self.sequence.rank, dim=1, fill=0)

    def all_positions(self, device: torch.device) -> Tensor:
        """`positions` of all ranks: int64 [N * S], or [B, N * S]."""
        position_ids = self.present.position_ids
        indices = self.layout.all_positions(device)
        return indices if position_ids is None else position_ids[:, indices]

    @eager
    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Sum a small tensor over both axes; the ledger calls it `scalars`."""
        total = value.clone()
        for axis in (self.sequence, self.data):
            axis.all_reduce_(total, layer="scalars", phase="step")
        return total

    def gather_from_ranks(self, values: Tensor) -> Tensor:
        """One row a rank: [n] becomes [M * N, n] in rank order; the ledger calls it `scalars`."""
        rows = values.reshape(1, -1)
        for axis in (self.sequence, self.data):
            rows = axis.all_gather(rows, layer="scalars", phase="step")
        return rows


def in_backward() -> bool:
    """Whether a backward is running, as it is around the recomputation of activations."""
    return torch._C._current_graph_task_id() != -1


def attach(model: nn.Module, context: SequenceContext) -> None:
    """Make `context` the context of `model`."""
    setattr(model, _ATTRIBUTE, context)


def is_parallelized(model: nn.Module) -> bool:
    """Whether `lss.parallelize` has been applied to `model` itself."""
    return _ATTRIBUTE in vars(model)


def context_of(model: nn.Module) -> SequenceContext:
    """The context that `lss.parallelize` gave to a model.

    Raises:
        ModelError: The model was not parallelized.
    """
    if not is_parallelized(model):
        raise ModelError(
            f"a {type(model).__name__} that was not parallelized", remedy="model = lss.parallelize(model, mesh)"
        )
    context = vars(model)[_ATTRIBUTE]
    assert isinstance(context, SequenceContext)
    return context


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which matrix products of `tensor` run: autocast's where it is on, else its own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def wide(tensor: Tensor) -> Tensor:
    """In float32, or float64 as it is: the dtype in which sums are taken."""
    return tensor.to(wide_dtype(tensor))


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of `wide(tensor)`."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
