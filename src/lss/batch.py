"""A batch of whole sequences to this rank's segment of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lss.errors import LayoutError
from lss.layout import Layout
from lss.mesh import DATA, SEQUENCE

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Segment:
    """What travels with a sharded batch and tells the parallelized model where its tokens belong.

    Args:
        layout: The layout of the batch's sequences.
        first_sample: Index of the batch's first sequence among all sequences of the step; keys the dropout.
        step: The step that the batch belongs to; None lets the model count its own calls.
    """

    layout: Layout
    first_sample: int
    step: int | None = None


def shard(
    batch: Mapping[str, Tensor],
    mesh: DeviceMesh,
    *,
    first_sample: int | None = None,
    step: int | None = None,
) -> dict[str, Any]:
    """Cut a batch of whole sequences into the segment of this rank.

    Labels must be shifted already: `labels[:, i]` is what is predicted at `tokens[:, i]`. Shifted inside a segment,
    the last token of each segment would be lost.

    Args:
        batch: Tensors of shape [B, L, ...], the same on every rank of a sequence group.
        mesh: The mesh of `init_mesh`, or any DeviceMesh with an axis `sequence`.
        first_sample: Index of the first sequence among all of the step; by default data rank * B.
        step: The step, which keys the dropout; by default the model counts its calls.

    Returns:
        The same keys with tensors [B, S, ...], empty slots filled with 0 and, in integer tensors named `labels`, with
        -100, which cross-entropy ignores; and `segment`, which the parallelized model takes beside its own arguments:
        `model(batch["tokens"], segment=batch["segment"])`.

    Raises:
        LayoutError: The tensors differ in length, or one has no sequence dim.
    """
    if not batch:
        raise LayoutError("an empty batch", allowed="at least one tensor of shape [B, L, ...]")
    shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
    lengths = {shape[1] if len(shape) > 1 else None for shape in shapes.values()}
    if len(lengths) != 1 or None in lengths:
        raise LayoutError(
            f"a batch of shapes {shapes}", allowed="tensors [B, L, ...] with one L", remedy="see lss.shard"
        )
    first = next(iter(batch.values()))
    names = mesh.mesh_dim_names or ()
    rank = mesh.get_local_rank(SEQUENCE) if SEQUENCE in names else 0
    layout = Layout(first.size(1), mesh[SEQUENCE].size() if SEQUENCE in names else 1)
    segment: dict[str, Any] = {
        name: layout.shard(tensor, rank, dim=1, fill=_fill(name, tensor)) for name, tensor in batch.items()
    }
    data_rank = mesh.get_local_rank(DATA) if DATA in names else 0
    segment["segment"] = Segment(layout, data_rank * first.size(0) if first_sample is None else first_sample, step)
    return segment


def _fill(name: str, tensor: Tensor) -> int:
    integers = not tensor.is_floating_point() and tensor.dtype != torch.bool
    return IGNORE_INDEX if name == "labels" and integers else 0
