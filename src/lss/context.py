"""What the parts of one parallelized model share: its axes and the segment that it is working on."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lss.batch import Cut, require_one_batch
from lss.collectives import Axis
from lss.compiled import eager
from lss.errors import LayoutError, ModelError
from lss.fake import has_values
from lss.findings import Findings
from lss.frames import Frames, in_backward
from lss.layout import Layout, LayoutName, Piece
from lss.ledger import Ledger
from lss.segment import Segment, Whole
from lss.trial import Trial, tensors_in

_ATTRIBUTE = "lss_context"
_WATCHED = "lss_watched"


@dataclass
class SequenceContext:
    """Axes, ledger and present segment of a parallelized model.

    Args:
        sequence: The axis over which sequences are cut.
        data: The axis over which batches are cut.
        seed: Keys the dropout, with the step.
        ledger: Counts the collectives of both axes.
        cut: Where the model's tokens are cut.
        layout_name: By which its layers cut them.
        token_dim: Dim of the tokens in what modules are given: 1, or 0 where sequences come first.
        safe: Names of modules that the user says keep tokens alone, and those in them.
        has_encoder: Whether the model is an encoder and a decoder, whose sequences are told apart.
        others: Numbers of the tokens that the present layer was given besides its own.
        drops_by_function: A place where attention or a function dropped values; empty if none did.
        num_sequences: B, of the present call; 0 where it is not known.
        segment: Of the tokens that are being worked on: the batch's, or in an encoder its own.
        target: The batch's segment.
        source: That of the encoder, after its layers.
        step: Of the present call.
        num_calls: Calls of the model so far.
        num_trained: Those in training.
        is_running: Whether such a call is going on.
        is_averaged: Whether the gradients of the last backward are; None before any.
        num_parameters: Parameters of the model, and numbers in them.
        is_tensor_parallel: Whether weights are cut over the ranks of the sequence, each of which has their gradients.
        choices: How each attention layer is computed, in a line for people.
        frames: The modules that are running.
        trial: What stands in for other ranks while the model's code is tried on a few tokens.
        findings: What is known of the model's code.
    """

    sequence: Axis
    data: Axis
    seed: int
    ledger: Ledger
    cut: Cut = "tokens"
    layout_name: LayoutName = "zigzag"
    token_dim: int = 1
    safe: tuple[str, ...] = ()
    has_encoder: bool = False
    others: frozenset[int] = frozenset()
    drops_by_function: str = ""
    num_sequences: int = 0
    segment: Segment | Whole | None = None
    target: Segment | Whole | None = None
    source: Segment | None = None
    step: int = 0
    num_calls: int = 0
    num_trained: int = 0
    is_running: bool = False
    is_averaged: bool | None = None
    num_parameters: tuple[int, int] = (0, 0)
    is_tensor_parallel: bool = False
    choices: dict[str, str] = field(default_factory=dict)
    frames: Frames = field(default_factory=Frames)
    trial: Trial | None = None
    findings: Findings = field(default_factory=Findings)

    def begin(self, given: Segment | Whole | None, num_sequences: int, *, training: bool) -> None:
        """Take up the segment of a batch that enters the model; None is refused where the batch must be cut.

        Args:
            given: What `shard` returned with the batch.
            num_sequences: B.
            training: Whether the model is in training, whose calls count as steps where the segment names none.
        """
        batch = self._accepted(given)
        self.segment, self.target, self.source, self.is_running = batch, batch, None, True
        if in_backward():
            return  # a recomputation: `resume` has set the step of its call
        self.frames.begin()
        self.findings.come_by.clear()
        self.findings.segment = batch if isinstance(batch, Segment) else None
        self.num_sequences = num_sequences
        self.step = self.num_trained if batch.step is None else batch.step
        self.num_trained += training
        if self.num_calls == 0 and batch.checksum is not None and has_values():
            require_one_batch(batch.checksum, self.sequence)
        self.num_calls += 1

    def _accepted(self, given: Segment | Whole | None) -> Segment | Whole:
        if self.cut == "layers" and not isinstance(given, Segment):
            return given or Whole()
        if self.cut == "layers":
            raise LayoutError(
                "a batch that is cut by tokens, for a model whose layers cut them",
                remedy="lss.shard(batch, mesh, cut='layers'), or lss.parallelize(model, mesh, cut='tokens')",
            )
        if not isinstance(given, Segment):
            raise LayoutError(
                f"the parallelized model was called {'without a segment' if given is None else 'with a batch not cut'}",
                remedy="batch = lss.shard(batch, mesh), then model(batch['tokens'], segment=batch['segment'])",
            )
        if given.source is not None and not self.has_encoder:
            raise LayoutError(
                "a batch of two sequences, for a model whose encoder is not known",
                allowed="encoder-decoders of transformers; others with whole batches",
                remedy="cut='layers' in lss.parallelize and in lss.shard",
            )
        if given.layout.num_ranks != self.sequence.size:
            raise LayoutError(
                f"a batch cut for {given.layout.num_ranks} ranks in a model parallelized over {self.sequence.size}",
                remedy="give lss.shard and lss.parallelize the same mesh",
            )
        return given

    def end(self) -> None:
        """The model's call is over: its parts cannot be called apart, as they would take up the wrong segment."""
        self.is_running = False

    def watch(self, outputs: Any) -> None:
        """Have backward through the outputs of a module take up the present call again, as recomputation needs it.

        Other calls may have come between a call and its backward: further micro-batches, or an evaluation.
        """
        for part in tensors_in(outputs):
            if part.requires_grad and not in_backward() and not hasattr(part, _WATCHED):
                setattr(part, _WATCHED, True)  # by the module that made it; others may hand it on
                part.register_hook(partial(self._resume, self.last, self.step))

    def _resume(self, segment: Segment | Whole, step: int, gradient: Tensor) -> None:
        self.segment, self.step, self.is_averaged = segment, step, False
        self.frames.resume()

    def enter_encoder(self) -> None:
        """An encoder begins, whose sequences are the batch's source."""
        if isinstance(self.target, Segment) and self.target.source is not None and not in_backward():
            self.segment = self.target.source

    def leave_encoder(self) -> None:
        """It is over: the decoder's tokens are worked on."""
        if isinstance(self.segment, Segment) and not in_backward():
            self.source, self.segment = self.segment, self.target

    def cut_tokens(self, num_sequences: int, length: int) -> Segment:
        """Take up this rank's segment of whole sequences of `length` tokens, on the way into the model's layers."""
        layout = Layout.named(self.layout_name, length, self.trial.num_ranks if self.trial else self.sequence.size)
        layout = self.trial.layout(layout) if self.trial else layout
        segment = Segment(layout, self.first_sample(num_sequences), self.last.step, num_positions=length)
        self.segment, self.num_sequences, self.findings.segment = segment, num_sequences, segment
        return segment

    def join_tokens(self) -> None:
        """Whole sequences are worked on again."""
        self.segment = self.target

    def require_averaged(self, wanted: bool) -> None:
        """Raise ModelError if gradients are averaged twice, or used before they are."""
        if self.sequence.size * self.data.size == 1 or self.is_averaged in (None, wanted):
            return
        raise ModelError(
            "gradients that are not averaged yet" if wanted else "gradients that are averaged already",
            allowed="lss.average_gradients(model) once a step, after the last backward and before norm and optimizer",
        )

    @property
    def layout(self) -> Layout:
        """The layout of the last batch."""
        return self._segment.layout

    @property
    def is_alone(self) -> bool:
        """Whether no other rank has other tokens of the same sequences."""
        return self.sequence.size == 1 and self.trial is None

    @property
    def is_cut(self) -> bool:
        """Whether each rank is working on tokens of its own; a rank alone has all of them."""
        return isinstance(self.segment, Segment)

    @property
    def present(self) -> Segment:
        """The segment that is being worked on.

        Raises:
            LayoutError: There is none, or a part of the model was called apart from it.
        """
        segment = self._segment
        if not self.is_running and not in_backward():
            raise LayoutError(
                "a part of the parallelized model was called apart from it",
                allowed="calls of the model itself, which is told the segment of its batch",
                remedy="call what you need in the model's forward",
            )
        return segment

    @property
    def _segment(self) -> Segment:
        batch = self.last
        if isinstance(batch, Whole):
            raise LayoutError(
                "tokens that are not cut, where each rank should have its own",
                allowed="attention inside of the model's layers, a list or sequence of modules",
            )
        return batch

    @property
    def last(self) -> Segment | Whole:
        """The last batch, whether its call is over or not."""
        if self.segment is None:
            raise LayoutError(
                "the parallelized model was called without a segment",
                remedy="batch = lss.shard(batch, mesh), then model(batch['tokens'], segment=batch['segment'])",
            )
        return self.segment

    def first_sample(self, num_sequences: int) -> int:
        """Index of the batch's first sequence among all of the step.

        Args:
            num_sequences: B.
        """
        given = self.last.first_sample
        return self.data.rank * num_sequences if given is None else given

    def pieces(self, num_tokens: int, what: str) -> tuple[Piece, ...]:
        """The positions of so many tokens in a row, on this rank.

        Raises:
            LayoutError: They are not those of the present segment.
        """
        if isinstance(self.last, Whole):
            return (Piece(0, 0, num_tokens),)
        layout = self.layout
        if num_tokens != layout.segment_length:
            raise LayoutError(
                f"{what} was given {num_tokens} tokens of a segment that has {layout.segment_length} slots",
                allowed="the tokens that lss.shard returned, with the segment that it returned beside them",
            )
        return layout.pieces(self.sequence.rank)

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
