"""Positions that a model's code makes itself: numbers in a row, or the first rows of a table."""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, conv

from lss.context import SequenceContext
from lss.errors import LayoutError, ModelError

# Functions that make positions.
MADE = frozenset((torch.arange, Tensor.__getitem__))
# Modules whose own tensors have no row a position.
_NO_TABLES = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention, nn.GroupNorm, conv._ConvNd)


def tables(model: nn.Module) -> frozenset[int]:
    """Identities of the tensors of which a slice as long as the segment is taken to be the rows of its positions."""
    own = (module for module in model.modules() if not isinstance(module, (*_NO_TABLES, batchnorm._NormBase)))
    return frozenset(
        id(tensor)
        for module in own
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if tensor.dim() > 0
    )


def made(
    function: Callable[..., Any], args: Any, kwargs: Any, context: SequenceContext, known: frozenset[int]
) -> Tensor | None:
    """Global positions in the place of 0 to S - 1; None where something else is meant.

    Args:
        function: One of `MADE`.
        args: What it was given.
        kwargs: The same by name.
        context: Of the parallelized model, which works on a segment.
        known: Identities of tables.

    Raises:
        LayoutError: A table is too short.
        ModelError: Positions of the sequences of this batch differ, which numbers in a row cannot say.
    """
    if function is torch.arange:
        return _numbers(args, kwargs, context)
    table, index = args
    return _rows(table, index, context) if id(table) in known else None


def _numbers(args: Any, kwargs: Any, context: SequenceContext) -> Tensor | None:
    start, stop = (0, *args)[-2:] if len(args) < 3 else args[:2]
    start, stop = kwargs.get("start", start), kwargs.get("end", stop if args else None)
    step = args[2] if len(args) > 2 else kwargs.get("step", 1)
    if step != 1 or not (isinstance(start, int) and isinstance(stop, int)):
        return None
    if stop - start != context.layout.segment_length:
        return None
    found = start + _positions(context, kwargs.get("device"), f"torch.arange({start}, {stop})")
    return found.to(kwargs.get("dtype") or torch.int64)


def _rows(table: Tensor, index: Any, context: SequenceContext) -> Tensor | None:
    parts = index if isinstance(index, tuple) else (index,)
    if EllipsisType in map(type, parts) or not all(isinstance(part, slice) for part in parts):
        return None
    cut = [dim for dim, part in enumerate(parts) if part != slice(None)]
    if len(cut) != 1:
        return None
    (dim,) = cut
    part = parts[dim]
    start, stop = part.start or 0, part.stop
    if part.step not in (None, 1) or not isinstance(stop, int) or stop - start != context.layout.segment_length:
        return None
    what = f"a table {tuple(table.shape)}[{start}:{stop}]"
    found = start + _positions(context, table.device, what)
    if start + context.present.num_positions > table.size(dim):
        raise LayoutError(
            f"positions up to {start + context.present.num_positions - 1}, and {what} in "
            f"{context.frames.innermost or 'the model'}",
            allowed=f"at most {table.size(dim) - start} tokens of a document",
        )
    return table.index_select(dim, found)


def _positions(context: SequenceContext, device: Any, what: str) -> Tensor:
    here = context.frames.innermost or "the model"
    segment = context.present
    if context.num_sequences == segment.layout.segment_length:
        raise ModelError(
            f"{what} in {here} may number tokens or sequences: there are {context.num_sequences} of each on this rank",
            allowed="another number of sequences, or of tokens",
        )
    device = torch.device(device or "cpu")
    found = context.positions(device)
    if segment.documents is not None and all(row in ((), ((0, row[-1][1]),)) for row in segment.documents):
        found = segment.layout.positions(context.sequence.rank, device)  # padding on the right, which may be anywhere
    if found.dim() > 1 and not bool((found == found[0]).all()):
        raise ModelError(
            f"{here} makes its positions by {what}, the same in all sequences, and those of this batch differ",
            allowed="padding on the right; packed documents that are cut alike in all sequences",
            remedy="have the model take position_ids",
        )
    context.positions_found[here] = f"{what} looked up by global position"
    return found if found.dim() == 1 else found[0]
