"""Whether a model's code keeps tokens alone outside attention, and numbers them by their place in the whole sequence.

Before its first call, its code is run on a few tokens of the rank at once, and again on either half of them, with
something in the place of attention that keeps tokens alone too. Whatever then differs would differ between ranks.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree

from lss.adapters import losses
from lss.collectives import agree
from lss.compiled import eager
from lss.context import SequenceContext
from lss.errors import LssError, ModelError
from lss.frames import Frames
from lss.fully_sharded import is_cut
from lss.layout import Layout
from lss.segment import Segment
from lss.trial import Trial

# Tokens of half a trial: such as nothing else has, so that what is as long is of tokens.
_HALVES = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59)
# By how much of the largest value of a token it may differ.
_WITHIN = {torch.float64: 1e-6, torch.float32: 1e-4}
_WITHIN_16_BIT = 0.1

_LOSS = "a loss"


class _StoppedError(Exception):
    """The model's code raised an error, its cause."""


class Locality:
    """Tries a model's code before its first call in training, and in evaluation.

    Args:
        model: The parallelized model.
        forward: Its own forward.
        context: Of the model.
        mode: Is to be in force.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], context: SequenceContext, mode: TorchFunctionMode
    ) -> None:
        self.model, self.forward, self.context, self.mode = model, forward, context, mode

    @eager
    def require(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ModelError if tokens would not be alone, or not know their places.

        Args:
            args: Of the call that is to come.
            kwargs: The same by name.
        """
        context = self.context
        if context.sequence.size == 1 or context.trial is not None or self.model.training in context.tried:
            return
        agree(partial(self._try, args, kwargs), context.sequence.group)

    def _try(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        context, said = self.context, "alone, as tried on a few tokens"
        sizes = {size for value in pytree.tree_leaves((args, kwargs)) for size in getattr(value, "shape", ())}
        half = next(number for number in _HALVES if not sizes & {number, 2 * number})
        found = None
        try:
            found = self._first_difference(half, args, kwargs)
            is_refused = found is not None and found[0] not in context.safe
            if found and is_refused and found[1] != _LOSS and not any(map(is_cut, self.model.parameters())):
                found = self._first_difference(half, args, kwargs, looks_into=found[0]) or found
        except _StoppedError as stopped:  # what stops the call too is raised there
            error = stopped.__cause__
            said = f"not tried, {type(error).__name__}: {error}"
            if context.sequence.rank == 0 and not isinstance(error, LssError):
                warnings.warn(f"whether {type(self.model).__name__} keeps tokens alone was {said}", stacklevel=2)
        context.tried[self.model.training] = said
        if found and is_refused:
            raise _refusal(*found)

    def _first_difference(
        self, half: int, args: tuple[Any, ...], kwargs: dict[str, Any], looks_into: str | None = None
    ) -> tuple[str, str] | None:
        """The module whose code is the first to make something else of a token, and what."""
        tokens = range(2 * half)
        devices = {weight.device for weight in self.model.parameters() if weight.device.type == "cuda"}
        with torch.random.fork_rng(devices):  # each run draws other numbers, and the call to come those that it would
            parts = (tokens, tokens[:half], tokens[half:])
            whole, *halves = (self._run(half, part, args, kwargs, looks_into) for part in parts)
        for place, values in whole.items():
            pair = [part[place] for part in halves if place in part]
            if len(pair) < 2:
                continue
            is_loss = values.dim() == 0 and place[:2] == ("", "returns")
            if is_loss:
                pair = [pair[0] + pair[1]] * 2  # each rank's share, which averaging adds up
            if _differ(values, pair[0], pair[1], half):
                return ("", _LOSS) if is_loss else place[:2]
        return None

    def _run(
        self, half: int, tokens: range, args: tuple[Any, ...], kwargs: dict[str, Any], looks_into: str | None
    ) -> dict[tuple[str, str, int], Tensor]:
        """What the model's code makes of some tokens."""
        context = self.context
        trial = Trial(context.sequence.rank, context.sequence.size, half, tokens, looks_into)
        known = {id(value): value for value in pytree.tree_leaves((args, kwargs))}
        layouts = list(_layouts(context))
        cut = {key: _cut(trial, layouts, context.token_dim, value) for key, value in known.items()}
        args, kwargs = pytree.tree_map(lambda value: cut[id(value)], (args, kwargs))
        with ExitStack() as stack:
            if not any(mode is self.mode for mode in _get_current_function_mode_stack()):
                stack.enter_context(self.mode)
            for around in (_as_it_was(self.model), _in_trial(context, trial), _watched(self.model, trial), _quiet()):
                stack.enter_context(around)
            try:
                trial.note("returns", self.forward(*args, **kwargs))
            except Exception as error:
                raise _StoppedError from error
        return trial.seen


def _refusal(name: str, what: str) -> ModelError:
    if what == _LOSS:
        return losses.of_its_own()
    return ModelError(
        f"{name or 'the model'} {what} other values for a token where the rank has fewer tokens: it mixes tokens or "
        "picks some, draws random numbers, or counts positions from its segment's start",
        allowed="attention by scaled_dot_product_attention; outside of it functions of each token alone; positions by "
        "torch.arange(S) or by the first S rows of a table",
        remedy=f"lss.parallelize(model, mesh, cut='layers'), or safe=[{name!r}] if it is right all the same",
    )


def _layouts(context: SequenceContext) -> Iterator[Layout]:
    """Of the sequences in a model's arguments."""
    batch = context.target
    while isinstance(batch, Segment):
        yield batch.layout
        batch = batch.source


def _cut(trial: Trial, layouts: list[Layout], token_dim: int, value: Any) -> Any:
    """The tokens of a trial out of an argument that has a slot of the segment for each place along a dim."""
    if not isinstance(value, Tensor):
        return value
    for dim in (token_dim, 1 - token_dim):
        for layout in layouts:
            if value.dim() > 1 and value.size(dim) == layout.segment_length:
                slots = torch.tensor(trial.slots(layout), device=value.device)
                return value.detach().index_select(dim, slots)
    return value


@contextmanager
def _in_trial(context: SequenceContext, trial: Trial) -> Iterator[None]:
    """A rank alone, with the tokens of a trial."""
    before = vars(context).copy()
    assert context.target is not None
    batch = trial.segment(context.target)
    alone = {name: replace(getattr(context, name), size=1, rank=0, group=None) for name in ("sequence", "data")}
    frames = Frames()
    frames.enter("", "")
    vars(context).update(before, trial=trial, segment=batch, target=batch, source=None, frames=frames, **alone)
    try:
        yield
    finally:
        vars(context).update(before)


@contextmanager
def _watched(model: nn.Module, trial: Trial) -> Iterator[None]:
    """Have a trial note what modules are given and return."""

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        trial.note(f"gives {name}", (args, kwargs))
        trial.running.append(name)

    def leave(module: nn.Module, args: Any, outputs: Any) -> None:
        trial.note("returns", outputs)
        trial.running.pop()

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                entered = module.register_forward_pre_hook(partial(enter, name), prepend=True, with_kwargs=True)
                left = module.register_forward_hook(leave)
                stack.callback(entered.remove)
                stack.callback(left.remove)
        yield


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Attributes and buffers are left as they were: counters, tables that are made at first."""
    modules = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for module, attributes, own in modules:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(own)
        for buffer, values in buffers:
            buffer.copy_(values)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without graphs, warnings and compilation."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _differ(whole: Tensor, first: Tensor, second: Tensor, half: int) -> bool:
    """Whether values of the tokens next to where they were cut are others, or those that are of no token."""
    if whole.shape == first.shape == second.shape:
        flat = [part.reshape(1, -1) for part in (whole, first, second)]
        return not (_equal(*flat[:2]) and _equal(*flat[::2]))
    if whole.dim() != first.dim() or first.shape != second.shape:
        return False
    dims = [dim for dim, size in enumerate(whole.shape) if size != first.size(dim)]
    if len(dims) != 1 or first.size(dims[0]) % half or whole.size(dims[0]) != 2 * first.size(dims[0]):
        return False  # of pairs of tokens, or as many as its values say
    for is_outer in (True, False):  # [B * S] and [S * B] may be one dim
        cut = _by_token(first, dims[0], half, is_outer)[-1], _by_token(second, dims[0], half, is_outer)[0]
        if _equal(_by_token(whole, dims[0], 2 * half, is_outer)[half - 1 : half + 1], torch.stack(cut)):
            return False
    return dims[0] > 0 or not _equal(_in_order(whole), _in_order(torch.cat((first, second))))


def _in_order(rows: Tensor) -> Tensor:
    """Rows by their sums: those of an expert come in the order of the tokens that the rank has."""
    return rows[rows.flatten(1).double().sum(1).argsort()] if rows.dim() > 1 else rows.sort()[0]


def _by_token(values: Tensor, dim: int, number: int, is_outer: bool) -> Tensor:
    """[number, ...], of a dim that has them for each sequence, or the sequences for each of them."""
    shape = (-1, number) if is_outer else (number, -1)
    found: Tensor = values.unflatten(dim, shape).movedim(dim + is_outer, 0)
    return found


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors [tokens, ...] agree, within a share of the largest value of each token."""
    a, b = (part.reshape(len(part), -1).double().nan_to_num(posinf=1e30, neginf=-1e30) for part in (one, other))
    size = torch.maximum(a.abs(), b.abs()).amax(1)
    return bool(((a - b).abs().amax(1) <= _WITHIN.get(one.dtype, _WITHIN_16_BIT) * size).all())
