"""What is gathered, and how keys and values come of it (paper, Principle 3 and "Fused communication")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from lss.attention.blocks import wide_zeros
from lss.attention.plan import Run

Gather = Literal["auto", "x", "kv", "separate"]
GATHERS: tuple[str, ...] = get_args(Gather)
# Adds to two tensors, [B, K, T, D], the gradients of keys and values.
AddGradients = Callable[[Tensor, Tensor, Tensor, Tensor], None]
# Keys and values of some slots of all segments: gathered input [B, T, E] and its slots in rank order.
Project = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Source(Protocol):
    """What is gathered. Messages are sequence first, [S, B, ...], so that they are in order as they arrive."""

    @property
    def name(self) -> Gather:
        """As in `attention.gather`."""

    @property
    def gathers_key_value(self) -> bool:
        """Whether what is gathered are keys and values, this rank's among them."""

    def messages(self, key: Tensor, value: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """What this rank sends, of its keys and values or of the further inputs of `attend`: each [S, B, ...]."""

    def key_value(self, gathered: list[Tensor], slots: Tensor, run: Run) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, T, D] of a run."""

    def add_gradients(
        self, gathered: list[Tensor], sums: list[Tensor], slots: Tensor, run: Run, back: AddGradients
    ) -> list[Tensor | None]:
        """Have `back` work out the gradients of a run, and add those of what was gathered to `sums`.

        Returns:
            Gradients of inputs that are parameters; None for the others.
        """

    def unpack(self, gradients: list[Tensor]) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
        """Gradients of key, value and inputs from those of the messages; None for those that have none."""


@dataclass(frozen=True)
class KeyValue:
    """K and V, packed in one message; or, `separate`, in two.

    Args:
        separate: Whether K and V travel apart.
    """

    separate: bool = False

    @property
    def name(self) -> Gather:
        """`kv` or `separate`."""
        return "separate" if self.separate else "kv"

    @property
    def gathers_key_value(self) -> bool:
        """They are."""
        return True

    def messages(self, key: Tensor, value: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """[S, B, 2, K, D], or two of [S, B, K, D]."""
        if self.separate:
            return [part.permute(2, 0, 1, 3) for part in (key, value)]
        return [torch.stack([part.permute(2, 0, 1, 3) for part in (key, value)], dim=2)]  # [B, K, S, D] twice

    def key_value(self, gathered: list[Tensor], slots: Tensor, run: Run) -> tuple[Tensor, Tensor]:
        """Views."""
        parts = [_of_run(message, run) for message in gathered]
        key, value = parts if self.separate else parts[0].unbind(2)
        return key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)  # [T, B, K, D] -> [B, K, T, D]

    def add_gradients(
        self, gathered: list[Tensor], sums: list[Tensor], slots: Tensor, run: Run, back: AddGradients
    ) -> list[Tensor | None]:
        """Straight into the message."""
        back(*self.key_value(gathered, slots, run), *self.key_value(sums, slots, run))
        return []

    def unpack(self, gradients: list[Tensor]) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
        """Of keys and values."""
        key, value = gradients if self.separate else gradients[0].unbind(2)
        return key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), []


@dataclass(frozen=True)
class Input:
    """The layer's input, of which every rank projects the keys and values that it needs; again in backward.

    Args:
        parameters: Of the projection, those that need a gradient. With the layer's input they are the `inputs` of
            `attend`.
        project: The projection.
    """

    parameters: tuple[Tensor, ...]
    project: Project

    @property
    def name(self) -> Gather:
        """`x`."""
        return "x"

    @property
    def gathers_key_value(self) -> bool:
        """They come of it."""
        return False

    def messages(self, key: Tensor, value: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """[S, B, E]."""
        return [inputs[0].transpose(0, 1)]

    def key_value(self, gathered: list[Tensor], slots: Tensor, run: Run) -> tuple[Tensor, Tensor]:
        """Projected from the run's slots alone."""
        x = _of_run(gathered[0], run).transpose(0, 1).contiguous()  # [T, B, E] -> [B, T, E]
        return self.project(x, _of_run(slots, run))

    def add_gradients(
        self, gathered: list[Tensor], sums: list[Tensor], slots: Tensor, run: Run, back: AddGradients
    ) -> list[Tensor | None]:
        """Through the projection, which is done again."""
        leaf = gathered[0][run.start : run.stop].transpose(0, 1).contiguous().requires_grad_()
        with torch.enable_grad():
            key, value = self.project(leaf, slots[run.start : run.stop])
        of_key, of_value = wide_zeros(key), wide_zeros(value)
        back(key.detach(), value.detach(), of_key, of_value)
        gradients = (of_key.to(key.dtype), of_value.to(value.dtype))
        of_x, *of_parameters = torch.autograd.grad((key, value), (leaf, *self.parameters), gradients, allow_unused=True)
        sums[0][run.start : run.stop] += of_x.transpose(0, 1)
        return [None, *of_parameters]

    def unpack(self, gradients: list[Tensor]) -> tuple[Tensor | None, Tensor | None, list[Tensor | None]]:
        """Of the layer's input."""
        return None, None, [gradients[0].transpose(0, 1), *[None] * len(self.parameters)]


def _of_run(slots: Tensor, run: Run) -> Tensor:
    """A run's part of [T, ...]; the tensor itself where that is all of it, which in a graph is one pass less."""
    return slots if (run.start, run.stop) == (0, slots.size(0)) else slots[run.start : run.stop]
