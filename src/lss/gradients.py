"""Double gradient averaging, and the global norm (paper, Principle 4 and Section 4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from lss.collectives import Axis
from lss.context import SequenceContext, context_of, is_parallelized
from lss.errors import ModelError
from lss.fully_sharded import is_cut, like, num_copies, own_part, require_summed, settle, whole
from lss.positions import ShardedPositions

BUCKET_BYTES = 25 * 2**20


def positional_tables(model: nn.Module) -> list[nn.Parameter]:
    """Weights of which each rank of the sequence group holds other rows."""
    return [module.weight for module in model.modules() if isinstance(module, ShardedPositions)]


def replicated_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Weights that are the same on every rank, each once."""
    tables = {id(weight) for weight in positional_tables(model)}
    return [weight for weight in model.parameters() if id(weight) not in tables and not is_cut(weight)]


def cut_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Weights that `fully_shard` has cut over ranks, and whose gradients it sums."""
    is_tensor_parallel = is_parallelized(model) and context_of(model).is_tensor_parallel
    return [] if is_tensor_parallel else [weight for weight in model.parameters() if is_cut(weight)]


def parts_of_ranks(model: nn.Module) -> list[nn.Parameter]:
    """Weights of which each rank of the sequence group holds another part, whose gradients are its own."""
    parts = [weight for weight in model.parameters() if is_cut(weight)] if context_of(model).is_tensor_parallel else []
    return positional_tables(model) + parts


def replicas_that_differ(model: nn.Module) -> list[str]:
    """Names of parameters that are not bit-identical on all ranks that share them. A collective call.

    Compared is a checksum of the bit patterns of each parameter, modulo 2**64: eight bytes a parameter are sent. What
    `fully_shard` has cut is put together first.
    """
    context = context_of(model)
    settle(model)
    tables = {id(weight) for weight in positional_tables(model)}
    names, weights = zip(*model.named_parameters(), strict=True)
    sums = torch.stack([_bit_sum(whole(weight)) for weight in weights])[None]
    groups = context.data.all_gather(sums, layer="replicas", phase="step")
    segments = context.sequence.all_gather(sums, layer="replicas", phase="step")
    shared = torch.tensor([id(weight) not in tables for weight in weights], device=sums.device)
    different = (groups != groups[0]).any(0) | ((segments != segments[0]).any(0) & shared)
    on_any_rank = context.gather_from_ranks(different.int()).any(0)
    return [name for name, bad in zip(names, on_any_rank.tolist(), strict=True) if bad]


def average_gradients(model: nn.Module) -> None:
    """Complete the gradients of a batch, once, after its last backward. A collective call.

    First over the sequence group without the positional tables, whose rows live on one rank each; then over the data
    group with them. Every rank's loss is its local sum divided by the global token count
    (`token_mean_cross_entropy`), so the mean is a sum here and nothing is scaled again. Messages are buckets of at
    most 25 MB, or one larger parameter. What `fully_shard` has cut is summed already.

    Raises:
        ModelError: The model was not parallelized, its gradients are averaged already, or parameters were added.
        RankLostError: A rank is gone.
    """
    context = context_of(model)
    require_same_parameters(model, context)
    context.require_averaged(False)
    settle(model)
    require_summed(model, context)
    context.is_averaged = True
    _sum_gradients(_trained(replicated_parameters(model)), [context.sequence, context.data])
    _sum_gradients(_trained(parts_of_ranks(model)), [context.data])


def num_parameters(model: nn.Module) -> tuple[int, int]:
    """Parameters of a model, and numbers in them."""
    sizes = [weight.numel() for weight in model.parameters()]
    return len(sizes), sum(sizes)


def require_same_parameters(model: nn.Module, context: SequenceContext) -> None:
    """Raise ModelError where parameters were added or replaced, as by peft: they would differ between ranks."""
    found, known = num_parameters(model), context.num_parameters
    if found != known:
        raise ModelError(
            f"the model has {found[0]} parameters of {found[1]} numbers, and had {known[0]} of {known[1]} when it was "
            "parallelized",
            remedy="add adapters and resize embeddings before lss.parallelize; of torch's wrappers take fully_shard "
            "or DistributedDataParallel",
        )


def gradient_norm(model: nn.Module) -> Tensor:
    """L2 norm of the gradient of the whole model: shared parameters once, what is cut over its owners.

    Call it after `average_gradients`. A collective call where there are positional tables, or `fully_shard`.

    Returns:
        A scalar in float64.
    """
    context = context_of(model)
    context.require_averaged(True)
    settle(model)
    total = _squared_sum(replicated_parameters(model))
    for weights, axes in (
        (parts_of_ranks(model), [context.sequence]),
        (cut_parameters(model), [context.sequence, context.data]),
    ):
        if weights:
            parts = _squared_sum(weights)
            for axis in axes:
                axis.all_reduce_(parts, layer="norm", phase="step")
            total = total + parts
    return total.sqrt()


def clip_gradient_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; the norm before is returned.

    Does on segments what `torch.nn.utils.clip_grad_norm_` does on one device.
    """
    norm = gradient_norm(model)
    for wanted in (True, False):  # torch scales what is cut apart from what is not
        weights = [weight for weight in model.parameters() if is_cut(weight) == wanted]
        torch.nn.utils.clip_grads_with_norm_(weights, max_norm, norm)
    return norm


