"""A batch of whole sequences to this rank's segment of it, and outputs back to whole sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lss import documents as spans
from lss.collectives import Axis
from lss.documents import Documents
from lss.errors import LayoutError
from lss.layout import Layout, LayoutName
from lss.ledger import Ledger
from lss.mesh import DATA, SEQUENCE
from lss.segment import Segment, Whole

IGNORE_INDEX = -100
# Where a model's tokens are cut: in the batch, or on the way into its layers.
Cut = Literal["tokens", "layers"]
CUTS: tuple[str, ...] = get_args(Cut)
# What is no sequence of tokens yet: an encoder makes one of it, and cuts that.
_UNCUT = ("pixel_values", "input_features", "input_values")
# Values of each tensor of a batch, evenly spread, of which its checksum is made.
_CHECKED = 2**20


def shard(
    batch: Mapping[str, Tensor],
    mesh: DeviceMesh | None,
    *,
    shift_labels: int | None = None,
    layout: LayoutName | Layout = "zigzag",
    documents: Sequence[Sequence[int]] | None = None,
    first_sample: int | None = None,
    step: int | None = None,
    cut: Cut = "tokens",
) -> dict[str, Any]:
    """Cut a batch of whole sequences into the segment of this rank.

    Two keys say how tokens belong together; they are taken in and not returned. `attention_mask` [B, L] is 0 on
    padding, left or right. `position_ids` [B, L] start again from 0 where a packed document begins. Attention, labels
    and positions never cross a document or touch padding. Without `position_ids`, positions count from the first token
    of each document.

    Args:
        batch: Tensors of shape [B, L, ...], the same on every rank of a sequence group.
        mesh: The mesh of `init_mesh`, or any DeviceMesh with an axis `sequence`; None for one rank alone.
        shift_labels: Needed where there are integer `labels`. 0: they are shifted already, `labels[:, i]` is what is
            predicted at `tokens[:, i]`. 1: they equal the tokens, and the next one is predicted; 2: the one after it.
            The shift is done on whole documents, so that no label is lost where a segment ends.
        layout: Which tokens a rank gets. `zigzag` shares out a causal mask's work evenly, and any other's no worse than
            `contiguous`, which is the paper's; `balanced` shares out that of causal attention within the documents of
            the batch. Or a layout of your own.
        documents: Lengths of packed documents for each sequence, from its start on; the rest is padding.
        first_sample: Index of the first sequence among all of the step; by default data rank * B.
        step: The step, which keys the dropout; by default the model counts its calls.
        cut: `tokens`; or `layers` for a model that was parallelized with `cut="layers"`: nothing is cut or taken in.

    Images and sounds (`pixel_values`, `input_features`, `input_values`) are not cut: the model cuts what it makes of
    them. Of an encoder and a decoder, all that is named `decoder_...` and `labels` is the decoder's sequence, of a
    length of its own.

    Returns:
        The same keys with tensors [B, S, ...]; and `segment`, which the parallelized model takes beside its arguments:
        `model(batch["tokens"], segment=batch["segment"])`. Where a rank has fewer tokens than slots, integer `labels`
        of empty slots are -100, which losses ignore, boolean masks False, and all else repeats the last token.

    Raises:
        LayoutError: Tensors differ in length, labels come without `shift_labels`, or documents do not fit.
    """
    if cut not in CUTS:
        raise LayoutError(f"cut={cut!r}", allowed=" or ".join(CUTS))
    given = _Given(mesh, shift_labels, layout, documents, first_sample, step)
    of_decoder = {name: batch[name] for name in batch if name.startswith("decoder_") or name == "labels"}
    predicts = len(of_decoder) > ("labels" in of_decoder)
    if cut == "layers" and shift_labels:
        raise LayoutError(
            f"shift_labels={shift_labels} with cut='layers'",
            allowed="labels as the model takes them, which is given whole sequences",
        )
    if cut == "layers" or (not predicts and any(name in batch for name in _UNCUT)):
        return {**batch, "segment": given.whole(batch)}
    if not predicts:
        return given.cut(batch)
    if documents is not None or isinstance(layout, Layout):
        raise LayoutError(
            "documents, or a layout of one length, for an encoder and a decoder",
            allowed="padding by attention_mask and decoder_attention_mask, and the name of a layout",
        )
    of_encoder = {name: batch[name] for name in batch if name not in of_decoder}
    uncut = any(name in of_encoder for name in _UNCUT)
    source = {**of_encoder, "segment": given.whole(of_encoder)} if uncut else given.cut(of_encoder)
    target = given.cut(of_decoder, prefix="decoder_")
    return {**source, **target, "segment": replace(target["segment"], source=source["segment"])}


@dataclass(frozen=True)
class _Given:
    """What `shard` was given beside the batch."""

    mesh: DeviceMesh | None
    shift_labels: int | None
    layout: LayoutName | Layout
    documents: Sequence[Sequence[int]] | None
    first_sample: int | None
    step: int | None

    def whole(self, batch: Mapping[str, Tensor]) -> Whole:
        """Of a batch that is not cut."""
        return Whole(self.first_sample, self.step, _checksum(batch, ()))

    def cut(self, batch: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any]:
        """One sequence's tensors, each of this rank's slots, and their segment."""
        num_sequences, length, device = _common_shape(batch)
        keys = [key for key in ("attention_mask", "position_ids") if prefix + key in batch]
        told: Mapping[str, Tensor] = {key: batch[prefix + key] for key in keys}
        told = _without_positions_of_padding(told)
        axis, data_rank = _axis(self.mesh, SEQUENCE), _axis(self.mesh, DATA).rank
        found = _documents(told, self.documents, num_sequences, length)
        layout = self.layout
        cut_by = layout if isinstance(layout, Layout) else _layout(layout, length, axis.size, found)
        names = [name for name in batch if name.removeprefix(prefix) not in told]
        whole = {name: _shifted(name, batch[name], self.shift_labels, found) for name in names}
        cut: dict[str, Any] = {
            name: cut_by.shard(tensor, axis.rank, dim=1, fill=_fill(name, tensor)) for name, tensor in whole.items()
        }
        plain = found == spans.whole(num_sequences, length)
        positions = None
        if not plain or "position_ids" in told:
            positions = told.get("position_ids", spans.positions_within(found, length)).to(device)
        cut["segment"] = Segment(
            cut_by,
            data_rank * num_sequences if self.first_sample is None else self.first_sample,
            self.step,
            None if plain else found,
            positions,
            length if positions is None else int(positions.max()) + 1,
            _checksum(whole, found),
            has_labels="labels" in batch,
        )
        return cut


def unshard(outputs: Tensor, segment: Segment | Whole, mesh: DeviceMesh | None, *, data_groups: bool = False) -> Tensor:
    """Put the segments of a batch together again: [B, S, ...] to [B, L, ...], in order. A collective call.

    Outputs of a batch that was not cut are whole already.

    Args:
        outputs: What a rank computed for its slots; detached.
        segment: What `shard` returned with the batch.
        mesh: The mesh of the batch.
        data_groups: Whether to join the batches of all data groups too, in order: [M * B, L, ...].
    """
    whole = outputs.detach() if isinstance(segment, Whole) else _joined(outputs, segment, mesh)
    if not data_groups:
        return whole
    data = _axis(mesh, DATA)
    shape = torch.tensor([whole.shape], device=whole.device)
    shapes = data.all_gather(shape, layer="outputs", phase="step")
    if (shapes != shape).any():
        raise LayoutError(
            f"outputs of data groups have the shapes {shapes.tolist()}",
            allowed="one shape in all data groups",
            remedy="unshard each group's alone (data_groups=False), or give all groups batches of one shape",
        )
    return data.all_gather(whole, layer="outputs", phase="step")


def _joined(outputs: Tensor, segment: Segment, mesh: DeviceMesh | None) -> Tensor:
    if outputs.dim() < 2 or outputs.size(1) != segment.layout.segment_length:
        raise LayoutError(
            f"outputs of shape {tuple(outputs.shape)} of a segment of {segment.layout.segment_length} slots",
            allowed=f"[B, {segment.layout.segment_length}, ...]: a value for each slot",
        )
    by_slot = outputs.detach().transpose(0, 1)  # [B, S, ...] -> [S, B, ...]
    gathered = _axis(mesh, SEQUENCE).all_gather(by_slot, layer="outputs", phase="step")
    return segment.layout.unshard(gathered, dim=0).transpose(0, 1).contiguous()  # [N * S, B, ...] -> [B, L, ...]


def _checksum(batch: Mapping[str, Tensor], found: Documents) -> Tensor:
    """A sum in which places count differently, so that other sequences, or another order, give another."""
    tensors = [part for part in batch.values() if isinstance(part, Tensor)]
    device = tensors[0].device if tensors else None
    sums = [torch.tensor(float(hash(found) % 2**31), dtype=torch.float64, device=device)]
    for tensor in tensors:
        every = -(-tensor.numel() // _CHECKED)
        flat = tensor.detach().reshape(-1)[::every].double().nan_to_num()
        sums.append((flat * torch.arange(1, flat.numel() + 1, device=flat.device).remainder(9973)).sum())
    return torch.stack(sums).sum()


def require_one_batch(checksum: Tensor, sequence: Axis) -> None:
    """Raise LayoutError unless all ranks of a sequence group cut the same batch. A collective call.

    Args:
        checksum: What the segment says; float64 scalar.
        sequence: The group.
    """
    found = sequence.all_gather(checksum.reshape(1), layer="batch", phase="setup")
    if (found != found[0]).any():
        raise LayoutError(
            "ranks of one sequence group were given different batches",
            allowed="the same whole sequences on every rank of a sequence group; other ones in other data groups",
            remedy="seed the data by mesh.get_local_rank('data'), not by rank",
        )


def _axis(mesh: DeviceMesh | None, name: str) -> Axis:
    return Axis.of(mesh, name, Ledger())


def _common_shape(batch: Mapping[str, Tensor]) -> tuple[int, int, torch.device]:
    if not batch:
        raise LayoutError("an empty batch", allowed="at least one tensor of shape [B, L, ...]")
    wrong = [name for name, part in batch.items() if not isinstance(part, Tensor)]
    if wrong or "segment" in batch:
        raise LayoutError(
            f"a batch with {', '.join(wrong or ['segment'])}",
            allowed="tensors [B, L, ...], under any name but `segment`, which lss.shard adds",
            remedy="keep what is not cut by tokens, such as a label a sequence, out of lss.shard",
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
    if len({shape[:2] for shape in shapes.values()}) != 1 or any(len(shape) < 2 for shape in shapes.values()):
        raise LayoutError(
            f"a batch of shapes {shapes}",
            allowed="tensors [B, L, ...] with one B and one L; those of a decoder, decoder_..., may have another",
            remedy="keep what is not cut by tokens, such as a label a sequence, out of lss.shard; make "
            "decoder_input_ids of the whole labels",
        )
    if not min(next(iter(shapes.values()))[:2]):
        raise LayoutError(f"a batch of shapes {shapes}", allowed="at least one sequence and one token")
    first = next(iter(batch.values()))
    return first.size(0), first.size(1), first.device


def _without_positions_of_padding(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if "attention_mask" not in batch or "position_ids" not in batch:
        return batch
    mask, positions = batch["attention_mask"], batch["position_ids"]
    if mask.shape != positions.shape:
        return batch  # refused later, by name
    return {**batch, "position_ids": positions.masked_fill(mask == 0, 0)}


def _documents(
    batch: Mapping[str, Tensor], lengths: Sequence[Sequence[int]] | None, num_sequences: int, length: int
) -> Documents:
    if lengths is not None and "attention_mask" in batch:
        raise LayoutError(
            "document lengths and an attention_mask", allowed="one of them", remedy="what no document holds is padding"
        )
    if lengths is not None:
        cut = spans.from_lengths(lengths, num_sequences, length)
        if "position_ids" in batch and spans.split_at_restarts(batch["position_ids"], cut) != cut:
            raise LayoutError(
                "position_ids that start again inside a document of `documents`",
                allowed="documents that begin where positions start again",
            )
        return cut
    found = spans.whole(num_sequences, length)
    if "attention_mask" in batch:
        mask = batch["attention_mask"]
        if mask.dim() != 2:
            raise LayoutError(
                f"an attention_mask of shape {tuple(mask.shape)}",
                allowed="a padding mask [B, L]; causality is the model's own",
            )
        found = spans.from_padding(mask)
    return spans.split_at_restarts(batch["position_ids"], found) if "position_ids" in batch else found


def _layout(name: LayoutName, length: int, num_ranks: int, found: Documents) -> Layout:
    if name != "balanced":
        return Layout.named(name, length, num_ranks)
    seen = spans.positions_within(found, length) + (spans.starts(found, length) >= 0)
    return Layout.balanced(length, num_ranks, seen.sum(0).tolist())


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _fill(name: str, tensor: Tensor) -> float | None:
    """What empty slots hold; None for the last token again."""
    if name == "labels" and _is_integer(tensor):
        return IGNORE_INDEX
    return 0 if tensor.dtype == torch.bool else None


def _shifted(name: str, tensor: Tensor, offset: int | None, found: Documents) -> Tensor:
    """Integer labels by `offset`; any other tensor as it is."""
    if name != "labels" or not _is_integer(tensor):
        if name == "labels" and offset:
            raise LayoutError(f"shift_labels={offset} with labels of {tensor.dtype}", allowed="integer labels")
        if ("label" in name or "target" in name) and _is_integer(tensor):
            raise LayoutError(
                f"integer {name!r} in a batch", allowed="integer labels under the name 'labels', filled with -100"
            )
        return tensor
    if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0:
        raise LayoutError(
            f"integer labels with shift_labels={offset}",
            allowed="0 where labels are shifted already, 1 where they equal the tokens and the next one is predicted",
            remedy="say lss.shard(batch, mesh, shift_labels=...)",
        )
    return spans.shift(tensor.long(), offset, found, IGNORE_INDEX)
