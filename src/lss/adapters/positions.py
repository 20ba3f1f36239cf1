"""Positions that a model's code makes itself: numbers in a row, or the first rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, conv

from lss.callers import Caller
from lss.context import SequenceContext
from lss.errors import LayoutError, ModelError

# Functions that make positions.
MADE = frozenset((torch.arange, Tensor.__getitem__))
# Modules whose own tensors have no row a position.
_NO_TABLES = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention, nn.GroupNorm, conv._ConvNd)


@dataclass(frozen=True)
class Tables:
    """Tensors of which a slice as long as the segment is taken to be the rows of its positions, also of views.

    Args:
        holders: Modules that have them, as parameters, buffers or other attributes.
        first: Those that they had from the start.
    """

    holders: tuple[nn.Module, ...]
    first: tuple[Tensor, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Tables:
        """Those of a model."""
        own = tuple(module for module in model.modules() if not isinstance(module, (*_NO_TABLES, batchnorm._NormBase)))
        return cls(own, tuple(_tensors(own)))

    def have(self, tensor: Tensor) -> bool:
        """Whether it is one of them now: code makes tables as it runs, and moves them to other devices."""
        return _is_among(tensor, _tensors(self.holders))


def _tensors(modules: tuple[nn.Module, ...]) -> Iterator[Tensor]:
    for module in modules:
        for held in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(held, Tensor) and held.layout == torch.strided and held.dim() > 0:
                yield held


def _is_among(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    storage = tensor.untyped_storage().data_ptr()
    return any(tensor is other or (storage and other.untyped_storage().data_ptr() == storage) for other in others)


def made(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    context: SequenceContext,
    tables: Tables,
    caller: Caller,
) -> Tensor | None:
    """Global positions in the place of 0 to S - 1; None where something else is meant.

    What as many numbers as there are slots stand for, is told by the trial of the model's code, where that came to the
    place: there they are as many as the tokens of the trial, which nothing else is.

    Args:
        function: One of `MADE`.
        args: What it was given.
        kwargs: The same by name.
        context: Of the parallelized model, which works on a segment.
        tables: Of the model.
        caller: The place in code.

    Raises:
        LayoutError: A table is too short.
        ModelError: Positions of the sequences of this batch differ, which numbers in a row cannot say.
    """
    numbers_tokens = context.findings.numbers_tokens
    if context.trial is None and numbers_tokens.get(caller) is False:
        return None
    if function is torch.arange:
        found = _numbers(args, kwargs, context, caller)
    else:
        table, index = args
        found = _rows(table, index, context, caller, tables)
    if found is not None:
        context.findings.come_by.add(caller)
    if context.trial is not None and (found is not None or function is torch.arange or tables.have(args[0])):
        numbers_tokens[caller] = found is not None or numbers_tokens.get(caller, False)
    return found


def _numbers(args: Any, kwargs: Any, context: SequenceContext, caller: Caller) -> Tensor | None:
    """Numbers in a row, as many as the segment has slots."""
    named = dict(zip(("end",) if len(args) == 1 else ("start", "end", "step"), args, strict=False)) | kwargs
    start, stop, step = named.get("start", 0), named["end"], named.get("step", 1)
    size = context.layout.segment_length
    if (stop - start) / step not in (size, size + 1):
        return None
    if step == 1 and isinstance(start, int) and isinstance(stop, int) and stop - start == size:
        found = start + _positions(context, kwargs.get("device"), f"torch.arange({start}, {stop})", caller)
        return found.to(kwargs.get("dtype") or torch.int64)
    here = context.frames.innermost or "the model"
    raise ModelError(
        f"{here} calls torch.arange({start}, {stop}, {step}), which may make positions of its {size} tokens",
        allowed="torch.arange(S), torch.arange(first, first + S)",
    )


def _rows(table: Tensor, index: Any, context: SequenceContext, caller: Caller, tables: Tables) -> Tensor | None:
    """As many rows of a table as the segment has slots."""
    parts = index if isinstance(index, tuple) else (index,)
    size, here = context.layout.segment_length, context.frames.innermost or "the model"
    cut = [place for place, part in enumerate(parts) if _length(part) == size]
    if len(cut) != 1 or any(isinstance(part, list | Tensor | bool) for part in parts):
        return None
    dim = _dim(table, parts, cut[0])
    if not _is_among(table, tables.first):
        if table.size(dim) == size:
            return table[index]  # all of what code has made for the segment
        if not tables.have(table):
            return None
    start = parts[cut[0]].start or 0
    what = f"a table {tuple(table.shape)}[{start}:{start + size}]"
    found = start + _positions(context, table.device, what, caller)
    if start + context.present.num_positions > table.size(dim):
        raise LayoutError(
            f"positions up to {start + context.present.num_positions - 1}, and {what} in {here}",
            allowed=f"at most {table.size(dim) - start} tokens of a document",
        )
    rest = tuple(slice(None) if place == cut[0] else part for place, part in enumerate(parts))
    return table.index_select(dim, found)[rest]


def _length(part: Any) -> int | None:
    """Of a slice whose end is a number; None for others."""
    if not isinstance(part, slice) or part.step not in (None, 1) or not isinstance(part.stop, int):
        return None
    return part.stop - (part.start or 0)


def _dim(table: Tensor, parts: tuple[Any, ...], place: int) -> int:
    """The dim of a tensor that a part of its index is of."""
    before = [part for part in parts[:place] if part is not None]
    if not any(part is ... for part in before):
        return len(before)
    return table.dim() - len([part for part in parts[place:] if part is not None])


def _positions(context: SequenceContext, device: Any, what: str, caller: Caller) -> Tensor:
    here = context.frames.innermost or "the model"
    segment = context.present
    if context.num_sequences == segment.layout.segment_length and caller not in context.findings.numbers_tokens:
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
    context.findings.positions[here] = f"{what} looked up by global position"
    return found if found.dim() == 1 else found[0]
