"""A model's arguments with a few tokens in the place of a segment's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lss.context import SequenceContext
from lss.layout import Layout
from lss.segment import Segment
from lss.trial import Trial, tensors_in

# Tokens of either half of a trial; and where code cannot be run on so many.
_HALVES = ((11, 14), (13, 16), (17, 20), (19, 22), (23, 26), (29, 34), (37, 46), (43, 58), (53, 62), (71, 82))
_FEWEST = ((3, 5), (4, 5), (5, 6), (5, 7), (6, 7), (6, 9), (7, 10))


def unusual_numbers(model: nn.Module, given: Any) -> Iterator[tuple[int, int]]:
    """Numbers of tokens that nothing else has: no argument, and no weight, nor a half of one; and fewer of them."""
    tensors = (*tensors_in(given), *model.parameters(), *model.buffers())
    sizes = {size for tensor in tensors for size in tensor.shape}
    taken = {number for size in sizes for number in (size, size - 1, size // 2, size // 2 - 1)}
    many, few = (
        [halves for halves in candidates if not taken & {*halves, sum(halves)}] for candidates in (_HALVES, _FEWEST)
    )
    yield from [*many, _HALVES[-1]][:1] + few[:1]


def layouts_of(context: SequenceContext) -> Iterator[Layout]:
    """Of the sequences in a model's arguments."""
    batch = context.target
    while isinstance(batch, Segment):
        yield batch.layout
        batch = batch.source


class FewTokens:
    """Cuts the tokens of a trial out of whatever holds a slot of the segment for each place along a dim.

    Args:
        trial: The trial.
        layouts: Of the segments.
        token_dim: Where tokens are looked for first.
    """

    def __init__(self, trial: Trial, layouts: list[Layout], token_dim: int) -> None:
        self.trial, self.layouts, self.token_dim = trial, layouts, token_dim
        self.known: dict[int, Tensor] = {}  # what is given twice stays one tensor
        self.has_cut = False
        self._has_content = self._differs = False

    @property
    def tokens_differ(self) -> bool:
        """Whether tokens are not all the same, besides their places."""
        return self._differs or not self._has_content

    def __call__(self, value: Any) -> Any:
        """The same with fewer tokens; tensors are copies, as code may change them in place."""
        if isinstance(value, Tensor):
            if id(value) not in self.known:
                self.known[id(value)] = self._of_tensor(value)
            return self.known[id(value)]
        if isinstance(value, int) and not isinstance(value, bool):
            return len(self.trial.tokens) if any(value == part.segment_length for part in self.layouts) else value
        if isinstance(value, Mapping):
            return _like(value, {name: self(part) for name, part in value.items()})
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self, value))
        if isinstance(value, tuple | list):
            return type(value)(map(self, value))
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{part.name: self(getattr(value, part.name)) for part in fields(value) if part.init})
        return value

    def _of_tensor(self, value: Tensor) -> Tensor:
        for dim in sorted(range(value.dim()), key=lambda dim: (dim != self.token_dim, dim > 1, dim)):
            for layout in self.layouts:
                if value.size(dim) == layout.segment_length:
                    found = value.detach().index_select(
                        dim, torch.tensor(self.trial.slots(layout), device=value.device)
                    )
                    self._look_at(found, dim, layout)
                    return found
        return value.detach().clone()

    def _look_at(self, cut: Tensor, dim: int, layout: Layout) -> None:
        self.has_cut = True
        places = self.trial.layout(layout).positions(self.trial.rank, cut.device)
        if dim < cut.dim() - 1 or not bool((cut == places).all()):
            self._has_content = True
            self._differs |= bool((cut != cut.narrow(dim, 0, 1)).any())


def _like(value: Mapping[str, Any], parts: dict[str, Any]) -> Any:
    """A mapping of the same kind, where it can be made from one."""
    kind: Any = type(value)
    try:
        return kind(parts)
    except TypeError:
        return parts
