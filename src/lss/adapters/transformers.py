"""Models of Hugging Face's transformers: attention by the library's interface, masks by their rule, positions as given.

The library computes attention by a function of the name that the configuration holds, and makes the mask by another
one of this name. Both are registered here, and find their way by what `parallelize` left on the attention module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from inspect import getclosurevars, signature, unwrap
from itertools import takewhile
from operator import and_, or_
from typing import Any

from torch import Tensor, nn

from lss.attention import Route, Schedule
from lss.batch import Cut
from lss.bias import Bias
from lss.compiled import eager
from lss.context import SequenceContext
from lss.dropout import Site
from lss.errors import MaskError, ModelError
from lss.masks import Causal, Full, Mask, Padding, Window

_NAME = "lss"
_PLACE = "lss_place"
# How models are named whose outputs and losses are of single tokens.
_TOKEN_HEADS = (
    "ForCausalLM",
    "LMHeadModel",
    "ForMaskedLM",
    "ForTokenClassification",
    "ForConditionalGeneration",
    "Model",
)
# Arguments of the interface that change the result and are not understood.
_CHANGING = ("softcap", "position_bias", "head_mask", "cu_seq_lens_q", "output_attentions")


def is_pretrained(model: nn.Module) -> bool:
    """Whether a model is one of transformers; the library is not imported to find out."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that call the library's attention interface, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if "ALL_ATTENTION_FUNCTIONS" in unwrap(type(module).forward).__code__.co_names
    }


def takes_no_tokens(model: nn.Module) -> bool:
    """Whether a model is given images or sounds, and predicts no tokens of a sequence of its own."""
    return is_pretrained(model) and _main_input(model) != "input_ids" and not _is_encoder_decoder(model)


def is_of_uncut_encoder(model: nn.Module, name: str) -> bool:
    """Whether a module belongs to an encoder of images or sounds, whose decoder predicts tokens."""
    if not is_pretrained(model) or _main_input(model) == "input_ids" or not _is_encoder_decoder(model):
        return False
    encoder: Any = model
    return any(part is model.get_submodule(name) for part in encoder.get_encoder().modules())


def refusals(model: nn.Module, cut: Cut) -> Iterator[ModelError]:
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
    skipping = [name for name, module in model.named_modules() if getattr(module, "layerdrop", 0)]
    if skipping:
        yield ModelError(f"{skipping[0] or 'the model'} leaves out layers at random", allowed="layerdrop 0")
    if getattr(model.config, "apply_spec_augment", False):
        yield ModelError("the model masks its input at random", allowed="apply_spec_augment=False")
    pooling = [name for name, module in model.named_modules() if type(module).__name__.endswith(("Pooler", "Pooling"))]
    if cut == "tokens" and (pooling or not type(model).__name__.endswith(_TOKEN_HEADS)):
        yield ModelError(
            f"{pooling[0] if pooling else type(model).__name__} makes one output of a whole sequence",
            allowed=f"outputs of single tokens: models named ...{', ...'.join(_TOKEN_HEADS)}",
            remedy="lss.parallelize(model, mesh, cut='layers'), or add_pooling_layer=False where it is not needed",
        )


def adapt(model: Any, context: SequenceContext, schedule: Schedule, sites: Iterator[int]) -> None:
    """Have the model's attention go over segments, in place.

    Args:
        model: A PreTrainedModel.
        context: Of the parallelized model.
        schedule: How attention is computed.
        sites: Numbers of the places of dropout.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415  (an optional dependency)

    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, mask)
    model.set_attn_implementation(_NAME)
    modules = attention_modules(model)
    for name, module in modules.items():
        site = Site(name, 0.0, next(sites), context)
        setattr(module, _PLACE, _Place(Route(context, schedule, name), site, _bias(modules, name)))
        module.register_forward_pre_hook(_look, with_kwargs=True)
    for part in model.modules():
        if hasattr(part, "config") and getattr(part.config, "use_cache", False):
            part.config.use_cache = False
    if _is_encoder_decoder(model):
        encoder = model.get_encoder()
        encoder.register_forward_pre_hook(lambda *_: context.enter_encoder())
        encoder.register_forward_hook(lambda *_: context.leave_encoder())
    model.register_forward_pre_hook(partial(_arguments, context), with_kwargs=True)


@dataclass
class _Place:
    """What an attention module is told.

    Args:
        route: To the keys of all segments.
        site: Place of the dropout of its weights.
        bias: Added to its scores.
        crosses: Whether the present call's keys are an encoder's.
    """

    route: Route
    site: Site
    bias: Bias | None
    crosses: bool = False


class _RelativeBias(nn.Module):
    """The bias of T5 and its kin, by the functions of the module that learns it, which other layers share."""

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.table, self.owner = owner.relative_attention_bias, [owner]  # in a list: it is no part of this one

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[H, S, T]."""
        (owner,) = self.owner
        buckets = owner._relative_position_bucket(
            keys - queries[:, None],
            bidirectional=not owner.is_decoder,
            num_buckets=owner.relative_attention_num_buckets,
            max_distance=owner.relative_attention_max_distance,
        )
        found: Tensor = self.table(buckets).permute(2, 0, 1)
        return found


