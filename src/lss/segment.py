"""What travels with a batch and tells the parallelized model where its tokens belong."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lss import documents as spans
from lss import masks
from lss.documents import Documents
from lss.layout import Layout
from lss.masks import Full, Mask


@dataclass(frozen=True)
class Whole:
    """A batch that is not cut: every rank of a sequence group has all of its tokens.

    Args:
        first_sample: Index of the batch's first sequence among all sequences of the step; keys the dropout. None for
            data rank * B.
        step: The step that the batch belongs to; None lets the model count its own calls.
        checksum: Of the batch, which must be the same on every rank of a sequence group; float64 scalar.
    """

    first_sample: int | None = None
    step: int | None = None
    checksum: Tensor | None = None


@dataclass(frozen=True)
class Segment:
    """A batch of which each rank of a sequence group has its own tokens.

    Args:
        layout: The layout of the batch's sequences.
        first_sample: Index of the batch's first sequence among all sequences of the step; keys the dropout. None for
            data rank * B.
        step: The step that the batch belongs to; None lets the model count its own calls.
        documents: Spans of packed documents, or of the real tokens of padded sequences; None where every sequence is
            one document.
        position_ids: Position of every token of the whole sequences, int64 [B, L]; None where they are 0 to L - 1.
        num_positions: The largest position and one.
        checksum: Of the whole batch, which must be the same on every rank of a sequence group; float64 scalar.
        source: The sequences that an encoder reads, where these are what its decoder predicts.
        has_labels: Whether `shard` was given labels, which it has set to -100 in empty slots.
    """

    layout: Layout
    first_sample: int | None = None
    step: int | None = None
    documents: Documents | None = None
    position_ids: Tensor | None = None
    num_positions: int = 0
    checksum: Tensor | None = None
    source: Segment | Whole | None = None
    has_labels: bool = False

    @cached_property
    def mask(self) -> Mask:
        """Who sees whom by the documents alone: made once a batch, for all layers."""
        return Full() if self.documents is None else masks.Documents(self.documents)

    def real(self, num_sequences: int, device: torch.device) -> Tensor:
        """Slots of the whole sequences that hold a token and no padding: bool [B, L]."""
        if self.documents is None:
            return torch.ones(num_sequences, self.layout.length, dtype=torch.bool, device=device)
        return (spans.starts(self.documents, self.layout.length) >= 0).to(device)


def mask_between(queries: Segment, keys: Segment) -> Mask:
    """Who sees whom of two batches whose documents belong together one by one, as a decoder's and its encoder's."""
    if queries.documents is None and keys.documents is None:
        return Full()
    number = len(queries.documents or keys.documents or ())
    of_queries, of_keys = (part.documents or spans.whole(number, part.layout.length) for part in (queries, keys))
    return masks.Documents(of_queries, of_keys)
