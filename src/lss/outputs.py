"""What a call of a model gives: tensors by name, and a loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lss.errors import ModelError


@dataclass(frozen=True)
class Outputs:
    """What a call of a model gave.

    Args:
        tensors: Those of tokens, [B, S, ...], or of sequences, [B, ...], by name: `logits`, `hidden_states.0`, of a
            tuple `0`. The name is empty where the model returns one tensor.
        loss: A scalar: the loss that the model worked out itself; None for none.
        left_out: Names of tensors of another shape, which cannot be compared.
    """

    tensors: dict[str, Tensor]
    loss: Tensor | None = None
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, returned: Any, tokens: Sequence[int], *, has_labels: bool) -> Outputs:
        """The parts of what a model returned.

        Args:
            returned: A tensor; or a mapping, tuple or list of tensors, of None, of further ones, and of anything else,
                which is passed over. Of a mapping the loss is `loss`, of a tuple its first scalar.
            tokens: B and S; B alone for all outputs of whole sequences.
            has_labels: Whether the model was given labels, without which no loss is its own.

        Raises:
            ModelError: No tensor is one of tokens.
        """
        named = dict(named_tensors(returned))
        of_decoder = (name for name in named if not name.startswith("encoder_"))  # an encoder's are other tokens
        found = {name: named[name] for name in of_decoder if named[name].shape[: len(tokens)] == tuple(tokens)}
        if not found:
            shapes = ", ".join(f"{name or 'a tensor'} {list(part.shape)}" for name, part in named.items())
            raise ModelError(
                f"the model returned a {type(returned).__name__} without an output of tokens: {shapes or 'no tensor'}",
                allowed=f"a tensor [{', '.join(map(str, tokens))}, ...], or a mapping or tuple that holds one",
            )
        scalars = [name for name, part in named.items() if not part.dim() and part.is_floating_point()]
        own = next((name for name in scalars if has_labels and (name == "loss" or name.isdecimal())), None)
        left_out = tuple(name for name in named if name not in found and name != own)
        return cls(found, None if own is None else named[own], left_out)

    @property
    def logits(self) -> Tensor:
        """What a loss is taken of: the output of this name, or the first."""
        return self.tensors["logits"] if "logits" in self.tensors else next(iter(self.tensors.values()))

    def detached(self) -> Outputs:
        """The same without their graph."""
        tensors = {name: part.detach() for name, part in self.tensors.items()}
        return Outputs(tensors, None if self.loss is None else self.loss.detach(), self.left_out)


def named_tensors(returned: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in what a module returned, under the keys and indices that lead to it, joined by dots."""
    if isinstance(returned, Tensor):
        yield name, returned
        return
    if isinstance(returned, Mapping):
        parts = list(returned.items())
    else:
        parts = list(enumerate(returned)) if isinstance(returned, tuple | list) else []
    for key, part in parts:
        yield from named_tensors(part, f"{name}.{key}" if name else str(key))


def join(pieces: Sequence[Outputs], num_labels: Sequence[int], real: Tensor) -> Outputs:
    """Outputs of documents that were run one by one, put together to those of the whole batch.

    Args:
        pieces: Of each document [1, S, ...], in order.
        num_labels: Labels of each, by which its loss, a mean, is weighed; documents without any have none.
        real: Slots of the documents: bool [B, L].

    Returns:
        Tensors [B, L, ...], zeros in padding, and the mean loss of all labels.
    """
    tensors = {}
    for name in pieces[0].tensors:
        if all(name in piece.tensors for piece in pieces):
            found = torch.cat([piece.tensors[name][0] for piece in pieces])
            tensors[name] = found.new_zeros(*real.shape, *found.shape[1:])
            tensors[name][real] = found
    weighed = zip(pieces, num_labels, strict=True)
    losses = [piece.loss * number for piece, number in weighed if piece.loss is not None and number]
    loss = torch.stack(losses).sum() / sum(num_labels) if losses else None
    named = {name: None for piece in pieces for name in (*piece.tensors, *piece.left_out)}
    return Outputs(tensors, loss, tuple(name for name in named if name not in tensors))


def takes_labels(model: nn.Module) -> bool:
    """Whether the model's forward has an argument `labels`, of which it may work out a loss."""
    return "labels" in signature(model.forward).parameters
