"""Nvidia's sequence parallelism as the paper describes it (Section 2.3, Figure 1(iv)).

Embeddings, layer norms, dropout of residual branches and the loss work on segments. Attention and feed-forward are
computed whole on every rank, between an all-gather and a reduce-scatter each: 4 collectives a block forward, and 4
backward. Megatron's real form cuts their weights besides, which the paper's baseline does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lss.context import SequenceContext, context_of
from lss.duals import gather, scatter
from lss.errors import ModelError
from lss.layout import Layout
from lss.models import GPT
from lss.parallelize import parallelize


def parallelize_as_megatron(model: GPT, mesh: DeviceMesh | None, **options: Any) -> GPT:
    """Make a GPT work on segments but for its attention and feed-forward, which every rank computes whole.

    Everything else is as of `lss.parallelize`: the batch, the loss, averaging of gradients.

    Args:
        model: A model of this package.
        mesh: As of `lss.parallelize`.
        options: The same.

    Raises:
        ModelError: The model is another one, or cannot be parallelized.
    """
    require_gpt(model, "megatron")
    parallelize(model, mesh, **options)
    compute_whole(model)
    return model


def require_gpt(model: object, strategy: str) -> None:
    """Raise ModelError unless it is a model of this package, whose parts are known."""
    if not isinstance(model, GPT):
        raise ModelError(
            f"a {type(model).__name__} with the strategy {strategy}",
            allowed="lss.models.GPT: presets and configurations",
        )


def compute_whole(model: GPT, cut_over: DeviceMesh | None = None) -> None:
    """Have attention and feed-forward of a parallelized model computed on whole sequences.

    Args:
        model: The model.
        cut_over: The ranks over which torch has cut their weights, so that each gives one summand; None where each
            gives all.
    """
    context = context_of(model)
    for number, block in enumerate(model.blocks):
        for part in ("attention", "feed_forward"):
            module = getattr(block, part)
            module.forward = _Whole(module.forward, context, f"blocks.{number}.{part}", cut_over)


@dataclass(frozen=True)
class _Whole:
    """The forward of a module that is computed on whole sequences by every rank.

    Args:
        forward: Of whole sequences.
        context: Of the model.
        name: Of the module, for the ledger.
        cut_over: As of `compute_whole`.
    """

    forward: Callable[..., Tensor]
    context: SequenceContext
    name: str
    cut_over: DeviceMesh | None

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        """[B, S, E] of this rank's slots to the same."""
        axis, layout = self.context.sequence, self.context.layout
        if axis.size == 1:
            return self.forward(x, *args)
        gathered = gather(x.transpose(0, 1), axis, self.name)  # [N * S, B, E]
        whole = layout.unshard(gathered, dim=0).transpose(0, 1)
        with _alone(self.context):
            made = self._summand(whole, axis.size, *args)
        by_slot = made.transpose(0, 1).index_select(0, layout.all_positions(made.device))
        return scatter(by_slot, axis, self.name).transpose(0, 1)

    def _summand(self, whole: Tensor, num_ranks: int, *args: Any) -> Tensor:
        """What this rank adds to the output [B, L, E]."""
        if self.cut_over is None:
            return self.forward(whole, *args) / num_ranks
        from torch.distributed.tensor import DTensor, Partial, Replicate  # noqa: PLC0415  (takes long to import)

        # its gradient is this rank's summand too, which the dual of the all-gather sums
        known = DTensor.from_local(whole, self.cut_over, [Replicate()], grad_placements=[Partial()])
        return self.forward(known, *args)


@contextmanager
def _alone(context: SequenceContext) -> Iterator[None]:
    """This rank has all tokens, in order."""
    segment, axis = context.present, context.sequence
    context.segment = replace(segment, layout=Layout.contiguous(segment.layout.length, 1))
    context.sequence = replace(axis, size=1, rank=0, group=None)
    try:
        yield
    finally:
        context.segment, context.sequence = segment, axis
