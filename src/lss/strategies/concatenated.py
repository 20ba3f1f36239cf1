"""The paper's method without its gradient averaging technique (Principle 4, Figure 4(a)): outputs are concatenated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lss.attention import attention_layers
from lss.context import SequenceContext, context_of
from lss.duals import gather
from lss.errors import ModelError
from lss.parallelize import parallelize


def parallelize_concatenated(model: nn.Module, mesh: DeviceMesh | None, **options: Any) -> nn.Module:
    """As `lss.parallelize`; besides, every rank collects the outputs of all ranks after each attention layer.

    One all-gather more forward, and one reduce-scatter more backward: with `gather="separate"` 6 collectives a layer,
    with `gather="x"` 4.

    Args:
        model: A model whose attention layers follow `AttentionLayer`.
        mesh: As of `lss.parallelize`.
        options: The same.

    Raises:
        ModelError: There is no such layer, or the model cannot be parallelized.
    """
    layers = attention_layers(model)
    if not layers:
        raise ModelError(
            f"a {type(model).__name__} with the strategy concatenated",
            allowed="models whose attention layers follow AttentionLayer: presets and configurations",
        )
    parallelize(model, mesh, **options)
    for name, layer in layers.items():
        layer.forward = _Concatenated(layer.forward, context_of(model), f"{name}.outputs")
    return model


@dataclass(frozen=True)
class _Concatenated:
    """The forward of an attention layer, whose outputs travel.

    Args:
        forward: Of the layer, on segments.
        context: Of the model.
        name: Of the outputs, for the ledger.
    """

    forward: Callable[..., Tensor]
    context: SequenceContext
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """[B, S, E]."""
        own, axis = self.forward(*args, **kwargs), self.context.sequence
        whole = gather(own.transpose(0, 1), axis, self.name)  # [N * S, B, E]
        return whole.narrow(0, axis.rank * own.size(1), own.size(1)).transpose(0, 1) if axis.size > 1 else own
