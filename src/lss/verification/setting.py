"""What both runs of a verification share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from lss.attention import Gather
from lss.batch import IGNORE_INDEX
from lss.collectives import Axis
from lss.errors import LayoutError

# (outputs, labels) to a sum over tokens; labels of -100 must add nothing.
LossSum = Callable[[Tensor, Tensor], Tensor]


def cross_entropy_sum(outputs: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropies of logits [B, S, vocabulary], in nats."""
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


@dataclass(frozen=True)
class Setting:
    """The batch of all data groups, and how it is run.

    Args:
        batch: Tensors [B, L, ...], `labels` among them.
        mesh: The mesh to run over.
        gather: What attention layers gather.
        loss_sum: The loss, as a sum over tokens.
    """

    batch: dict[str, Tensor]
    mesh: DeviceMesh
    gather: Gather
    loss_sum: LossSum

    def __post_init__(self) -> None:
        if "labels" not in self.batch or len(self.batch) < 2:
            raise LayoutError(
                f"a batch of {sorted(self.batch)}",
                allowed="the model's arguments by name, and `labels`, shifted already",
            )

        wrong = [name for name, part in self.batch.items() if not isinstance(part, Tensor) or part.dim() < 2]
        if wrong or self.batch["labels"].is_floating_point():
            raise LayoutError(
                f"a batch whose {', '.join(wrong) or 'labels'} cannot be cut",
                allowed="tensors [B, L, ...], and labels of integers, of which -100 is ignored",
            )

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The model's arguments."""
        return {name: part for name, part in self.batch.items() if name != "labels"}

    def rows_of_group(self, data: Axis) -> slice:
        """Sequences of this rank's data group.

        Raises:
            LayoutError: The sequences cannot be shared out evenly.
        """
        num_sequences = len(self.batch["labels"])
        if num_sequences % data.size:
            raise LayoutError(
                f"{num_sequences} sequences over {data.size} data groups", allowed=f"a multiple of {data.size}"
            )
        share = num_sequences // data.size
        return slice(data.rank * share, (data.rank + 1) * share)

    def of_group(self, data: Axis) -> dict[str, Tensor]:
        """The batch of this rank's data group."""
        rows = self.rows_of_group(data)
        return {name: part[rows] for name, part in self.batch.items()}

    def title(self, model: str) -> str:
        """What is compared, in a line."""
        shape = tuple(self.batch["labels"].shape)
        degrees = " x ".join(f"{name} {size}" for name, size in zip(*_named(self.mesh), strict=True))
        return f"{model}, {shape[0]} sequences of {shape[1]} tokens, {degrees}, gather {self.gather}, float64"


def without_dropout(model: nn.Module) -> tuple[nn.Module, bool]:
    """A copy with all rates at zero, and whether any was not."""
    bare, found = copy.deepcopy(model), False
    for module in bare.modules():
        if isinstance(module, nn.Dropout) and module.p:
            module.p, found = 0.0, True
        if getattr(module, "attention_dropout", 0.0):
            module.attention_dropout, found = 0.0, True  # type: ignore[assignment]
    return bare, found


def _named(mesh: DeviceMesh) -> tuple[tuple[str, ...], tuple[int, ...]]:
    names = mesh.mesh_dim_names or ()
    return names, tuple(mesh[name].size() for name in names)
