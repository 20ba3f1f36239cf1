"""Masks that a model's code makes as whole tensors, as rules of positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lss.bias import Bias, DenseBias
from lss.context import SequenceContext
from lss.errors import MaskError
from lss.masks import Causal, Dense, Full, Mask, Padding

Rule = tuple[Mask, Bias | None]


class Rules:
    """Rules of tensors, each worked out once while the tensor lives and is not changed."""

    def __init__(self) -> None:
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __deepcopy__(self, memo: object) -> Rules:
        return Rules()

    def of_pairs(self, tensor: Tensor, slots: tuple[int, int] = (0, 0), *, hides: bool = False) -> Rule:
        """The mask, and what is added to scores, of a tensor over pairs.

        Args:
            tensor: Boolean, or floating values that are added, with -inf (or the least number) where a key is hidden;
                [L_query, L_key], [B, L_query, L_key] or [B or 1, H or 1, L_query or 1, L_key], of whole sequences.
            slots: Of this rank, and those that hold a token: a causal mask may be one of them alone.
            hides: Whether True hides a key, as in nn.MultiheadAttention, or shows it, as in
                scaled_dot_product_attention.

        Raises:
            MaskError: It cannot be honoured over segments.
        """
        version, found = self._known.get(tensor, (None, None))
        if found is None or version != tensor._version:
            found = _rule(tensor, slots, hides=hides)
            self._known[tensor] = tensor._version, found
        rule: Rule = found
        return rule

    def of_keys(self, tensor: Tensor) -> Mask:
        """The mask of a key_padding_mask [B, L_key] of nn.MultiheadAttention: True, or -inf, on padding."""
        if tensor.dim() != 2:
            raise MaskError(f"a key_padding_mask of shape {tuple(tensor.shape)}", allowed="[B, L]")
        return _rule(tensor[:, None, None], (0, 0), hides=True)[0]


@dataclass(frozen=True)
class WholePadding(Padding):
    """Padding of whole sequences; a model that makes it of a segment's tokens is refused.

    Args:
        spans: Real keys of each sequence.
        length: L.
    """

    length: int = 0

    @classmethod
    def of(cls, mask: Tensor) -> WholePadding:
        """From a mask [B, L] that is nonzero (or True) on real keys."""
        return cls(Padding.of(mask).spans, mask.size(1))

    def check(self, num_sequences: int, num_queries: int, num_keys: int) -> None:
        """It is as long as the sequences."""
        super().check(num_sequences, num_queries, num_keys)
        if self.length != num_keys:
            raise MaskError(
                f"an attention_mask of {self.length} tokens for {num_keys} keys",
                allowed="padding of whole sequences",
                remedy="say it to lss.shard, as attention_mask",
            )


def slots(context: SequenceContext) -> tuple[int, int]:
    """Slots of this rank, and those of them that hold a token; (0, 0) where tokens are not cut."""
    if not context.is_cut:
        return 0, 0
    return context.layout.segment_length, context.layout.num_tokens(context.sequence.rank)


def _rule(tensor: Tensor, slots: tuple[int, int], *, hides: bool) -> Rule:
    if tensor.requires_grad:
        raise MaskError(
            f"a mask {tuple(tensor.shape)} that needs a gradient",
            allowed="masks without gradient",
            remedy="a learned bias is a function of positions: give the layer a bias of lss.bias",
        )
    if tensor.dtype == torch.bool:
        return _mask(~tensor if hides else tensor, slots), None
    if not tensor.is_floating_point():
        raise MaskError(f"an attention mask of {tensor.dtype}", allowed="boolean or floating masks")
    hidden = tensor <= torch.finfo(tensor.dtype).min
    added = tensor.masked_fill(hidden, 0)
    return _mask(~hidden, slots), _bias(added) if added.any() else None


def _bias(added: Tensor) -> Bias:
    if added.dim() == 4 and added.size(0) == 1:
        added = added[0]
    if added.dim() != 2 and (added.dim() != 3 or added.size(-2) == 1):
        raise MaskError(
            f"a mask of shape {tuple(added.shape)} that adds other values than 0 and -inf",
            allowed="[L, L] or [1, H, L, L]: the same in all sequences",
        )
    return DenseBias(added)


def _mask(seen: Tensor, slots: tuple[int, int]) -> Mask:
    if seen.dim() == 4 and seen.shape[:2] == (1, 1) and seen.size(-2) > 1:
        seen = seen[0, 0]
    if seen.all():
        return Full()
    if seen.dim() == 4 and seen.shape[1:3] == (1, 1):
        return WholePadding.of(seen[:, 0, 0])
    if seen.dim() == 4 and seen.size(-2) == 1:
        raise MaskError(f"a mask of shape {tuple(seen.shape)}", allowed="[B, 1, 1, L], the same for all heads")
    real = seen[: slots[1], : slots[1]] if seen.size(-1) == slots[0] else seen
    if seen.dim() == 2 and seen.size(0) == seen.size(1) and bool((real == torch.ones_like(real).tril()).all()):
        return Causal()
    return Dense(seen.cpu())
