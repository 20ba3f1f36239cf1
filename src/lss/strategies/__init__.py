"""Other ways of training on a sequence over several ranks, to compare with: the same model on the same batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lss.collectives import Axis
from lss.errors import ModelError
from lss.ledger import Ledger
from lss.mesh import SEQUENCE
from lss.parallelize import parallelize
from lss.strategies.concatenated import parallelize_concatenated
from lss.strategies.megatron import parallelize_as_megatron
from lss.strategies.tensor_parallel import parallelize_tensors

StrategyName = Literal["lss", "serial", "ring", "lightseq", "ulysses", "megatron", "megatron-tp", "concatenated"]
STRATEGY_NAMES: tuple[str, ...] = get_args(StrategyName)

__all__ = ["STRATEGY_NAMES", "StrategyName", "parallelize_as"]


def parallelize_as(strategy: StrategyName, model: nn.Module, mesh: DeviceMesh | None, **options: Any) -> nn.Module:
    """`lss.parallelize`, or what a rival does in its place.

    Args:
        strategy: `lss`; `serial`, one rank a sequence; `ring`, `lightseq`, `ulysses`, which take any model; or of GPTs
            `megatron`, `megatron-tp` and `concatenated`.
        model: The plain model, changed in place.
        mesh: As of `lss.parallelize`.
        options: The same.

    Raises:
        ModelError: There is no such strategy, or it does not take the model, or so many ranks.
    """
    if strategy not in _STRATEGIES:
        raise ModelError(f"strategy={strategy!r}", allowed=", ".join(_STRATEGIES))
    return _STRATEGIES[strategy](model, mesh, **options)


def _parallelize_serially(model: nn.Module, mesh: DeviceMesh | None, **options: Any) -> nn.Module:
    """One rank a sequence, by the fastest kernel: what runs over ranks are compared with."""
    size = Axis.of(mesh, SEQUENCE, Ledger()).size
    if size > 1:
        raise ModelError(
            f"strategy serial over {size} ranks a sequence", allowed="one rank a sequence, in any number of data groups"
        )
    return parallelize(model, mesh, **options)


_STRATEGIES: dict[str, Callable[..., nn.Module]] = {
    "lss": parallelize,
    "serial": _parallelize_serially,
    "ring": partial(parallelize, strategy="ring"),
    "lightseq": partial(parallelize, strategy="lightseq"),
    "ulysses": partial(parallelize, strategy="ulysses"),
    "megatron": parallelize_as_megatron,
    "megatron-tp": parallelize_tensors,
    "concatenated": parallelize_concatenated,
}
