"""Attention of torch.nn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from lss.adapters.rules import Rule, Rules, slots
from lss.attention import Route
from lss.compiled import eager
from lss.dropout import Site
from lss.errors import ModelError
from lss.masks import Causal, Full


def refusals(name: str, module: nn.MultiheadAttention) -> Iterator[ModelError]:
    """What of an attention module would be computed wrongly."""
    if module.bias_k is not None or module.add_zero_attn:
        yield ModelError(
            f"{name or 'the model'} has add_bias_kv or add_zero_attn", allowed="attention without keys of no token"
        )


def crosses(model: nn.Module, name: str) -> bool | None:
    """Whether a module of torch's own layers attends to other tokens; None for modules of other layers."""
    parent, _, child = name.rpartition(".")
    if name and isinstance(model.get_submodule(parent), nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return child == "multihead_attn"
    return None


@dataclass(frozen=True)
class SegmentedMultihead:
    """Takes the place of the forward of an nn.MultiheadAttention.

    Args:
        module: The module.
        route: To the keys of all segments.
        site: Place of the dropout of attention weights.
        rules: Of masks.
        crosses: Whether keys are those of other tokens, where the module around it settles that.
    """

    module: nn.MultiheadAttention
    route: Route
    site: Site
    rules: Rules
    crosses: bool | None = None

    @eager
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """As nn.MultiheadAttention; attention weights are not returned, as no rank has them all.

        Args:
            query: [B, S, E], or [S, B, E] where sequences come first, of this rank's segment.
            key: The same tensor in self-attention; else what an encoder returned.
            value: Of the same tokens as `key`.
            key_padding_mask: [B, L], of the whole sequences.
            need_weights: None is returned for them all the same.
            attn_mask: [L, L] or [B * H, L, L], of the whole sequences.
            average_attn_weights: Of no effect.
            is_causal: Whether `attn_mask` is the causal mask.
        """
        module = self.module
        if query.dim() != 3:
            raise ModelError(f"{self.route.name} of a tensor {tuple(query.shape)}", allowed="sequences in a batch")
        mask, bias = self._pairs(attn_mask, is_causal)
        if key_padding_mask is not None:
            mask = mask & self.rules.of_keys(key_padding_mask)
        queries, keys, values = (self._heads(part) for part in self._projected(query, key, value))
        drops = module.training and self.site.dropped_levels > 0
        if drops:
            self.route.context.drops_by_function = self.site.name
        attended = self.route.attend(
            queries,
            keys,
            values,
            mask,
            bias=bias,
            dropout=self.site if drops else None,
            of_source=self._crosses(query, key),
        )
        joined = attended.transpose(1, 2).flatten(2)  # [B, H, S, D] -> [B, S, E]
        output: Tensor = module.out_proj(joined if module.batch_first else joined.transpose(0, 1))
        return output, None

    def _crosses(self, query: Tensor, key: Tensor) -> bool:
        """Whether keys are whole on every rank, those of other tokens."""
        if self.crosses is not None or query is key:
            return bool(self.crosses)
        return self.route.is_of_source(key.size(1 if self.module.batch_first else 0))

    def _pairs(self, mask: Tensor | None, is_causal: bool) -> Rule:
        if is_causal or mask is None:
            return (Causal() if is_causal else Full()), None
        if mask.dim() == 3:
            mask = mask.unflatten(0, (-1, self.module.num_heads))  # [B * H, L, L] -> [B, H, L, L]
        return self.rules.of_pairs(mask, slots(self.route.context), hides=True)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[Tensor]:
        module = self.module
        if module.in_proj_weight is None:
            weights: tuple[Tensor, ...] = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        else:
            weights = module.in_proj_weight.chunk(3)
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        for part, weight, bias in zip((query, key, value), weights, biases, strict=True):
            yield F.linear(part, weight, bias)

    def _heads(self, projected: Tensor) -> Tensor:
        """To [B, H, S, D]."""
        found: Tensor = projected.unflatten(-1, (self.module.num_heads, -1))
        return found.transpose(1, 2) if self.module.batch_first else found.permute(1, 2, 0, 3)
