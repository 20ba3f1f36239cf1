"""An attention layer over segments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from inspect import Signature
from typing import Any, Protocol, cast

from torch import Tensor, nn

from lss.attention.run import run
from lss.attention.schedule import Scene, Schedule, fewest_seconds
from lss.attention.sources import Input, Source
from lss.bias import Bias
from lss.compiled import eager
from lss.context import SequenceContext
from lss.dropout import Site
from lss.dtypes import in_autocast
from lss.errors import LayoutError, ModelError
from lss.layout import Layout
from lss.masks import Causal, Full, Mask
from lss.segment import mask_between

# What makes a module an attention layer.
PROJECTIONS = ("project_query", "project_key_value", "project_output")


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


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that follow `AttentionLayer`, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if all(callable(getattr(module, projection, None)) for projection in PROJECTIONS)
    }


def bias_of(layer: nn.Module) -> Bias | None:
    """What a layer adds to its scores; a flag of this name, as layers have for their projections, is none."""
    bias = getattr(layer, "bias", None)
    return None if isinstance(bias, bool) else bias


def mask_of(layer: nn.Module) -> Mask | None:
    """Who sees whom in a layer: its `mask`, or what `is_causal` says; None where it has neither."""
    mask = getattr(layer, "mask", None)
    if mask is not None:
        return mask if isinstance(mask, Mask) else None
    is_causal = getattr(layer, "is_causal", None)
    return (Causal() if is_causal else Full()) if isinstance(is_causal, bool) else None


@dataclass(frozen=True)
class Route:
    """The way of one attention layer's queries to the keys and values of all segments.

    Args:
        context: The context of the parallelized model.
        schedule: How attention is computed.
        name: Qualified name of the layer, for the ledger and messages.
    """

    context: SequenceContext
    schedule: Schedule
    name: str

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask,
        *,
        scale: float | None = None,
        bias: Bias | None = None,
        sinks: Tensor | None = None,
        dropout: Site | None = None,
        source: Source | None = None,
        inputs: tuple[Tensor, ...] = (),
        of_source: bool = False,
    ) -> Tensor:
        """Attention of the present segment's queries: [B, H, S, D], under autocast in its dtype.

        Args:
            query: [B, H, S, D].
            key: [B, K, S, D].
            value: [B, K, S, any width].
            mask: Of the layer; the documents and the padding of the batch come on top of it.
            scale: Factor of the scores; None for 1 / sqrt(D).
            bias: Added to the scores.
            sinks: [H].
            dropout: Place of the dropout of attention weights, where they are dropped in this call.
            source: What is gathered; None for keys and values.
            inputs: What the source needs besides.
            of_source: Whether keys and values are those of an encoder, whose tokens may be whole on every rank.
        """
        if query.size(-1) != key.size(-1) or query.size(1) % key.size(1) or key.shape[:3] != value.shape[:3]:
            raise ModelError(
                f"{self.name} has queries, keys and values of {[tuple(t.shape) for t in (query, key, value)]}",
                allowed="[B, H, S, D], [B, K, S, D] and [B, K, S, any width], H a multiple of K",
            )
        query, key, value = map(in_autocast, (query, key, value))
        if self.context.trial is not None:
            return self.context.trial.attend(query, key, value)
        context, used = self.context, dropout.enter(query.size(0)) if dropout else None
        scene = Scene(*self._seen(mask, query.size(2), key.size(2), of_source=of_source), scale, bias, used)
        return run(
            self.schedule,
            scene,
            (query, key, value),
            context.sequence,
            self.name,
            source=source,
            sinks=sinks,
            inputs=inputs,
            tell=None if self.name in context.choices else partial(context.choices.setdefault, self.name),
        )

    def is_of_source(self, num_keys: int) -> bool:
        """Whether keys are those of other tokens than the layer's own: told by their number, where nothing else tells.

        Raises:
            ModelError: There are as many of either.
        """
        context = self.context
        if not context.is_cut:
            return False
        own = context.layout.segment_length
        if not context.is_alone and (num_keys == own) == (num_keys in context.others):
            raise ModelError(
                f"{self.name} attends to {num_keys} keys, of a segment of {own} slots and other tokens, "
                f"{sorted(context.others)} of them",
                allowed="a layer's own tokens, or other ones that it is given, of another number",
                remedy="pad them by one; tokens that are added to the keys are not taken",
            )
        return num_keys != own

    def require_slots(self, number: int) -> None:
        """Raise LayoutError unless so many tokens are those of the present segment."""
        self.context.pieces(number, self.name)

    def _seen(self, mask: Mask, num_queries: int, num_keys: int, *, of_source: bool) -> tuple[Mask, Layout, Layout]:
        """Who sees whom, and the layouts of queries and keys. What is not cut, every rank has whole."""
        context = self.context
        self.require_slots(num_queries)
        if not context.is_cut:
            return mask, Layout.contiguous(num_queries, 1), Layout.contiguous(num_keys, 1)
        queries = context.layout
        if not of_source:
            self.require_slots(num_keys)
            return self._joined(mask, context.present.mask), queries, queries
        keys = context.source
        if keys is None and context.cut == "tokens":
            raise ModelError(
                f"{self.name} attends to {num_keys} keys that are not of the segment",
                allowed="attention to the sequence itself, and in encoder-decoders of transformers to the encoder's",
                remedy="lss.parallelize(model, mesh, cut='layers')",
            )
        if keys is None:
            return mask, queries, Layout.contiguous(num_keys, 1)
        if num_keys != keys.layout.segment_length:
            raise LayoutError(
                f"{self.name} was given {num_keys} keys of an encoder's segment of {keys.layout.segment_length} slots",
                allowed="what the encoder returned",
            )
        return self._joined(mask, mask_between(context.present, keys)), queries, keys.layout

    @staticmethod
    def _joined(mask: Mask, of_batch: Mask) -> Mask:
        if of_batch == Full():
            return mask
        return of_batch if mask == Full() else mask & of_batch


@dataclass(frozen=True)
class DistributedAttention:
    """Runs an attention layer on this rank's segment: queries stay, keys and values of all segments are collected.

    Args:
        layer: The layer.
        route: Its way to the keys of all segments.
        signature: Of the layer's own forward.
        dropout: Place of the dropout of attention weights; None for none.
    """

    layer: AttentionLayer
    route: Route
    signature: Signature
    dropout: Site | None = None

    @eager
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's forward: [B, S, E] to [B, S, E]; `positions` may be given too, and are known from the segment."""
        x, layer = self._only_argument(args, kwargs), self.layer
        self.route.require_slots(x.size(1))
        positions = self.route.context.positions(x.device)
        query = layer.project_query(x, positions)
        key, value = layer.project_key_value(x, positions)
        mask = mask_of(cast(nn.Module, layer))
        assert mask is not None
        source, inputs = self._source(x, key, value)
        attended = self.route.attend(
            query,
            key,
            value,
            mask,
            scale=getattr(layer, "scale", None),
            bias=bias_of(cast(nn.Module, layer)),
            sinks=getattr(layer, "sinks", None),
            dropout=self.dropout if layer.training else None,
            source=source,
            inputs=inputs,
        )
        return layer.project_output(attended)

    def _only_argument(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The first argument of the layer's own forward; a mask or anything else that is given is refused."""
        (_, x), *others = self.signature.bind(*args, **kwargs).arguments.items()
        for argument, value in others:
            if argument != "positions" and value is not None:
                raise ModelError(
                    f"{self.route.name} was called with {argument}=..., which cannot be honoured over segments",
                    allowed="the input and `positions`",
                    remedy="say padding and documents to lss.shard; other masks are the layer's attribute `mask`",
                )
        return x  # type: ignore[no-any-return]

    def _source(self, x: Tensor, key: Tensor, value: Tensor) -> tuple[Source | None, tuple[Tensor, ...]]:
        """The layer's input where that is gathered, and the inputs that it needs; else None."""
        gather, context = self.route.schedule.gather, self.route.context
        if gather == "auto" and self.route.schedule.strategy == "lss":
            gather = fewest_seconds(x, key, value, context.sequence)
        if gather != "x" or context.sequence.size == 1:
            return None, ()
        layer = cast(nn.Module, self.layer)
        parameters = tuple(weight for weight in layer.parameters() if weight.requires_grad)
        project = partial(_project, self.layer, context.all_positions(x.device))
        return Input(parameters, project), (in_autocast(x), *parameters)


def _project(layer: AttentionLayer, positions: Tensor, x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    key, value = layer.project_key_value(x, positions[..., slots])
    return in_autocast(key), in_autocast(value)
