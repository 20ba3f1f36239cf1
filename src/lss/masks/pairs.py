"""Masks that are asked for every pair: a function, a whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lss.documents import Span
from lss.errors import MaskError
from lss.masks.base import Mask, View, require_sequences


@dataclass(frozen=True)
class Function(Mask):
    """Any function of global positions.

    Args:
        sees: Queries [S, 1] and keys [1, T], int64, to bool [S, T]. It is also asked on the host, for each block that
            a plan looks at: some ten times L^2 evaluations a plan, which is kept while masks and layouts are the same.
    """

    sees: Callable[[Tensor, Tensor], Tensor]

    def view(self, row: int, queries: Span, keys: Span) -> View:
        """What the function says of every pair."""
        return _of_pairs(self.pairs(row, torch.arange(*queries), torch.arange(*keys)))

    def pairs(self, row: int, queries: Tensor, keys: Tensor) -> Tensor:
        """What the function says."""
        found = self.sees(queries[:, None], keys[None, :])
        if not isinstance(found, Tensor) or found.dtype != torch.bool:
            raise MaskError(
                f"a mask function that returns {getattr(found, 'dtype', type(found).__name__)}",
                allowed="a boolean tensor [S, T], true where a query sees a key",
                remedy="what is added to scores is a bias: see lss.bias",
            )
        return found.expand(len(queries), len(keys))


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A mask given as a whole tensor. It may be changed in place between calls.

    Args:
        tensor: bool [L_query, L_key], [B or 1, L_query, L_key] or [B or 1, H or 1, L_query, L_key], true where a query
            sees a key; on the host.
    """

    tensor: Tensor

    def __post_init__(self) -> None:
        if self.tensor.dtype != torch.bool or self.tensor.dim() not in (2, 3, 4):
            raise MaskError(
                f"a dense mask of {self.tensor.dtype} with shape {tuple(self.tensor.shape)}",
                allowed="bool [L_query, L_key], [B, L_query, L_key] or [B, H, L_query, L_key]",
                remedy="an additive mask is a bias: give it as lss.bias.DenseBias",
            )

    def __hash__(self) -> int:
        return hash((id(self), self.tensor._version))  # plans are kept by it

    def check(self, num_sequences: int, num_queries: int, num_keys: int) -> None:
        """Its size."""
        if self.tensor.shape[-2:] != (num_queries, num_keys):
            raise MaskError(
                f"a dense mask of shape {tuple(self.tensor.shape)} for {num_queries} queries and {num_keys} keys",
                allowed=f"[..., {num_queries}, {num_keys}], of the whole sequences",
            )
        if self.num_rows:
            require_sequences("a dense mask", self.num_rows, num_sequences)

    @property
    def num_rows(self) -> int:
        """B, or 0."""
        return self.tensor.size(0) if self.tensor.dim() > 2 and self.tensor.size(0) > 1 else 0

    @property
    def num_heads(self) -> int:
        """H, or 0."""
        return self.tensor.size(1) if self.tensor.dim() == 4 and self.tensor.size(1) > 1 else 0

    def view(self, row: int, queries: Span, keys: Span) -> View:
        """What the tensor says of every pair."""
        return _of_pairs(self._row(row)[..., slice(*queries), slice(*keys)])

    def pairs(self, row: int, queries: Tensor, keys: Tensor) -> Tensor:
        """The tensor's entries."""
        found = self._row(row)[..., queries.cpu()[:, None], keys.cpu()]
        return found.to(queries.device)

    def _row(self, row: int) -> Tensor:
        """[S, T] or [H, S, T]."""
        if self.tensor.dim() == 2:
            return self.tensor
        found = self.tensor[row if self.num_rows else 0]
        return found[0] if found.dim() == 3 and found.size(0) == 1 else found


def _of_pairs(pairs: Tensor) -> View:
    return View.FULL if pairs.all() else View.PARTIAL if pairs.any() else View.EMPTY
