"""Models of Hugging Face's transformers: attention by the library's interface, masks by their rule, positions as given.

The library computes attention by a function of the name that the configuration holds, and makes the mask by another
one of this name. Both are registered here, and find their way by what `parallelize` left on the attention module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from inspect import signature, unwrap
from typing import Any

from torch import Tensor, nn

from lss.adapters import interface
from lss.attention import Route, Schedule
from lss.batch import Cut
from lss.context import SequenceContext
from lss.dropout import Site
from lss.errors import ModelError

_LAYERS = "lss.parallelize(model, mesh, cut='layers')"
# How models are named whose outputs and losses are of single tokens.
_TOKEN_HEADS = (
    "ForCausalLM",
    "LMHeadModel",
    "ForMaskedLM",
    "ForTokenClassification",
    "ForConditionalGeneration",
    "Model",
)


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


def takes_no_tokens(model: nn.Module) -> bool:
    """Whether a model is given images or sounds, and predicts no tokens of a sequence of its own."""
    return any(_main_input(part) != "input_ids" and not _is_encoder_decoder(part) for part in pretrained(model))


def is_of_uncut_encoder(model: nn.Module, name: str) -> bool:
    """Whether a module belongs to an encoder of images or sounds, whose decoder predicts tokens."""
    encoders = [
        part.get_encoder()
        for part in pretrained(model)
        if _main_input(part) != "input_ids" and _is_encoder_decoder(part)
    ]
    return any(part is model.get_submodule(name) for encoder in encoders for part in encoder.modules())


def takes_positions(model: nn.Module) -> bool:
    """Whether a model of transformers takes positions as an argument."""
    return any("position_ids" in signature(part.forward).parameters for part in pretrained(model))


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
    for part in pretrained(model):
        yield from _of_outputs(part, cut)


def _of_outputs(model: nn.Module, cut: Cut) -> Iterator[ModelError]:
    if getattr(model.config, "apply_spec_augment", False):
        yield ModelError("the model masks its input at random", allowed="apply_spec_augment=False")
    if getattr(model.config, "output_router_logits", False):
        yield ModelError("a loss of routers, a mean over one rank's tokens", allowed="output_router_logits=False")
    ropes = getattr(model.config, "rope_parameters", None) or {}
    kinds = [part.get("rope_type") for part in (ropes, *ropes.values()) if isinstance(part, dict)]
    if cut == "tokens" and "dynamic" in kinds:
        given = "rotary angles that depend on the length of the sequence"
        yield ModelError(given, allowed="other rope_type than dynamic", remedy=_LAYERS)
    tables = [name for name, part in model.named_modules() if "position" in name and hasattr(part, "padding_idx")]
    counted = [name for name in tables if model.get_submodule(name).padding_idx is not None]
    if cut == "tokens" and counted and _padding_index(model) is None:
        given = f"{counted[0]} counts positions from its padding_idx on, and leaves padding out"
        yield ModelError(given, allowed="positions that count from 0", remedy=_LAYERS)
    pooling = [name for name, module in model.named_modules() if type(module).__name__.endswith(("Pooler", "Pooling"))]
    if cut == "tokens" and (pooling or not type(model).__name__.endswith(_TOKEN_HEADS)):
        yield ModelError(
            f"{pooling[0] if pooling else type(model).__name__} makes one output of a whole sequence",
            allowed=f"outputs of single tokens: models named ...{', ...'.join(_TOKEN_HEADS)}",
            remedy=_LAYERS + ", or add_pooling_layer=False where it is not needed",
        )


def _padding_index(model: nn.Module) -> int | None:
    """The row of padding in a positional table, behind which positions begin, in RoBERTa and its kin."""
    found = (part for part in model.modules() if hasattr(part, "create_position_ids_from_input_ids"))
    indices = (part.padding_idx for part in found if hasattr(part, "position_embeddings"))
    return next((int(index) for index in indices if isinstance(index, int)), None)


def adapt(model: Any, context: SequenceContext, schedule: Schedule, sites: Iterator[int]) -> None:
    """Have the model's attention go over segments, in place.

    Args:
        model: A PreTrainedModel, or a model that holds some.
        context: Of the parallelized model.
        schedule: How attention is computed.
        sites: Numbers of the places of dropout.
    """
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415  (an optional dependency)

    AttentionInterface.register(interface.NAME, interface.attention)
    AttentionMaskInterface.register(interface.NAME, interface.mask)
    for whole in pretrained(model):
        whole.set_attn_implementation(interface.NAME)
        whole.register_forward_pre_hook(partial(_arguments, context), with_kwargs=True)
        if _is_encoder_decoder(whole):
            context.has_encoder = True
            encoder = whole.get_encoder()
            encoder.register_forward_pre_hook(partial(_enter_encoder, context))
            encoder.register_forward_hook(partial(_leave_encoder, context))
    modules = attention_modules(model)
    for name, module in modules.items():
        site, bias = Site(name, 0.0, next(sites), context), interface.relative_bias(modules, name)
        interface.Place(Route(context, schedule, name), site, bias).tell(module)
    for part in model.modules():
        if hasattr(part, "config") and getattr(part.config, "use_cache", False):
            part.config.use_cache = False


def _main_input(model: Any) -> str:
    """Name of what the model is given first."""
    return str(model.main_input_name)


def _is_encoder_decoder(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


def shifts_labels(model: Any) -> bool:
    """Whether the model's loss predicts the next token, unless it is told that labels are shifted."""
    return getattr(model.loss_function, "__name__", "") == "ForCausalLMLoss"


def _enter_encoder(context: SequenceContext, *given: Any) -> None:
    context.enter_encoder()


def _leave_encoder(context: SequenceContext, *given: Any) -> None:
    context.leave_encoder()


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
    if takes_positions(model):
        positions, padding = context.positions(next(model.parameters()).device), _padding_index(model)
        if padding is not None:
            _refuse_padding(kwargs.get("input_ids"), padding, context)
            positions = positions + padding + 1
        kwargs["position_ids"] = positions if positions.dim() == 2 else positions.unsqueeze(0)
    if kwargs.get("labels") is not None and shifts_labels(model):
        kwargs["shift_labels"] = kwargs["labels"]
    return args, kwargs


def _refuse_padding(tokens: Tensor | None, padding: int, context: SequenceContext) -> None:
    """Raise ModelError where a model that leaves padding out as it counts would count other positions."""
    if tokens is None:
        return
    real = context.present.real(len(tokens), tokens.device)
    own = context.layout.shard(real, context.sequence.rank, dim=1, fill=0)
    if bool(((tokens == padding) & own).any()):
        raise ModelError(
            f"padding tokens {padding} that no attention_mask tells of, in a model that does not count them",
            allowed="padding told to lss.shard by attention_mask",
        )