def _bias(modules: dict[str, nn.Module], name: str) -> Bias | None:
    """That of the first layer of the same kind in the same stack; cross-attention of T5 has none."""
    layer = modules[name]
    if not hasattr(layer, "compute_bias") or "EncDec" in name:
        return None
    same = [other for key, other in modules.items() if _stack(key) == _stack(name)]
    owner = next((other for other in same if getattr(other, "has_relative_attention_bias", False)), None)
    return None if owner is None else _RelativeBias(layer if hasattr(layer, "relative_attention_bias") else owner)


def _stack(name: str) -> list[str]:
    """A name without its numbers and what follows them."""
    return list(takewhile(lambda part: not part.isdigit(), name.split(".")))


def _look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Whether keys are an encoder's; and a bias that is known by its rule is not made whole."""
    bound = signature(module.forward).bind(*args, **kwargs).arguments
    bound |= bound.get("kwargs", {})
    place: _Place = vars(module)[_PLACE]
    place.crosses = any(bound.get(name) is not None for name in ("key_value_states", "encoder_hidden_states"))
    if hasattr(module, "compute_bias") and bound.get("position_bias") is None:
        kwargs = {**kwargs, "position_bias": next(module.parameters()).new_zeros(())}
    return args, kwargs


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
    place = _place(module)
    route, site = place.route, place.site
    changing = [name for name in _CHANGING if _asks(others.get(name)) and not hasattr(module, "compute_bias")]
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
        query,
        key,
        value,
        found,
        scale=scaling,
        bias=place.bias,
        sinks=s_aux,
        dropout=site if site.dropped_levels else None,
        of_source=place.crosses,
    )
    return attended.transpose(1, 2), None


def mask(*, mask_function: Callable[..., Any], attention_mask: Tensor | None = None, **others: Any) -> Mask:
    """The library's mask function: its rule of indices as a mask of global positions."""
    found = _rule(mask_function)
    if attention_mask is None or (attention_mask.dim() == 2 and attention_mask.all()):
        return found  # many models make a mask of ones where they are given none
    if attention_mask.dim() != 2:
        raise MaskError(f"an attention_mask of shape {tuple(attention_mask.shape)}", allowed="padding, [B, L]")
    padding = _WholePadding(Padding.of(attention_mask).spans, attention_mask.size(1))
    return padding if found == Full() else found & padding


@dataclass(frozen=True)
class _WholePadding(Padding):
    """Padding of whole sequences; a model that makes it of a segment's tokens is refused.

    Args:
        spans: Real keys of each sequence.
        length: L.
    """

    length: int = 0

    def check(self, num_sequences: int, num_queries: int, num_keys: int) -> None:
        """It is as long as the sequences."""
        super().check(num_sequences, num_queries, num_keys)
        if self.length != num_keys:
            raise MaskError(
                f"an attention_mask of {self.length} tokens for {num_keys} keys",
                allowed="padding of whole sequences",
                remedy="say it to lss.shard, as attention_mask",
            )


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


def _asks(value: object) -> bool:
    return value is not None and value is not False


def _place(module: nn.Module) -> _Place:
    if _PLACE not in vars(module):
        raise ModelError(
            f"a {type(module).__name__} with attn_implementation={_NAME!r} that was not parallelized",
            remedy="model = lss.parallelize(model, mesh)",
        )
    found: _Place = vars(module)[_PLACE]
    return found


def _main_input(model: Any) -> str:
    """Name of what the model is given first."""
    return str(model.main_input_name)


def _is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def shifts_labels(model: Any) -> bool:
    """Whether the model's loss predicts the next token, unless it is told that labels are shifted."""
    return getattr(model.loss_function, "__name__", "") == "ForCausalLMLoss"


def _arguments(
    context: SequenceContext, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the library's models must be told of a segment: positions, and that labels are shifted already."""
    told = ["past_key_values", "cache", "encoder_outputs"]
    if context.cut == "tokens":
        told += ["attention_mask", "decoder_attention_mask", "position_ids", "decoder_position_ids"]
    for name in told:
        if kwargs.get(name) is not None:
            raise ModelError(
                f"the model was called with {name}",
                allowed="attention_mask and position_ids given to lss.shard; no cache",
                remedy="batch = lss.shard(batch, mesh), then model(**batch)",
            )
    if context.cut == "layers":
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name) or getattr(model.config, name, False):
                raise ModelError(f"{name}=True in a model whose layers cut the tokens", allowed="the last output")
        return args, kwargs
    segment = context.present
    if _is_encoder_decoder(model) and segment.source is None:
        raise ModelError(
            "a batch of one sequence for an encoder and a decoder",
            allowed="a batch with decoder_input_ids, made of the whole labels",
            remedy="batch['decoder_input_ids'] = model.prepare_decoder_input_ids_from_labels(batch['labels']) before "
            "lss.shard",
        )
    if "position_ids" in signature(model.forward).parameters:
        positions = context.positions(next(model.parameters()).device)
        kwargs["position_ids"] = positions if positions.dim() == 2 else positions.unsqueeze(0)
    if kwargs.get("labels") is not None and shifts_labels(model):
        kwargs["shift_labels"] = kwargs["labels"]
    return args, kwargs
