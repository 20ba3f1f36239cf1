"""Faults of positions."""

from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch

from lss.layout import Layout
from lss.positions import ShardedPositions
from tests.faults.registry import fault, replaced


@fault
def positions_start_anew_in_every_segment() -> Iterator[None]:
    def local(self: Layout, rank: int, device: torch.device | None = None) -> torch.Tensor:
        return torch.arange(self.segment_length, device=device)

    with patch.object(Layout, "positions", local):
        yield


@fault
def key_positions_start_anew() -> Iterator[None]:
    def local(self: Layout, device: torch.device | None = None) -> torch.Tensor:
        return torch.arange(self.segment_length, device=device).repeat(self.num_ranks)

    with patch.object(Layout, "all_positions", local):
        yield


@fault
def positional_rows_off_by_one() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def shifted(self: ShardedPositions, indices: torch.Tensor) -> torch.Tensor:
            with torch._C.DisableTorchFunction():  # in the model's own code it would be refused
                return original(self, indices).roll(1, -2)

        return shifted

    with replaced(ShardedPositions, "forward", wrap):
        yield
