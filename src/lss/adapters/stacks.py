"""Models whose layers cut whole sequences: each rank works on its own tokens between the first layer and the last."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lss.context import SequenceContext
from lss.duals import gather
from lss.errors import ModelError
from lss.frames import in_backward


def stacks(model: nn.Module, attention: Iterable[str]) -> list[list[str]]:
    """Names of the modules of each stack of layers, in order.

    A stack is the outermost list (or sequence) of modules that holds attention, from its first member that does to its
    last; attention in no list is a stack of its own.

    Args:
        model: The model.
        attention: Names of its attention modules.
    """
    found: dict[str, list[str]] = {}
    for name in attention:
        container = next((outer for outer in _ancestors(name) if _is_list(model.get_submodule(outer))), None)
        if container is None:
            found[name] = [name]
            continue
        prefix = f"{container}." if container else ""
        member = prefix + name.removeprefix(prefix).split(".")[0]
        members = found.setdefault(container + ".*", [])
        if member not in members:
            members.append(member)
    return list(found.values())


def cut_in_layers(model: nn.Module, stack: list[str], context: SequenceContext, *, joins: bool) -> None:
    """Have a stack's first member cut its input, and its last one join its output, in place.

    Args:
        model: The model.
        stack: Names of its members.
        context: Of the model.
        joins: Whether whole sequences go on behind it; in an encoder whose decoder is cut by tokens they do not.
    """
    for name in stack:
        model.get_submodule(name).register_forward_pre_hook(partial(_cut, context, name), with_kwargs=True)
    if joins:
        model.get_submodule(stack[-1]).register_forward_hook(partial(_join, context, stack[-1]))


def _ancestors(name: str) -> list[str]:
    """Of a module, outermost first, the model itself among them."""
    parts = name.split(".")
    return [".".join(parts[:number]) for number in range(len(parts))]


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _cut(
    context: SequenceContext, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first tensor is the tokens; what else has a row for each of them is cut too, such as rotary angles."""
    tokens = next((part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)), None)
    if tokens is None or tokens.dim() < 3:
        raise ModelError(
            f"{name} was not given the tokens as its first tensor, [B, L, E]",
            allowed="layers that take hidden states first",
        )
    dim, length = context.token_dim, tokens.size(context.token_dim)
    if not context.is_cut:
        context.cut_tokens(tokens.size(1 - dim), length)
    layout, rank = context.layout, context.sequence.rank

    known: dict[int, Any] = {}  # what is given twice stays one tensor

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) in known:
            return known.get(id(value), value)
        along = dim if value is tokens and length == layout.length else _rows_dim(value, tokens, layout.length)
        known[id(value)] = value if along is None else layout.shard(value, rank, dim=along, fill=None)
        return known[id(value)]

    others = (part for part in (*args, *kwargs.values()) if isinstance(part, Tensor) and part is not tokens)
    context.others = frozenset(part.size(dim) for part in map(cut, others) if part.dim() == 3)
    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(cut, (args, kwargs))
    return found


def _rows_dim(value: Tensor, tokens: Tensor, length: int) -> int | None:
    """The dim along which a tensor that a layer is given beside the tokens has one row for each of them.

    None for whole masks, which attention cuts, and for the tokens of an encoder, as wide as the layer's own.
    """
    if value is tokens or value.dim() < 2:
        return 0 if value.dim() == 1 and len(value) == length and not value.is_floating_point() else None
    if value.dim() == 2 and value.size(1) == length and value.size(0) != length:
        is_mask = value.dtype == torch.bool or value.is_floating_point()
        return None if is_mask else 1  # [B, L]: positions
    is_source = value.dim() == 3 and value.shape[::2] == tokens.shape[::2]
    return value.dim() - 2 if value.size(-2) == length != value.size(-1) and not is_source else None


def _join(context: SequenceContext, name: str, module: nn.Module, args: Any, outputs: Any) -> Any:
    tokens, others = (outputs, ()) if isinstance(outputs, Tensor) else (outputs[0], tuple(outputs[1:]))
    layout, dim = context.layout, context.token_dim
    if context.trial is not None:
        context.join_tokens()
        whole = context.trial.join(tokens, layout.length, dim)
        return whole if isinstance(outputs, Tensor) else (whole, *others)
    if any(isinstance(part, Tensor) and layout.segment_length in part.shape for part in others):
        raise ModelError(f"{name} returns several tensors of tokens", allowed="layers that return hidden states alone")
    by_slot = tokens.transpose(0, dim)  # [S, B, E]
    whole = layout.unshard(gather(by_slot.contiguous(), context.sequence, name), dim=0).transpose(0, dim)
    if not in_backward():
        context.join_tokens()
    return whole if isinstance(outputs, Tensor) else (whole, *others)
