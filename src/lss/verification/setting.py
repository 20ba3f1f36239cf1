"""What both runs of a verification share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from lss.adapters import transformers
from lss.batch import IGNORE_INDEX, Cut
from lss.collectives import Axis
from lss.config import AttentionConfig
from lss.errors import LayoutError
from lss.outputs import Outputs, join, takes_labels
from lss.strategies import StrategyName

# (outputs, labels) to a sum over tokens; labels of -100 must add nothing.
LossSum = Callable[[Tensor, Tensor], Tensor]
# What `shard` takes in: the model does not see it.
_TAKEN_IN = ("labels", "attention_mask", "position_ids")


def cross_entropy_sum(outputs: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropies of logits [B, S, vocabulary], in nats."""
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


@dataclass(frozen=True)
class Setting:
    """The batch of all data groups, and how it is run.

    Args:
        batch: Tensors [B, L, ...], `labels` among them.
        mesh: The mesh to run over.
        attention: How attention is computed.
        loss_sum: The loss, as a sum over tokens; None for the model's own if it returns one, else cross-entropy.
        documents: Lengths of packed documents, a list a sequence; None for none.
        dtype: In which all is computed.
        shift_labels: As of `shard`.
        cut: As of `parallelize` and `shard`.
        strategy: As of `lss.strategies.parallelize_as`.
    """

    batch: dict[str, Tensor]
    mesh: DeviceMesh
    attention: AttentionConfig
    loss_sum: LossSum | None
    documents: Sequence[Sequence[int]] | None
    dtype: torch.dtype
    shift_labels: int
    cut: Cut = "tokens"
    strategy: StrategyName = "lss"

    def __post_init__(self) -> None:
        dims = 1 if self.cut == "layers" else 2
        wrong = [name for name, part in self.batch.items() if not isinstance(part, Tensor) or part.dim() < dims]
        if wrong:
            raise LayoutError(f"a batch whose {', '.join(wrong)} cannot be cut", allowed="tensors [B, L, ...]")
        if "labels" not in self.batch or not self.inputs:
            raise LayoutError(
                f"a batch of {sorted(self.batch)}",
                allowed="the model's arguments by name, and `labels`",
            )
        if self.is_as_given and (self.documents is not None or (self.cut == "layers" and self.shift_labels)):
            raise LayoutError(
                "documents or shift_labels, for a batch that the plain model is given as it is",
                allowed="padding by masks, and labels as the model takes them",
            )
        if self.batch["labels"].is_floating_point() or self.batch["labels"].dtype == torch.bool:
            raise LayoutError(
                f"labels of {self.batch['labels'].dtype}", allowed="labels of integers, of which -100 is ignored"
            )

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The model's arguments."""
        taken_in = ("labels",) if self.is_as_given else _TAKEN_IN
        return {name: part for name, part in self.batch.items() if name not in taken_in}

    @property
    def is_as_given(self) -> bool:
        """Whether the plain model is given the batch as it is, masks too: of an encoder and a decoder, or whole."""
        return self.cut == "layers" or any(name.startswith("decoder_") for name in self.batch)

    @property
    def of_tokens(self) -> tuple[int, ...]:
        """B and L, which outputs begin with; B alone where outputs may be of whole sequences."""
        return tuple(self.batch["labels"].shape[: 1 if self.cut == "layers" else 2])

    @cached_property
    def labels(self) -> Tensor:
        """Labels of the token to be predicted [B, L, ...], those of padding ignored."""
        given = self.batch["labels"].long()
        if self.cut == "layers":
            return given
        labels = torch.full_like(given, IGNORE_INDEX)
        for row, pieces in enumerate(self.pieces):
            for start, stop in pieces:
                for slot in range(start, stop - self.shift_labels):
                    labels[row, slot] = given[row, slot + self.shift_labels]
        return labels

    @cached_property
    def pieces(self) -> list[list[tuple[int, int]]]:
        """Slots of the documents of each sequence, found without the rest of this package."""
        num_sequences, length = self.batch["labels"].shape[:2]
        prefix = "decoder_" if self.is_as_given else ""
        real = self.batch.get(f"{prefix}attention_mask", torch.ones(num_sequences, length))
        starts = self.batch.get("position_ids", torch.ones(num_sequences, length)) == 0
        found = []
        for row in range(num_sequences):
            if self.documents is not None:
                found.append(list(pairwise(accumulate(self.documents[row], initial=0))))
                continue
            slots = real[row].nonzero().flatten().tolist()
            edges = [slot for slot in slots if slot == slots[0] or starts[row, slot]] + slots[-1:]
            found.append([(start, stop) for start, stop in pairwise([*edges[:-1], edges[-1] + 1])] if slots else [])
        return found

    @cached_property
    def real(self) -> Tensor:
        """Slots that hold a token and no padding: bool [B, L]; bool [B] where outputs may be of whole sequences."""
        if self.cut == "layers":
            return torch.ones(self.of_tokens, dtype=torch.bool, device=self.batch["labels"].device)
        real = torch.zeros(self.batch["labels"].shape[:2], dtype=torch.bool, device=self.batch["labels"].device)
        for row, pieces in enumerate(self.pieces):
            for start, stop in pieces:
                real[row, start:stop] = True
        return real

    def real_of(self, length: int) -> Tensor:
        """The same for sequences of so many tokens, which may be an encoder's."""
        if self.real.dim() > 1 and self.real.size(1) == length:
            return self.real
        mask = self.batch.get("attention_mask")
        if mask is not None and mask.shape[1:] == (length,):
            return mask.bool()
        return torch.ones(len(self.real), length, dtype=torch.bool, device=self.real.device)

    @property
    def is_whole(self) -> bool:
        """Whether every sequence is one document."""
        return self.cut == "layers" or all(pieces == [(0, self.real.size(1))] for pieces in self.pieces)

    def gives_labels(self, model: nn.Module) -> bool:
        """Whether the model is given labels, to work out its loss itself."""
        return self.loss_sum is None and takes_labels(model)

    def run_plainly(
        self, model: nn.Module, on_piece: Callable[[int, slice], None] = lambda row, slots: None
    ) -> Outputs:
        """Outputs of the plain model and the mean loss: of each document by itself, put together, where there are any.

        Args:
            model: The plain model.
            on_piece: Told which sequence and slots come next, where documents are run one by one.
        """
        if self.is_whole or self.is_as_given:
            return self._with_loss(self._call(model, slice(None), slice(None)))
        pieces, numbers = [], []
        for row, spans in enumerate(self.pieces):
            for start, stop in spans:
                on_piece(row, slice(start, stop))
                pieces.append(self._call(model, slice(row, row + 1), slice(start, stop)))
                numbers.append(int((self.labels[row, start:stop] != IGNORE_INDEX).sum()))
        if not pieces:
            raise LayoutError("a batch of padding alone", allowed="some real token")
        return self._with_loss(join(pieces, numbers, self.real))

    def _call(self, model: nn.Module, rows: slice, slots: slice) -> Outputs:
        has_labels = self.gives_labels(model)
        wanted = self.inputs | ({"labels": self.batch["labels"]} if has_labels else {})
        if self.is_as_given:
            return Outputs.of(model(**wanted), self.of_tokens, has_labels=has_labels)
        given = {name: part[rows, slots] for name, part in wanted.items()}
        shape = self.batch["labels"][rows, slots].shape
        return Outputs.of(model(**given), shape[:2], has_labels=has_labels)

    def _with_loss(self, outputs: Outputs) -> Outputs:
        if outputs.loss is not None:
            return outputs
        count = (self.labels != IGNORE_INDEX).sum().clamp(min=1)
        return replace(outputs, loss=(self.loss_sum or cross_entropy_sum)(outputs.logits, self.labels) / count)

    def rows_of_group(self, data: Axis) -> slice:
        """Sequences of this rank's data group.

        Raises:
            LayoutError: The sequences cannot be shared out evenly.
        """
        num_sequences = len(self.batch["labels"])
        if num_sequences % data.size:
            raise LayoutError(
                f"{num_sequences} sequences over {data.size} data groups", allowed=f"a multiple of {data.size}"
            )
        share = num_sequences // data.size
        return slice(data.rank * share, (data.rank + 1) * share)

    def of_group(self, data: Axis) -> tuple[dict[str, Tensor], Sequence[Sequence[int]] | None]:
        """The batch and the documents of this rank's data group."""
        rows = self.rows_of_group(data)
        batch = {name: part[rows] for name, part in self.batch.items()}
        return batch, None if self.documents is None else self.documents[rows]

    @property
    def _way(self) -> str:
        return f"gather {self.attention.gather}" if self.strategy == "lss" else self.strategy

    def title(self, model: str) -> str:
        """What is compared, in a line."""
        num_sequences = len(self.real)
        of = "cut in the layers" if self.cut == "layers" else f"of {self.real.size(1)} tokens"
        degrees = " x ".join(f"{name} {size}" for name, size in zip(*_named(self.mesh), strict=True))
        number = 0 if self.cut == "layers" else sum(len(pieces) for pieces in self.pieces)
        documents = "" if self.is_whole or self.is_as_given else f" in {number} documents"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{model}, {num_sequences} sequence{'s'[: num_sequences > 1]} {of}{documents}, "
            f"{degrees}, {self._way}, {self.attention.layout}, {dtype}"
        )


def without_dropout(model: nn.Module) -> tuple[nn.Module, bool]:
    """A copy with all rates at zero, and whether any was not: of modules, and of attention weights."""
    bare, found = copy.deepcopy(model), False
    for module in transformers.attention_modules(bare).values():
        rates = [name for name, rate in vars(module).items() if "drop" in name and isinstance(rate, float) and rate]
        vars(module).update(dict.fromkeys(rates, 0.0))
        found = found or bool(rates)
    for module in bare.modules():
        if isinstance(module, nn.Dropout) and module.p:
            module.p, found = 0.0, True
        if isinstance(getattr(module, "attention_dropout", None), float | int) and module.attention_dropout:
            module.attention_dropout, found = 0.0, True  # type: ignore[assignment]
    return bare, found


def _named(mesh: DeviceMesh) -> tuple[tuple[str, ...], tuple[int, ...]]:
    names = mesh.mesh_dim_names or ()
    return names, tuple(mesh[name].size() for name in names)
