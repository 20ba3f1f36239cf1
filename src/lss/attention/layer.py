"""An attention layer over segments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from inspect import Signature
from typing import Any, Protocol, cast

from torch import Tensor, nn

from lss.attention.attend import attend
from lss.attention.schedule import Scene, Schedule, describe, fewest_seconds, prepare
from lss.attention.sources import Gather, Input, KeyValue, Source
from lss.compiled import eager
from lss.context import SequenceContext, autocast_dtype
from lss.dropout import Site
from lss.errors import LayoutError, ModelError
from lss.masks import Causal, Documents, Full, Mask


class AttentionLayer(Protocol):
    """What an attention layer must offer to be run over segments.

    Its own forward is replaced: query, key and value are projected, keys and values collected, attention computed,
    and the output projected, by the three methods alone. So a forward that does more than these has no place in it.

    It may also have `mask` (an `lss.masks.Mask`, in place of `is_causal`), `bias` (as in `lss.bias`), `sinks` (a
    parameter [H]), `attention_dropout` (rate on the attention weights) and `scale` (factor of the scores, 1 / sqrt(D)
    otherwise).

    Attributes:
        is_causal: Whether a token sees no later token.
        training: Whether dropout is on; every nn.Module has it.
    """

    is_causal: bool
    training: bool

    def project_query(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B, S, E] at `positions`, [S] or [B, S], to [B, H, S, D]."""

    def project_key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, E] at `positions`, [S] or [B, S], to keys and values, each [B, K, S, D].

        With gather `x` it is called with parts of the gathered input too, and again in backward.
        """

    def project_output(self, attended: Tensor) -> Tensor:
        """[B, H, S, D] to [B, S, E]."""


def mask_of(layer: nn.Module) -> Mask | None:
    """Who sees whom in a layer: its `mask`, or what `is_causal` says; None where it has neither."""
    mask = getattr(layer, "mask", None)
    if isinstance(mask, Mask):
        return mask
    is_causal = getattr(layer, "is_causal", None)
    return (Causal() if is_causal else Full()) if isinstance(is_causal, bool) else None


@dataclass(frozen=True)
class DistributedAttention:
    """Runs an attention layer on this rank's segment: queries stay, keys and values of all segments are collected.

    Args:
        layer: The layer.
        context: The context of the parallelized model.
        schedule: How it is computed.
        name: Qualified name of the layer, for the ledger.
        signature: Of the layer's own forward.
        dropout: Place of the dropout of attention weights; None for none.
    """

    layer: AttentionLayer
    context: SequenceContext
    schedule: Schedule
    name: str
    signature: Signature
    dropout: Site | None = None

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's forward: [B, S, E] to [B, S, E]; `positions` may be given too, and are known from the segment."""
        x = self._only_argument(args, kwargs)
        layout = self.context.layout
        if x.size(1) != layout.segment_length:
            raise LayoutError(
                f"{self.name} was given {x.size(1)} tokens of a segment that has {layout.segment_length} slots",
                allowed="the tokens that lss.shard returned, with the segment that it returned beside them",
            )
        positions = self.context.positions(x.device)
        query = self.layer.project_query(x, positions)
        key, value = self.layer.project_key_value(x, positions)
        self._check_widths(query, key, value)
        source, inputs = self._source(x, key, value)
        dropout = self.dropout if self.layer.training else None
        if dropout:
            dropout.enter()
        scale, bias = getattr(self.layer, "scale", None), getattr(self.layer, "bias", None)
        scene = Scene(self._mask(), layout, layout, scale, bias, dropout)
        tensors, context = (query, key, value), self.context
        call = prepare(self.schedule, scene, tensors, source, context.sequence, self.name, context.plans)
        if self.name not in context.choices:
            context.choices[self.name] = describe(call)
        return self.layer.project_output(attend(*tensors, call, getattr(self.layer, "sinks", None), inputs))

    def _only_argument(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The first argument of the layer's own forward; a mask or anything else that is given is refused."""
        (_, x), *others = self.signature.bind(*args, **kwargs).arguments.items()
        for argument, value in others:
            if argument != "positions" and value is not None:
                raise ModelError(
                    f"{self.name} was called with {argument}=..., which cannot be honoured over segments",
                    allowed="the input and `positions`",
                    remedy="say padding and documents to lss.shard; other masks are the layer's attribute `mask`",
                )
        return x  # type: ignore[no-any-return]

    def _check_widths(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.size(-1) != key.size(-1) or query.size(1) % key.size(1) or key.shape[:3] != value.shape[:3]:
            raise ModelError(
                f"{self.name} has queries, keys and values of {[tuple(t.shape) for t in (query, key, value)]}",
                allowed="[B, H, S, D], [B, K, S, D] and [B, K, S, any width], H a multiple of K",
            )

    def _mask(self) -> Mask:
        mask, documents = mask_of(cast(nn.Module, self.layer)), self.context.present.documents
        assert mask is not None
        if documents is None:
            return mask
        return Documents(documents) if mask == Full() else mask & Documents(documents)

    def _source(self, x: Tensor, key: Tensor, value: Tensor) -> tuple[Source, tuple[Tensor, ...]]:
        """What is gathered, and the inputs that it needs besides keys and values."""
        gather: Gather = self.schedule.gather
        num_ranks = self.context.sequence.size
        if gather == "auto":
            gather = fewest_seconds(x, key, value, num_ranks)
        if gather != "x" or num_ranks == 1:
            return KeyValue(separate=gather == "separate" or key.size(-1) != value.size(-1)), ()
        layer = cast(nn.Module, self.layer)
        parameters = tuple(weight for weight in layer.parameters() if weight.requires_grad)
        project = partial(_project, self.layer, self.context.all_positions(x.device))
        return Input(parameters, project), (x.to(autocast_dtype(x)), *parameters)


def _project(layer: AttentionLayer, positions: Tensor, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    return layer.project_key_value(x, positions[..., slots])
