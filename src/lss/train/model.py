"""A plain model made ready to be trained over ranks, as a configuration says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from lss.adapters.found import attention_modules
from lss.adapters.stacks import stacks
from lss.config import Config
from lss.errors import ModelError
from lss.gradients import positional_tables
from lss.strategies import parallelize_as


def prepare(plain: nn.Module, mesh: DeviceMesh | None, config: Config, holders: DeviceMesh | None = None) -> nn.Module:
    """Parallelize a model, in place; recompute and cut its parameters where the configuration says so.

    Args:
        plain: The model.
        mesh: Of `init_mesh`; None for one rank alone.
        config: Its sections `attention`, `parallel` and `train`.
        holders: Where parameters are cut, a mesh on their device: of one axis over all ranks, or with the strategy
            megatron-tp of the axes of `mesh`. Made by default.
    """
    layers = [name for stack in stacks_of(plain) for name in stack]
    train, parallel = config.train, config.parallel
    if train.recompute:
        for layer in map(plain.get_submodule, layers):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    options = {**asdict(config.attention), "seed": train.seed, "ordered": train.deterministic}
    if parallel.strategy == "megatron-tp":
        if parallel.shard_parameters:
            raise ModelError(
                "strategy megatron-tp with shard_parameters",
                allowed="one of them: both cut weights, over other ranks",
            )
        options["holders"] = holders
    model = parallelize_as(parallel.strategy, plain, mesh, **options)
    if parallel.shard_parameters and mesh is not None:
        _cut_parameters(model, layers, holders or init_device_mesh(mesh.device_type, (mesh.size(),)))
    return model


def stacks_of(model: nn.Module) -> list[list[str]]:
    """Names of the layers of each stack of a model."""
    return stacks(model, attention_modules(model))


def _cut_parameters(model: nn.Module, layers: Iterable[str], mesh: DeviceMesh) -> None:
    """Over all ranks, layer by layer; of positional tables each rank has its own rows already."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415  (takes long to import)

    tables = set(positional_tables(model))
    for part in (*map(model.get_submodule, layers), model):
        fully_shard(part, mesh=mesh, ignored_params=tables)
