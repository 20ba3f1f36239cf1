"""Learned positional tables cut by rows over the sequence group (paper, Principle 2)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lss.compiled import eager
from lss.context import SequenceContext
from lss.duals import gather
from lss.errors import LayoutError, ModelError
from lss.fake import has_values
from lss.fully_sharded import is_cut
from lss.layout import Layout


class ShardedPositions(nn.Module):
    """The rows of a positional table that belong to this rank's segment.

    Weight, gradient and optimizer state of a row exist on the rank that holds its position, and on no other. For
    sequences as long as the table the lookup needs no communication. For shorter ones, and for packed documents, a row
    may be needed where it is not held: the table is then gathered, one all-gather forward and one reduce-scatter
    backward a step.

    Args:
        table: The whole table [P, E], the same on every rank.
        layout: Of its rows.
        context: The context of the parallelized model.
        name: Qualified name of the module, for the ledger.
    """

    def __init__(self, table: nn.Embedding, layout: Layout, context: SequenceContext, name: str) -> None:
        super().__init__()
        if table.padding_idx is not None:
            raise ModelError(f"{name} has padding_idx={table.padding_idx}", allowed="a positional table without it")
        self.context = context
        self.name = name
        self.layout = layout
        # the same parameter, so that an optimizer that was made before knows it
        self.weight = cast(nn.Parameter, table.weight)
        self.weight.data = self.rows_of(table.weight.data)
        self.weight.grad = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and is_cut(value):
            raise ModelError(
                f"fully_shard of {self.name}, of which each rank holds its rows already",
                remedy="fully_shard(..., ignored_params=set(lss.positional_tables(model)))",
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Rows held, as in `print(model)`."""
        return f"{self.weight.size(0)} of {self.layout.length} rows, {self.weight.size(1)} wide"

    @eager
    def forward(self, indices: Tensor) -> Tensor:
        """Rows of this rank's slots: [S, E], or [B, S, E] where sequences differ.

        Args:
            indices: What the plain model would look up, [..., S]; only the shape is used, as the segment of the batch
                says which positions the slots have.
        """
        segment = self.context.present
        if segment.num_positions > self.layout.length:
            raise LayoutError(
                f"positions up to {segment.num_positions - 1}, and {self.name} has {self.layout.length} rows",
                allowed=f"at most {self.layout.length} tokens of a document",
                remedy="make the table longer, or use rotary positions",
            )
        if indices.size(-1) != segment.layout.segment_length:
            raise LayoutError(
                f"{self.name} was asked for indices of shape {tuple(indices.shape)}",
                allowed=f"[..., {segment.layout.segment_length}]: one index a slot",
            )
        if self.context.trial is not None:  # which has no other ranks' rows
            return self.weight.new_zeros(*indices.shape, self.weight.size(1))
        positions = self.context.positions(indices.device)
        if self.context.num_calls == 1 and has_values():
            self._require_slots(indices)
        if segment.position_ids is not None or self.layout != segment.layout:
            gathered = gather(self._padded(self.weight), self.context.sequence, self.name)
            return F.embedding(positions, self.layout.unshard(gathered, dim=0))
        return self._padded(self.weight)

    def _require_slots(self, indices: Tensor) -> None:
        """Raise LayoutError unless the model asks for slots 0 to S - 1, in order; looked at once, at first."""
        if (indices != torch.arange(indices.size(-1), device=indices.device)).any():
            raise LayoutError(
                f"{self.name} was asked for other positions than 0, 1, 2, ...",
                allowed="the slots of the segment in order; the segment says which positions they have",
                remedy="give position_ids to lss.shard, not to the model",
            )

    def rows_of(self, table: Tensor) -> Tensor:
        """This rank's rows of a whole table [P, E]."""
        rank = self.context.sequence.rank
        return table[self.layout.positions(rank, table.device)[: self.layout.num_tokens(rank)]]

    def whole(self, rows: Tensor) -> Tensor:
        """Rows of all ranks in order, of the weight or of its gradient: [P, E], detached. A collective call."""
        gathered = self.context.sequence.all_gather(self._padded(rows.detach()), layer=self.name, phase="setup")
        return self.layout.unshard(gathered, dim=0)

    def _padded(self, rows: Tensor) -> Tensor:
        missing = self.layout.segment_length - rows.size(0)
        return F.pad(rows, (0, 0, 0, missing)) if missing else rows