def buckets(tensors: Iterable[Tensor], limit: int = BUCKET_BYTES) -> Iterator[list[Tensor]]:
    """Group tensors of one dtype, in order, into lists of at most `limit` bytes (a larger tensor stands alone)."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in group:
            num_bytes = tensor.numel() * tensor.element_size()
            if bucket and size + num_bytes > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += num_bytes
        yield bucket


def _trained(weights: list[nn.Parameter]) -> list[nn.Parameter]:
    return [weight for weight in weights if weight.requires_grad]


def _sum_gradients(weights: list[nn.Parameter], axes: list[Axis]) -> None:
    if all(axis.size == 1 for axis in axes):
        return
    for bucket in buckets(weights):
        _sum_bucket(bucket, axes)


def _sum_bucket(weights: list[Tensor], axes: list[Axis]) -> None:
    """One message an axis. A flag for each weight travels along: one that no rank used keeps its gradient None."""
    own = [own_part(weight) for weight in weights]
    used = own[0].new_tensor([weight.grad is not None for weight in weights])
    parts = [
        (torch.zeros_like(part) if weight.grad is None else own_part(weight.grad)).reshape(-1)
        for weight, part in zip(weights, own, strict=True)
    ]
    message = torch.cat([used, *parts])
    message = message.float() if message.element_size() < 4 else message  # 16-bit sums would lose more with every rank
    for axis in axes:
        axis.all_reduce_(message, layer="gradients", phase="step")
    flags, *sums = message.split([len(weights), *(part.numel() for part in own)])
    for index, (weight, part, total) in enumerate(zip(weights, own, sums, strict=True)):
        if weight.grad is not None:
            own_part(weight.grad).copy_(total.view_as(part))
        elif flags[index]:
            weight.grad = like(weight, total.view_as(part).to(part.dtype, copy=True))


def _squared_sum(weights: list[nn.Parameter]) -> Tensor:
    """Of the gradients' parts on this rank, each divided by the number of ranks that hold the same."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=weights[0].device if weights else None)
    parts = ((own_part(gradient), num_copies(gradient)) for gradient in gradients)
    squares = [torch.linalg.vector_norm(part, dtype=_norm_dtype(part)).double() ** 2 / copies for part, copies in parts]
    return torch.stack(squares).sum()


def _norm_dtype(gradient: Tensor) -> torch.dtype:
    """float64, complex or not."""
    return torch.promote_types(gradient.dtype, torch.float64)


def _bit_sum(weight: Tensor) -> Tensor:
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(weight.element_size(), torch.int64)
    found = weight.detach().reshape(-1).view(bits)
    places = torch.arange(1, found.numel() + 1, device=found.device)
    return (found * places).sum()  # places count differently, so that values which change places are seen
