"""Sequence parallelism applied to a model from outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from inspect import signature
from itertools import count
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lss import fully_sharded
from lss.adapters import transformers
from lss.adapters.losses import with_whole_losses
from lss.attention import (
    AttentionLayer,
    DistributedAttention,
    Gather,
    KernelName,
    Route,
    Schedule,
    attention_layers,
)
from lss.collectives import Axis
from lss.compiled import eager
from lss.context import SequenceContext, attach
from lss.dropout import PositionDropout, Site
from lss.errors import ModelError
from lss.gradients import buckets, num_parameters, require_same_parameters
from lss.layout import Layout, LayoutName
from lss.ledger import Ledger
from lss.mesh import DATA, SEQUENCE
from lss.models.positions import LearnedPositions
from lss.positions import ShardedPositions
from lss.refusals import refusals

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
        kernel: What computes attention; `auto` takes the fastest that can.
        keep: Whether what was gathered is kept for backward; else it is gathered again, and memory falls to that of one
            layer.
        chunks: Pieces in which it is gathered, the next on its way while one is computed; none is kept. One more
            message forward, and two backward, for each piece more.
        layout: By which the rows of learned positional tables are held: the one that is given to `lss.shard`, else the
            tables are gathered once a step.
        seed: Keys the dropout, together with the step.
        ordered: Whether sums over ranks are taken in the order of the ranks, for runs that repeat bit by bit on any
            backend; more is sent.

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
    layers = attention_layers(model)
    schedule = Schedule(gather, kernel, keep, chunks)
    for refusal in refusals(model):
        raise refusal
    ledger = Ledger()
    sequence, data = (Axis.of(mesh, name, ledger, ordered=ordered) for name in (SEQUENCE, DATA))
    context = SequenceContext(sequence, data, seed, ledger)
    _send_weights(model, context)
    _shard_positions(model, layout, context)
    rates = {name: attention_dropout(layer) for name, layer in layers.items()}
    sites = count()
    inside = _key_dropout(model, set(layers), context, sites)
    for name, layer in layers.items():
        site = Site(name, rates[name], next(sites), context) if rates[name] else None
        route = Route(context, schedule, name)
        layer.forward = DistributedAttention(cast(AttentionLayer, layer), route, signature(layer.forward), site)
    for module in model.modules():
        module.register_forward_hook(partial(_watch, context))
    model.register_forward_pre_hook(partial(_begin, context), with_kwargs=True)
    if transformers.is_pretrained(model):
        transformers.adapt(model, context, schedule, sites)
        with_whole_losses(model, context)
    model.register_forward_hook(partial(_end, context, inside), always_call=True)
    _keep_tables_from_ddp(model)
    context.num_parameters = num_parameters(model)
    attach(model, context)
    return model


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state of the plain model, positional tables reassembled, on every rank: to be saved by one of them.

    A collective call: every rank must make it. `load_full_state_dict` takes it back, at any number of ranks.
    """
    state = {name: fully_sharded.whole(tensor) for name, tensor in model.state_dict().items()}
    for names, module in _instances(model, ShardedPositions):
        table = module.whole(module.weight)
        state |= {f"{name}.weight": table for name in names}
    return state


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the state of the plain model, as `full_state_dict` gives it, into a parallelized one, alike on every rank.

    Raises:
        ModelError: Names or shapes are not those of the model.
    """
    known = model.state_dict()
    parts = {name: fully_sharded.cut_like(given, known.get(name, given)) for name, given in state.items()}
    for names, module in _instances(model, ShardedPositions):
        for name in names:
            if (table := parts.get(f"{name}.weight")) is not None and len(table) == module.layout.length:
                parts[f"{name}.weight"] = module.rows_of(table)
    try:
        model.load_state_dict(parts)
    except RuntimeError as error:
        raise ModelError(
            f"a state that does not fit: {error}", allowed="that of the plain model, as full_state_dict gives it"
        ) from error


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients under the names of the plain model's parameters, rows of positional tables put together.

    On every rank; parameters without a gradient are left out. A collective call.
    """
    fully_sharded.settle(model)
    found = ((name, weight.grad) for name, weight in model.named_parameters())
    gradients = {name: fully_sharded.whole(gradient) for name, gradient in found if gradient is not None}
    for name, module in model.named_modules():
        if isinstance(module, ShardedPositions) and module.weight.grad is not None:
            gradients[f"{name}.weight"] = module.whole(module.weight.grad)
    return gradients


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
    for names, module in _instances(model, LearnedPositions):
        rows = Layout.named(cut_by, module.num_embeddings, context.sequence.size)
        _replace(model, names, ShardedPositions(module, rows, context, names[0]))


def _keep_tables_from_ddp(model: nn.Module) -> None:
    """Rows differ between ranks, so DistributedDataParallel must not average them; it does no harm to the others."""
    names = [f"{name}.weight" for found, _ in _instances(model, ShardedPositions) for name in found]
    if names:
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def attention_dropout(layer: nn.Module) -> float:
    """Rate of the dropout of attention weights: a number, or an `nn.Dropout`."""
    given = getattr(layer, "attention_dropout", 0.0)
    return given.p if isinstance(given, nn.Dropout) else float(given or 0.0)


def _key_dropout(model: nn.Module, layers: set[str], context: SequenceContext, sites: Iterator[int]) -> list[Site]:
    """Replace all dropout; the sites inside of attention layers, which must be called by their projections."""
    inside = []
    for names, module in _instances(model, nn.Dropout):
        site = Site(names[0], module.p, next(sites), context)
        _replace(model, names, PositionDropout(site).train(module.training))
        parent, _, child = names[0].rpartition(".")
        within = any(parent == layer or parent.startswith(f"{layer}.") for layer in layers)
        if within and module.p and not (parent in layers and child == "attention_dropout"):
            inside.append(site)
    return inside


def _instances(model: nn.Module, kind: type[Module]) -> list[tuple[list[str], Module]]:
    """Modules of a kind, each with all names under which the model holds it."""
    found: dict[int, tuple[list[str], Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kind):
            found.setdefault(id(module), ([], module))[0].append(name)
    return list(found.values())


def _replace(model: nn.Module, names: list[str], module: nn.Module) -> None:
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)


def _watch(context: SequenceContext, module: nn.Module, args: Any, outputs: Any) -> None:
    if not torch.compiler.is_compiling():  # what is compiled is not recomputed as modules
        context.watch(outputs)


@eager
def _end(context: SequenceContext, inside: list[Site], model: nn.Module, args: Any, outputs: Any) -> None:
    """The call is over; a dropout of an attention layer that it did not come to would have been lost in silence."""
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
    context.begin(kwargs.pop("segment", None), training=model.training)
    return args, kwargs
