"""Faults of the averaging of gradients, of their norm and of replicas."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest.mock import patch

import torch

from lss.collectives import Axis
from lss.context import context_of
from lss.verification import runs
from tests.faults.registry import changed_model, fault, replaced


def after_averaging(change: Callable[[torch.nn.Module], None]) -> AbstractContextManager:
    """Do something to gradients when they have been averaged."""

    def wrap(original: Callable) -> Callable:
        def averaged(model: torch.nn.Module) -> None:
            original(model)
            change(model)

        return averaged

    return replaced(runs, "average_gradients", wrap)


def scaled(factor: float, *names: str) -> Callable[[torch.nn.Module], None]:
    """Multiply the gradients of the parameters of these names, or all."""

    def change(model: torch.nn.Module) -> None:
        for name, weight in model.named_parameters():
            if weight.grad is not None and (not names or name in names):
                weight.grad.mul_(factor)

    return change


@fault
def averaging_left_out() -> Iterator[None]:
    with patch.object(runs, "average_gradients", lambda model: setattr(context_of(model), "is_averaged", True)):
        yield


def _left_out(name: str) -> AbstractContextManager:
    def wrap(original: Callable) -> Callable:
        def averaged(model: torch.nn.Module) -> None:
            kept = model.get_parameter(name).grad.clone()
            original(model)
            model.get_parameter(name).grad.copy_(kept)

        return averaged

    return replaced(runs, "average_gradients", wrap)


@fault
def averaging_left_out_for_one_parameter() -> Iterator[None]:
    with _left_out("norm.bias"):
        yield


def _axis_left_out(axis_name: str) -> AbstractContextManager:
    def wrap(original: Callable) -> Callable:
        def all_reduce_(self: Axis, tensor: torch.Tensor, *, layer: str, phase: str) -> torch.Tensor:
            if self.name == axis_name and layer == "gradients":
                return tensor
            return original(self, tensor, layer=layer, phase=phase)

        return all_reduce_

    return replaced(Axis, "all_reduce_", wrap)


@fault
def sequence_axis_left_out() -> Iterator[None]:
    with _axis_left_out("sequence"):
        yield


@fault
def data_axis_left_out() -> Iterator[None]:
    with _axis_left_out("data"):
        yield


@fault
def positional_table_averaged_over_the_sequence() -> Iterator[None]:
    def change(model: torch.nn.Module) -> None:
        axis, gradient = context_of(model).sequence, model.positions.weight.grad
        axis.all_reduce_(gradient, layer="gradients", phase="step").div_(axis.size)

    with after_averaging(change):
        yield


@fault
def positional_table_left_out_of_the_data_axis() -> Iterator[None]:
    with _left_out("positions.weight"):
        yield


@fault
def tied_weight_counted_twice() -> Iterator[None]:
    with after_averaging(scaled(2.0, "tokens.weight")):
        yield


@fault
def gradients_swapped_in_a_bucket() -> Iterator[None]:
    def change(model: torch.nn.Module) -> None:
        first, second = model.blocks[0].attention_norm.bias.grad, model.blocks[0].feed_forward_norm.bias.grad
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)

    with after_averaging(change):
        yield


@fault
def clipped_by_the_local_norm() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def clip(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
            return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

        return clip

    with replaced(runs, "clip_gradient_norm", wrap):
        yield


@fault
def shared_parameters_counted_by_every_rank() -> Iterator[None]:
    with replaced(runs, "clip_gradient_norm", lambda original: lambda model, limit: original(model, limit) * 2**0.5):
        yield


@fault
def replicas_drift_apart() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def different(model: torch.nn.Module) -> list[str]:
            with torch.no_grad():
                model.norm.bias[0] += 1e-16 * context_of(model).sequence.rank + 1e-17
                if context_of(model).sequence.rank:
                    bits = model.norm.bias.view(torch.int64)
                    bits[0] += 1
            return original(model)

        return different

    with replaced(runs, "replicas_that_differ", wrap):
        yield


@fault
def ranks_start_from_different_weights() -> Iterator[None]:
    def change(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.blocks[0].attention.query.weight.add_(1e-6 * context_of(model).sequence.rank)

    with changed_model(change):
        yield
