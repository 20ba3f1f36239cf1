"""Models of Hugging Face's transformers: attention by the library's interface, masks by their rule, positions as given.

The library computes attention by a function of the name that the configuration holds, and makes the mask by another
one of this name. Both are registered here, and find their way by what `parallelize` left on the attention module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial, reduce
from inspect import getclosurevars, signature, unwrap
from itertools import count
from operator import and_, or_
from typing import Any

from torch import Tensor, nn

from lss.attention import Route, Schedule
from lss.compiled import eager
from lss.context import SequenceContext
from lss.dropout import Site
from lss.errors import MaskError, ModelError
from lss.masks import Causal, Full, Mask, Window

_NAME = "lss"
_ROUTE = "lss_route"
# How models are named whose outputs and losses are of single tokens.
_TOKEN_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification", "Model")
# Arguments of the interface that change the result and are not understood.
_CHANGING = ("softcap", "position_bias", "head_mask", "cu_seq_lens_q", "output_attentions")


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is one of transformers, or holds one, as those of peft do."""
    return bool(pretrained(model))


def pretrained(model: nn.Module) -> list[Any]:
    """The model itself, or the models of transformers that it holds; the library is not imported to find out."""
    library = sys.modules.get("transformers")
    if library is None:
        return []
    if isinstance(model, library.PreTrainedModel):
        return [model]
    return [part for child in model.children() for part in pretrained(child)]


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that call the library's attention interface, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if "ALL_ATTENTION_FUNCTIONS" in unwrap(type(module).forward).__code__.co_names
    }


def refusals(model: nn.Module) -> Iterator[ModelError]:
    """What of a model of transformers would be computed wrongly."""
    modules = attention_modules(model)
    own = [
        name
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Attention")
        and name not in modules
        and not any(other.startswith(f"{name}.") for other in modules)
    ]
    if own or not modules:
        yield ModelError(
            f"{own[0] if own else type(model).__name__} computes attention without the library's interface",
            allowed="models whose attention calls ALL_ATTENTION_FUNCTIONS",
            remedy="bring its attention modules into the form of lss.AttentionLayer",
        )
    for part in pretrained(model):
        yield from _of_outputs(part)


def _of_outputs(model: nn.Module) -> Iterator[ModelError]:
    if "position_ids" not in signature(model.forward).parameters:
        yield ModelError(
            f"{type(model).__name__} takes no position_ids, so its positions cannot be made global",
            allowed="models that take position_ids",
        )
    pooling = [name for name, module in model.named_modules() if type(module).__name__.endswith(("Pooler", "Pooling"))]
    if pooling or not type(model).__name__.endswith(_TOKEN_HEADS):
        yield ModelError(
            f"{pooling[0] if pooling else type(model).__name__} makes one output of a whole sequence",
            allowed=f"outputs of single tokens: models named ...{', ...'.join(_TOKEN_HEADS)}",
            remedy="add_pooling_layer=False, where the pooled output is not needed",
        )


