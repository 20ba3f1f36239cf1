"""The state of the plain model, out of a parallelized one and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

from lss import fully_sharded
from lss.errors import ModelError
from lss.positions import ShardedPositions

Module = TypeVar("Module", bound=nn.Module)


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state of the plain model, positional tables reassembled, on every rank: to be saved by one of them.

    A collective call: every rank must make it. `load_full_state_dict` takes it back, at any number of ranks.
    """
    state = {name: fully_sharded.whole(tensor) for name, tensor in model.state_dict().items()}
    for names, module in instances(model, ShardedPositions):
        table = module.whole(module.weight)
        state |= {f"{name}.weight": table for name in names}
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the state of the plain model, as `full_state_dict` gives it, into a parallelized one, alike on every rank.

    Raises:
        ModelError: Names or shapes are not those of the model.
    """
    known = model.state_dict()
    parts = {name: fully_sharded.cut_like(given, known.get(name, given)) for name, given in state.items()}
    for names, module in instances(model, ShardedPositions):
        for name in names:
            if (table := parts.get(f"{name}.weight")) is not None and len(table) == module.layout.length:
                parts[f"{name}.weight"] = module.rows_of(table)
    try:
        model.load_state_dict(parts)
    except RuntimeError as error:
        raise ModelError(
            f"a state that does not fit: {error}", allowed="that of the plain model, as full_state_dict gives it"
        ) from error


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients under the names of the plain model's parameters, rows of positional tables put together.

    On every rank; parameters without a gradient are left out. A collective call.
    """
    fully_sharded.settle(model)
    found = ((name, weight.grad) for name, weight in model.named_parameters())
    gradients = {name: fully_sharded.whole(gradient) for name, gradient in found if gradient is not None}
    for name, module in model.named_modules():
        if isinstance(module, ShardedPositions) and module.weight.grad is not None:
            gradients[f"{name}.weight"] = module.whole(module.weight.grad)
    return gradients


def instances(model: nn.Module, kind: type[Module]) -> list[tuple[list[str], Module]]:
    """Modules of a kind, each with all names under which the model holds it."""
    found: dict[int, tuple[list[str], Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kind):
            found.setdefault(id(module), ([], module))[0].append(name)
    return list(found.values())
