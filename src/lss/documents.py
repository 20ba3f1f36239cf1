"""Which tokens of a batch belong together: packed documents and padding, as spans known on the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from lss.errors import LayoutError

# Slots [start, stop) of one document, or of the real tokens of a padded sequence.
Span = tuple[int, int]
# The spans of each sequence of a batch; what no span holds is padding.
Documents = tuple[tuple[Span, ...], ...]


def from_lengths(lengths: Sequence[Sequence[int]], num_sequences: int, length: int) -> Documents:
    """Documents one behind the other, from the first slot on; what is left of a sequence is padding.

    Raises:
        LayoutError: There is not one list a sequence, or lengths are below 1 or longer than the sequence together.
    """
    if len(lengths) != num_sequences:
        raise LayoutError(
            f"document lengths for {len(lengths)} sequences in a batch of {num_sequences}",
            allowed="one list a sequence",
        )
    found = []
    for row in lengths:
        sizes = row.tolist() if isinstance(row, Tensor) else list(row)
        if any(not isinstance(size, int) or size < 1 for size in sizes) or sum(sizes) > length:
            raise LayoutError(
                f"documents of lengths {sizes} in a sequence of {length} tokens",
                allowed=f"integers of at least 1 that add up to at most {length}",
            )
        found.append(tuple(pairwise(accumulate(sizes, initial=0))))
    return tuple(found)


def from_padding(mask: Tensor) -> Documents:
    """Real tokens of each sequence, from a padding mask: [B, L], nonzero where a token is real.

    Raises:
        LayoutError: A sequence has padding between real tokens.
    """
    if ((mask != 0) & (mask != 1)).any():
        raise LayoutError(
            f"an attention_mask with values from {mask.min().item()} to {mask.max().item()}",
            allowed="1 on tokens and 0 on padding; additive masks are not taken",
        )
    found = []
    for row, real in enumerate(mask.bool().cpu()):
        slots = real.nonzero().flatten().tolist()
        if slots and slots[-1] - slots[0] + 1 != len(slots):
            raise LayoutError(
                f"sequence {row} of the batch has padding between its tokens",
                allowed="padding on the left or on the right, as a mask [B, L]",
                remedy="pack the parts as documents, or move the padding to an end",
            )
        found.append(((slots[0], slots[-1] + 1),) if slots else ())
    return tuple(found)


def split_at_restarts(position_ids: Tensor, documents: Documents) -> Documents:
    """Cut spans where positions start again from 0: [B, L], of which padding may say anything.

    Raises:
        LayoutError: Positions neither go on by one nor start again.
    """
    if position_ids.dim() != 2 or position_ids.is_floating_point() or (position_ids < 0).any():
        raise LayoutError(
            f"position_ids {tuple(position_ids.shape)} of {position_ids.dtype} from {position_ids.min().item()}",
            allowed="integers of at least 0, [B, L]",
        )
    found = []
    for row, spans in zip(position_ids.cpu().tolist(), documents, strict=True):
        cut: list[Span] = []
        for start, stop in spans:
            breaks = [slot for slot in range(start + 1, stop) if row[slot] != row[slot - 1] + 1]
            wrong = [slot for slot in breaks if row[slot] != 0]
            if wrong:
                raise LayoutError(
                    f"position_ids go from {row[wrong[0] - 1]} to {row[wrong[0]]} at slot {wrong[0]}",
                    allowed="steps of one, and a restart from 0 where a document begins",
                )
            edges = [start, *breaks, stop]
            cut.extend(pairwise(edges))
        found.append(tuple(cut))
    return tuple(found)


def whole(num_sequences: int, length: int) -> Documents:
    """Every sequence is one document."""
    return (((0, length),),) * num_sequences


def starts(documents: Documents, length: int) -> Tensor:
    """First slot of each token's document, which tells documents of a sequence apart; -1 in padding: int64 [B, L]."""
    found = torch.full((len(documents), length), -1)
    for row, spans in enumerate(documents):
        for start, stop in spans:
            found[row, start:stop] = start
    return found


def positions_within(documents: Documents, length: int) -> Tensor:
    """Position of each token in its document, 0 in padding: int64 [B, L]."""
    first = starts(documents, length)
    return (torch.arange(length) - first).masked_fill(first < 0, 0)


def shift(labels: Tensor, offset: int, documents: Documents, ignored: int) -> Tensor:
    """Labels of the token `offset` places on, in the same document; `ignored` where it has none, and in padding.

    Args:
        labels: [B, L, ...]; with offset 0 they are shifted already, and only padding is ignored.
        offset: 0, 1, 2, ...
        documents: The spans of each sequence.
        ignored: The label that losses ignore.
    """
    length = labels.size(1)
    first = starts(documents, length).to(labels.device)
    here, there = first[:, : max(0, length - offset)], first[:, offset:]
    valid = ((here == there) & (there >= 0)).view(*here.shape, *[1] * (labels.dim() - 2))
    shifted = torch.full_like(labels, ignored)
    shifted[:, : here.size(1)] = labels[:, offset:].where(valid, ignored)
    return shifted