def adapt(model: Any, context: SequenceContext, schedule: Schedule, sites: count[int]) -> None:
    """Have the model's attention go over segments, in place.

    Args:
        model: A PreTrainedModel, or a model that holds some.
        context: Of the parallelized model.
        schedule: How attention is computed.
        sites: Numbers of the places of dropout.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415  (an optional dependency)

    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, mask)
    for whole in pretrained(model):
        whole.set_attn_implementation(_NAME)
        whole.register_forward_pre_hook(partial(_arguments, context), with_kwargs=True)
    for name, module in attention_modules(model).items():
        setattr(module, _ROUTE, (Route(context, schedule, name), Site(name, 0.0, next(sites), context)))
    for part in model.modules():
        if hasattr(part, "config") and getattr(part.config, "use_cache", False):
            part.config.use_cache = False


@eager
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The library's attention function: [B, H, S, D] and [B, K, S, D] of this rank to [B, S, H, D].

    Args:
        module: The attention module.
        query: [B, H, S, D].
        key: [B, K, S, D].
        value: [B, K, S, D].
        attention_mask: What `mask` made; None where the model makes none, and says all by the other arguments.
        scaling: Factor of the scores.
        dropout: Rate on the attention weights, 0 in evaluation.
        is_causal: Whether a token sees no later one; None for what the module says.
        sliding_window: Tokens that a token sees, itself among them; None for all.
        s_aux: Sinks, [H].
        others: Further arguments of the interface: refused where they would change the result.
    """
    route, site = _route(module)
    changing = [name for name in _CHANGING if others.get(name) is not None]
    if changing:
        raise ModelError(f"{route.name} asks for {changing[0]}", allowed="attention without it")
    found = attention_mask
    if found is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        found = Causal() if causal else Full()
        if sliding_window is not None:
            found = found & Window(sliding_window - 1, 0 if causal else sliding_window - 1)
    site.rate = dropout
    attended = route.attend(
        query, key, value, found, scale=scaling, sinks=s_aux, dropout=site if site.dropped_levels else None
    )
    return attended.transpose(1, 2), None


def mask(*, mask_function: Callable[..., Any], attention_mask: Tensor | None = None, **others: Any) -> Mask:
    """The library's mask function: its rule of indices as a mask of global positions."""
    if attention_mask is not None:
        raise MaskError("an attention_mask given to the model", remedy="give it to lss.shard, with the whole batch")
    return _rule(mask_function)


def _rule(function: Callable[..., Any]) -> Mask:
    """A rule of masking_utils; packed documents are left to the segment, whose positions jump for another reason."""
    name = function.__qualname__.partition(".")[0]
    held: dict[str, Any] = dict(getclosurevars(function).nonlocals)
    match name:
        case "causal_mask_function":
            return Causal()
        case "bidirectional_mask_function" | "packed_sequence_mask_function":
            return Full()
        case "sliding_window_overlay":
            return Window(held["sliding_window"] - 1, None)
        case "sliding_window_bidirectional_overlay":
            return Window(held["sliding_window"], held["sliding_window"])
        case "remap_positions_for_packed_sequence":
            return _rule(held["mask_function"])
        case "and_masks" | "or_masks":
            return reduce(and_ if name == "and_masks" else or_, map(_rule, held["mask_functions"]))
    raise MaskError(
        f"the model masks by the rule {function.__qualname__}",
        allowed="causal, bidirectional and sliding windows",
        remedy="say documents and padding to lss.shard",
    )


def _route(module: nn.Module) -> tuple[Route, Site]:
    if _ROUTE not in vars(module):
        raise ModelError(
            f"a {type(module).__name__} with attn_implementation={_NAME!r} that was not parallelized",
            remedy="model = lss.parallelize(model, mesh)",
        )
    found: tuple[Route, Site] = vars(module)[_ROUTE]
    return found


def _shifts_labels(model: Any) -> bool:
    """Whether the model's loss predicts the next token, unless it is told that labels are shifted."""
    return getattr(model.loss_function, "__name__", "") == "ForCausalLMLoss"


def _arguments(
    context: SequenceContext, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the library's models must be told of a segment: positions, and that labels are shifted already."""
    for name in ("attention_mask", "position_ids", "past_key_values", "cache"):
        if kwargs.get(name) is not None:
            raise ModelError(
                f"the model was called with {name}",
                allowed="attention_mask and position_ids given to lss.shard; no cache",
                remedy="batch = lss.shard(batch, mesh), then model(**batch)",
            )
    positions = context.positions(next(model.parameters()).device)
    kwargs["position_ids"] = positions if positions.dim() == 2 else positions.unsqueeze(0)
    if kwargs.get("labels") is not None and _shifts_labels(model):
        kwargs["shift_labels"] = kwargs["labels"]
    return args, kwargs
