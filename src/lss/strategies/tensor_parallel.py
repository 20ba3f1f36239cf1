"""Megatron's real form (Korthikanti et al., 2022): tensor parallel, with sequence parallel between its parts.

As in `megatron`, norms, dropout of residual branches, embeddings and loss work on segments, and attention and
feed-forward on whole sequences. Their weights are cut by heads and by columns, by torch's own styles, so that each rank
computes an N-th of them; their outputs are sums over the ranks. 4 collectives a block forward and 4 backward.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lss.attention import DistributedAttention
from lss.collectives import Axis
from lss.context import context_of
from lss.dropout import PositionDropout
from lss.errors import ModelError
from lss.ledger import Ledger
from lss.mesh import SEQUENCE
from lss.models import GPT
from lss.models.gpt import Block, FeedForward
from lss.parallelize import parallelize
from lss.strategies.megatron import compute_whole, require_gpt

# How torch cuts each projection of a block: by its outputs, or by its inputs.
_BY_OUTPUT = ("attention.query", "attention.key", "attention.value", "feed_forward.0")
_BY_INPUT = ("attention.output", "feed_forward.3")


def parallelize_tensors(model: GPT, mesh: DeviceMesh | None, holders: DeviceMesh | None = None, **options: Any) -> GPT:
    """Make a GPT tensor parallel over the ranks of a sequence, and sequence parallel in between.

    Args:
        model: A model of this package.
        mesh: As of `lss.parallelize`.
        holders: The same, on the device where weights are; None for where the ranks compute.
        options: The same.

    Raises:
        ModelError: The model is another one, or its heads or columns cannot be shared out evenly.
    """
    require_gpt(model, "megatron-tp")
    size = Axis.of(mesh, SEQUENCE, Ledger()).size
    if model.config.heads % size or model.config.num_key_value_heads % size:
        raise ModelError(
            f"{model.config.heads} heads, {model.config.num_key_value_heads} of them with keys, over {size} ranks",
            allowed="with strategy megatron-tp, a number of ranks that divides both: weights are cut by heads",
            remedy="strategy megatron, whose ranks hold all weights, or fewer ranks a sequence",
        )
    parallelize(model, mesh, **options)
    if mesh is not None and size > 1:
        ranks = (holders or mesh)[SEQUENCE]
        _cut_dropout(model)
        _cut_weights(model, ranks)
        compute_whole(model, ranks)
        context_of(model).is_tensor_parallel = True
    return model


def _cut_weights(model: GPT, ranks: DeviceMesh) -> None:
    from torch.distributed.tensor import Partial  # noqa: PLC0415  (takes long to import)
    from torch.distributed.tensor.parallel import (  # noqa: PLC0415
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        parallelize_module,
    )

    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in _BY_OUTPUT}
    styles |= {name: RowwiseParallel(output_layouts=Partial()) for name in _BY_INPUT}
    for block in model.blocks:
        parallelize_module(block, ranks, styles, src_data_rank=None)


def _cut_dropout(model: GPT) -> None:
    """Each rank draws the masks of its columns and heads."""
    axis = context_of(model).sequence
    sites = [part.site for block in model.blocks for part in _feed_forward(block) if isinstance(part, PositionDropout)]
    forwards = (module.forward for module in model.modules())
    sites += [forward.dropout for forward in forwards if isinstance(forward, DistributedAttention) and forward.dropout]
    for site in sites:
        site.part = axis.rank, axis.size


def _feed_forward(block: nn.Module) -> FeedForward:
    return cast(Block, block).feed_forward
