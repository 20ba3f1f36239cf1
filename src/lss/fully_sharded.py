"""Parameters that torch's `fully_shard` cuts over ranks, with their gradients and optimizer states.

It adds the gradients of the ranks up itself, in backward. What is left is to have it take sums, as every rank's
gradient is its share, and to refuse where it goes over other ranks than those of the model.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from lss.context import SequenceContext
from lss.errors import ModelError
from lss.fake import has_values

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_cut(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether a tensor is a DTensor; the library is not imported to find out."""
    library = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(tensor, library.DTensor)


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if is_cut(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank. A collective call where it is cut."""
    return tensor.full_tensor().detach() if is_cut(tensor) else tensor


def cut_like(tensor: Tensor, weight: Tensor) -> Tensor:
    """This rank's part of a whole tensor that every rank holds, if `weight` is cut; nothing is sent."""
    if not is_cut(weight):
        return tensor
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415  (takes long to import)

    return distribute_tensor(tensor.to(weight.device), weight.device_mesh, weight.placements, src_data_rank=None)


def like(weight: Tensor, part: Tensor) -> Tensor:
    """This rank's part as a tensor that is cut as a weight is."""
    if not is_cut(weight):
        return part
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  (takes long to import)

    return DTensor.from_local(part, weight.device_mesh, weight.placements)


def num_copies(tensor: Tensor) -> int:
    """How many ranks hold the same part of a DTensor; 1 for other tensors."""
    if not is_cut(tensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())


def prepare(model: nn.Module) -> None:
    """Have `fully_shard` sum gradients; before backward."""
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor


def settle(model: nn.Module) -> None:
    """Put the parts of parameters back where a call of the model has left them whole."""
    for module in sharded_modules(model):
        module.reshard()


def require_summed(model: nn.Module, context: SequenceContext) -> None:
    """Raise ModelError unless `fully_shard` has summed gradients, over the ranks of the model."""
    for module in sharded_modules(model):
        # no public call tells
        groups = module._get_fsdp_state()._fsdp_param_groups
        if not all(group.reduce_grads and group.all_reduce_grads for group in groups):
            raise ModelError(
                "gradients that fully_shard was told not to sum",
                remedy="model.set_requires_gradient_sync(True) before the last backward of a batch",
            )
    is_checked = has_values() and not context.is_tensor_parallel
    for weight in filter(is_cut, model.parameters()) if is_checked else ():
        _require_ranks(weight.device_mesh.mesh.flatten().tolist(), context)


def sharded_modules(model: nn.Module) -> list[Any]:
    """Modules on which `fully_shard` was called; the library is not imported to find out."""
    library = sys.modules.get("torch.distributed.fsdp")
    if library is None:
        return []
    return [module for module in model.modules() if isinstance(module, library.FSDPModule)]


def _require_ranks(ranks: list[int], context: SequenceContext) -> None:
    axes = (context.sequence, context.data)
    number = math.prod(axis.size for axis in axes)
    groups = (axis.group for axis in axes if axis.group is not None)
    if len(ranks) != number or any(not set(dist.get_process_group_ranks(group)) <= set(ranks) for group in groups):
        raise ModelError(
            f"parameters that are cut over the ranks {ranks}",
            allowed=f"fully_shard over a mesh of all {number} ranks of the model",
            remedy="fully_shard without a mesh cuts over all ranks; with mesh=mesh, over those of a sequence group",
        )
