"""Sequence parallelism applied to a model from outside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from inspect import signature
from itertools import count
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lss import fully_sharded
from lss.adapters import losses, positions, torch_nn, transformers
from lss.adapters.found import attention_modules
from lss.adapters.functions import Compiled, Entered, Functions
from lss.adapters.locality import Locality
from lss.adapters.rules import Rules
from lss.adapters.stacks import cut_in_layers, stacks
from lss.attention import (
    AttentionLayer,
    DistributedAttention,
    Gather,
    KernelName,
    Route,
    Schedule,
    Strategy,
    attention_layers,
)
from lss.batch import CUTS, Cut
from lss.collectives import Axis
from lss.compiled import eager
from lss.context import SequenceContext, attach
from lss.dropout import PositionDropout, Site
from lss.errors import ModelError
from lss.frames import in_backward, is_within, user_of
from lss.gradients import buckets, num_parameters, require_same_parameters
from lss.layout import Layout, LayoutName
from lss.ledger import Ledger
from lss.mesh import DATA, SEQUENCE
from lss.models.positions import LearnedPositions
from lss.positions import ShardedPositions
from lss.refusals import default_cut, refusals
from lss.state import instances

Model = TypeVar("Model", bound=nn.Module)
Module = TypeVar("Module", bound=nn.Module)


def parallelize(
    model: Model,
    mesh: DeviceMesh | None,
    *,
    gather: Gather = "auto",
    kernel: KernelName = "auto",
    keep: bool = True,
    chunks: int = 1,
    layout: LayoutName = "zigzag",
    seed: int = 0,
    ordered: bool = False,
    cut: Cut | None = None,
    safe: Sequence[str] = (),
    strategy: Strategy = "lss",
) -> Model:
    """Make a plain model work on one segment a rank, with the result of the whole sequence.

    In place: attention layers collect keys and values, learned positional tables keep the rows of this rank's segment,
    dropout is keyed by global position, and the weights of rank 0 are sent to all ranks. Parameters stay the same
    objects under the same names; those of positional tables get fewer rows.

    Args:
        model: A model whose attention layers follow `AttentionLayer`, such as `lss.models.GPT`.
        mesh: The mesh of `init_mesh`, or any DeviceMesh with an axis `sequence` and perhaps `data`; None for one rank
            alone.
        gather: What an attention layer gathers: its input (`x`, one message), keys and values packed (`kv`, one
            message), or apart (`separate`, two); `auto` takes `x` or `kv`, whichever takes fewer seconds.
        kernel: What computes attention; `auto` takes the fastest that can; `stored` keeps all scores for backward, as
            the paper ran.
        keep: Whether what was gathered is kept for backward; else it is gathered again, and memory falls to that of one
            layer.
        chunks: Pieces in which it is gathered, the next on its way while one is computed; none is kept. One more
            message forward, and two backward, for each piece more.
        layout: By which the rows of learned positional tables are held: the one that is given to `lss.shard`, else the
            tables are gathered once a step.
        seed: Keys the dropout, together with the step.
        ordered: Whether sums over ranks are taken in the order of the ranks, for runs that repeat bit by bit on any
            backend; more is sent.
        cut: `tokens`: the batch is cut by `lss.shard`, and the whole model works on segments. `layers`: the model is
            given whole batches, and its tokens are cut on the way into its first layer and put together behind its
            last; so whatever it does with whole sequences outside of its layers (pooling, patches, positions, masks)
            stays as it was, at the price of doing it on every rank. None for `layers` where the model takes images or
            sounds and predicts no tokens, else `tokens`.
        safe: Names of modules that may be refused and that keep tokens alone all the same, as you say; and of buffers
            in which ranks may differ.
        strategy: `lss`; or, to compare, another way of sending keys and values that gives the same: `ring`, `lightseq`,
            `ulysses`.

    Returns:
        The same model. It takes one argument more, `segment`, from `lss.shard`.

    Raises:
        ModelError: The model holds something that cannot be honoured over segments.

    Example:
        >>> import lss
        >>> from lss.models import GPT, GPTConfig
        >>> mesh = lss.init_mesh(sequence=1, device="cpu")
        >>> model = lss.parallelize(GPT(GPTConfig(width=32, layers=1, heads=2)), mesh)
        >>> batch = lss.shard({"tokens": torch.zeros(1, 8, dtype=torch.int64)}, mesh)
        >>> model(batch["tokens"], segment=batch["segment"]).shape
        torch.Size([1, 8, 256])
    """
    schedule = Schedule(gather, kernel, keep, chunks, strategy)
    if cut not in (None, *CUTS):
        raise ModelError(f"cut={cut!r}", allowed=", ".join(CUTS))
    cut = cut or default_cut(model)
    for refusal in refusals(model, cut=cut, safe=safe):
        raise refusal
    ledger = Ledger()
    sequence, data = (Axis.of(mesh, name, ledger, ordered=ordered) for name in (SEQUENCE, DATA))
    context = SequenceContext(sequence, data, seed, ledger, cut, layout, 1 - _comes_second(model), tuple(safe))
    _send_weights(model, context)
    tables = None if _is_told_positions(model) else positions.Tables.of(model)
    if cut == "tokens":
        _shard_positions(model, layout, context)
    rules = Rules()
    sites = count()
    inside = _replace(model, context, schedule, rules, sites)
    functions = Functions(context, schedule, rules, tables)
    tried = Locality(model, model.forward, context, functions)
    entered, model.forward = Entered(functions), Compiled(model.forward, functions, tried)
    for name, module in model.named_modules():
        module.register_forward_pre_hook(partial(_enter, context, entered, name, user_of(model, name)))
        module.register_forward_hook(partial(_leave, context, entered, name), always_call=True)
    model.register_forward_pre_hook(partial(_begin, context), with_kwargs=True)
    for stack in stacks(model, attention_modules(model)):
        if cut == "layers" or transformers.is_of_uncut_encoder(model, stack[0]):
            cut_in_layers(model, stack, context, joins=cut == "layers")
    if transformers.is_pretrained(model):
        transformers.adapt(model, context, schedule, sites)
    model.register_forward_hook(partial(_end, context, inside), always_call=True)
    _keep_tables_from_ddp(model)
    context.num_parameters = num_parameters(model)
    attach(model, context)
    return model


def _send_weights(model: nn.Module, context: SequenceContext) -> None:
    """Overwrite all parameters and buffers with those of rank 0, as ranks may have been seeded differently."""
    if context.sequence.size * context.data.size == 1:
        return
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    for bucket in buckets(tensors):
        message = torch.cat([tensor.reshape(-1) for tensor in bucket])
        for axis in (context.sequence, context.data):
            axis.broadcast_(message, layer="weights", phase="setup")
        for tensor, part in zip(bucket, message.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _shard_positions(model: nn.Module, layout: LayoutName, context: SequenceContext) -> None:
    cut_by = "zigzag" if layout == "balanced" else layout  # a table is not of one batch
    for names, module in instances(model, LearnedPositions):
        rows = Layout.named(cut_by, module.num_embeddings, context.sequence.size)
        _set(model, names, ShardedPositions(module, rows, context, names[0]))


def _keep_tables_from_ddp(model: nn.Module) -> None:
    """Rows differ between ranks, so DistributedDataParallel must not average them; it does no harm to the others."""
    names = [f"{name}.weight" for found, _ in instances(model, ShardedPositions) for name in found]
    if names:
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def attention_dropout(layer: nn.Module) -> float:
    """Rate of the dropout of attention weights: a number, or an `nn.Dropout`."""
    given = getattr(layer, "attention_dropout", 0.0)
    return given.p if isinstance(given, nn.Dropout) else float(given or 0.0)


def _key_dropout(model: nn.Module, layers: set[str], context: SequenceContext, sites: Iterator[int]) -> list[Site]:
    """Replace all dropout; the sites inside of attention layers, which must be called by their projections."""
    inside = []
    for names, module in instances(model, nn.Dropout):
        site = Site(names[0], module.p, next(sites), context)
        _set(model, names, PositionDropout(site).train(module.training))
        parent, _, child = names[0].rpartition(".")
        if is_within(parent, layers) and module.p and not (parent in layers and child == "attention_dropout"):
            inside.append(site)
    return inside


def _set(model: nn.Module, names: list[str], module: nn.Module) -> None:
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)


def _replace(
    model: nn.Module, context: SequenceContext, schedule: Schedule, rules: Rules, sites: Iterator[int]
) -> list[Site]:
    """Replace dropout and the forwards of attention layers; the sites that such a forward must come to."""
    layers = attention_layers(model)
    rates = {name: attention_dropout(layer) for name, layer in layers.items()}
    inside = _key_dropout(model, set(layers), context, sites)
    for name, layer in layers.items():
        site = Site(name, rates[name], next(sites), context) if rates[name] else None
        route = Route(context, schedule, name)
        layer.forward = DistributedAttention(cast(AttentionLayer, layer), route, signature(layer.forward), site)
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            site = Site(name, module.dropout, next(sites), context)
            route, crosses = Route(context, schedule, name), torch_nn.crosses(model, name)
            module.forward = torch_nn.SegmentedMultihead(module, route, site, rules, crosses)  # type: ignore[method-assign]
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return inside


def _is_told_positions(model: nn.Module) -> bool:
    """Whether a model takes positions as an argument, or its layers do, so that its code need not make them."""
    return bool(attention_layers(model)) or transformers.takes_positions(model)


def _comes_second(model: nn.Module) -> bool:
    """Whether sequences come second in what its modules are given, [S, B, E]."""
    return any(isinstance(module, nn.MultiheadAttention) and not module.batch_first for module in model.modules())


def _enter(context: SequenceContext, entered: Entered, name: str, user: str, module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    frames = context.frames
    if not name and not in_backward():
        frames.running.clear()  # what an error may have left
    if not frames.running or in_backward():
        entered.enter()
    frames.enter(name, user)


def _leave(context: SequenceContext, entered: Entered, name: str, module: nn.Module, args: Any, outputs: Any) -> None:
    if torch.compiler.is_compiling():  # what is compiled is not recomputed as modules
        return
    context.watch(outputs)
    context.frames.leave(name)
    if not context.frames.running:
        entered.leave()


@eager
def _end(context: SequenceContext, inside: list[Site], model: nn.Module, args: Any, outputs: Any) -> None:
    """The call is over; a dropout of an attention layer that it did not come to would have been lost in silence."""
    if context.cut == "layers" and context.is_cut and outputs is not None and not in_backward():
        raise ModelError(
            "the model left its layers before the last one",
            allowed="with cut='layers', models that call all of their layers in order",
        )
    if outputs is not None and not in_backward():
        context.findings.require_made()
        if model.training:
            losses.require_taken(model, outputs, first=context.num_trained == 1)
    context.end()
    context.watch(outputs)  # in a compiled model too
    skipped = [site.name for site in inside if site.last_call != context.num_calls]
    if model.training and outputs is not None and skipped:
        raise ModelError(
            f"the dropout {skipped[0]} is not used: the layer's own forward is replaced by its three projections",
            allowed="dropout of attention weights as the number `attention_dropout`, other dropout in project_output",
        )


@eager
def _begin(
    context: SequenceContext, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    require_same_parameters(model, context)
    fully_sharded.prepare(model)
    first = next((part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)), None)
    sequences = first.size(1 - context.token_dim) if first is not None and first.dim() > 1 else 0
    context.begin(kwargs.pop("segment", None), sequences, training=model.training)
    return args, kwargs
