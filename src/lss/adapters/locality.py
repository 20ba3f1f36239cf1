"""Whether a model's code keeps tokens alone outside attention, and numbers them by their place in the whole sequence.

Before its first call, its code is run on a few tokens of the rank at once, and again on either half of them, with
something in the place of attention that keeps tokens alone too. Whatever then differs would differ between ranks.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from lss.adapters import losses
from lss.adapters.alike import alike
from lss.collectives import agree
from lss.compiled import eager
from lss.context import SequenceContext
from lss.errors import ModelError
from lss.frames import Frames
from lss.layout import Layout
from lss.segment import Segment
from lss.trial import RANDOM, Place, Trial, tensors_in, version_of

# Tokens of either half of a trial, and of both: as nothing else has, so that what is as long is of tokens.
_HALVES = ((19, 22), (23, 26), (29, 34), (31, 38), (37, 46), (43, 58), (53, 62), (61, 74), (71, 82))
_LOSS = "a loss"
_ALONE = "alone, as tried on a few tokens"


class _StoppedError(Exception):
    """The model's code raised an error, its cause."""


class Locality:
    """Tries a model's code before its first call in training, in evaluation, and with other arguments.

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
        if context.sequence.size == 1 or context.trial is not None:
            return
        way = _way(self.model.training, args, kwargs)
        if way in context.tried or any(layout.segment_length < 2 for layout in _layouts(context)):
            return
        attempt = partial(self._try, way, args, kwargs)
        # later ways may be those of one rank, which must not wait for others
        context.tried[way] = agree(attempt, context.sequence.group) if context.num_calls == 1 else attempt()
        if context.tried[way] != _ALONE and context.sequence.rank == 0:
            name = type(self.model).__name__
            warnings.warn(f"whether {name} keeps tokens alone was {context.tried[way]}", stacklevel=2)

    def _try(self, way: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What came of it, for people."""
        context, numbers_tokens = self.context, dict(self.context.numbers_tokens)
        try:
            found = self._first_difference(_unusual(self.model, (args, kwargs)), args, kwargs)
        except _StoppedError as stopped:
            error = stopped.__cause__
            said = f"not tried, {type(error).__name__}: {error}"
            context.numbers_tokens = numbers_tokens
            return said
        if found:
            raise _refusal(*found)
        return _ALONE

    def _first_difference(
        self, halves: tuple[int, int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, str] | None:
        """The module whose code is the first to make something else of a token, and what."""
        tokens = range(sum(halves))
        parts = (tokens, tokens[: halves[0]], tokens[halves[0] :])
        trials, results = zip(*(self._run(halves, part, args, kwargs) for part in parts), strict=True)
        whole, *others = (trial.notes for trial in trials)
        for place, note in whole.items():
            pair = [part[place] for part in others if place in part]
            kept = all(version_of(values) == version for values, version in (note, *pair))
            if len(pair) < 2 or not kept or self._passes(place, note[0], pair[0][0], pair[1][0], halves):
                continue
            return None if _is_in(place[0], self.context.safe) else place[:2]
        return ("", _LOSS) if _is_of_one_rank(*results) else None

    def _passes(self, place: Place, whole: Tensor, first: Tensor, second: Tensor, halves: tuple[int, int]) -> bool:
        name, what, _ = place
        is_inner = what.startswith("calls") or what.startswith(RANDOM)
        if is_inner and _is_in(name, self.context.safe):
            return True  # of a module that is declared safe what it returns tells
        if what.startswith(RANDOM):
            return False
        if what.startswith("calls") and not whole.dim():
            return True
        return alike(whole, first, second, halves, may_count=what.startswith("calls"))

    def _run(
        self, halves: tuple[int, int], tokens: range, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Trial, Any]:
        """What the model's code makes of some tokens, and returns."""
        context = self.context
        trial = Trial(context.sequence.rank, context.sequence.size, halves, tokens)
        cut = _Cut(trial, list(_layouts(context)), context.token_dim)
        args, kwargs = cut(args), cut(kwargs)
        with ExitStack() as stack:
            for around in (_as_it_was(self.model), _in_trial(context, trial), _watched(self.model, trial), _quiet()):
                stack.enter_context(around)
            if not any(mode is self.mode for mode in _get_current_function_mode_stack()):
                stack.enter_context(self.mode)
            try:
                if context.cut == "tokens" and not cut.has_cut:
                    raise ModelError(f"no tensor of {context.layout.segment_length} tokens among the arguments")
                result = self.forward(*args, **kwargs)
            except Exception as error:
                raise _StoppedError from error
            trial.note("returns", result, integers=True)
        return trial, result


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


def _is_in(name: str, safe: tuple[str, ...]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in safe)


def _is_of_one_rank(whole: Any, first: Any, second: Any) -> bool:
    """Whether a loss is neither the same on all ranks nor the sum of what they return."""
    found = [loss_of(result) for result in (whole, first, second)]
    if any(loss is None for loss in found):
        return False
    total, *parts = (float(loss) for loss in found if loss is not None)
    within = 1e-4 * max(map(abs, (total, *parts)))
    return max(abs(total - part) for part in parts) > within and abs(total - sum(parts)) > within


def loss_of(result: Any) -> Tensor | None:
    """A scalar that a model returns as `loss`, or alone, or as the first of a tuple."""
    found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
    found = found[0] if isinstance(found, tuple | list) and found else found
    return found if isinstance(found, Tensor) and not found.dim() and found.is_floating_point() else None


def _way(training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """In which of its ways a model is called: what it is given, and what is switched on."""
    said = [type(value).__name__ if not isinstance(value, bool | str) else str(value) for value in args]
    named = {name: value for name, value in sorted(kwargs.items()) if value is not None}
    said += [f"{name}={value}" if isinstance(value, bool | str) else name for name, value in named.items()]
    return f"{'training' if training else 'evaluation'} with {', '.join(said)}"


def _unusual(model: nn.Module, given: Any) -> tuple[int, int]:
    """Numbers of tokens that nothing else has: no argument, and no weight, nor a half of one."""
    tensors = (*tensors_in(given), *model.parameters(), *model.buffers())
    sizes = {size for tensor in tensors for size in tensor.shape}
    taken = {number for size in sizes for number in (size, size - 1, size // 2, size // 2 - 1)}
    return next((halves for halves in _HALVES if not taken & {*halves, sum(halves)}), _HALVES[-1])


def _layouts(context: SequenceContext) -> Iterator[Layout]:
    """Of the sequences in a model's arguments."""
    batch = context.target
    while isinstance(batch, Segment):
        yield batch.layout
        batch = batch.source


class _Cut:
    """Cuts the tokens of a trial out of whatever holds a slot of the segment for each place along a dim.

    Args:
        trial: The trial.
        layouts: Of the segments.
        token_dim: Where tokens are looked for first.
    """

    def __init__(self, trial: Trial, layouts: list[Layout], token_dim: int) -> None:
        self.trial, self.layouts, self.token_dim = trial, layouts, token_dim
        self.known: dict[int, Tensor] = {}  # what is given twice stays one tensor
        self.has_cut = False

    def __call__(self, value: Any) -> Any:
        """The same with fewer tokens; tensors are copies, as code may change them in place."""
        if isinstance(value, Tensor):
            return self.known.setdefault(id(value), self._of_tensor(value))
        if isinstance(value, int) and not isinstance(value, bool):
            return len(self.trial.tokens) if any(value == part.segment_length for part in self.layouts) else value
        if isinstance(value, Mapping):
            return _like(value, {name: self(part) for name, part in value.items()})
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self, value))
        if isinstance(value, tuple | list):
            return type(value)(map(self, value))
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{part.name: self(getattr(value, part.name)) for part in fields(value) if part.init})
        return value

    def _of_tensor(self, value: Tensor) -> Tensor:
        for dim in sorted(range(value.dim()), key=lambda dim: (dim != self.token_dim, dim > 1, dim)):
            for layout in self.layouts:
                if value.size(dim) == layout.segment_length:
                    self.has_cut = True
                    return value.detach().index_select(dim, torch.tensor(self.trial.slots(layout), device=value.device))
        return value.detach().clone()


def _like(value: Mapping[str, Any], parts: dict[str, Any]) -> Any:
    """A mapping of the same kind, where it can be made from one."""
    try:
        return type(value)(parts)  # type: ignore[call-arg]
    except TypeError:
        return parts


@contextmanager
def _in_trial(context: SequenceContext, trial: Trial) -> Iterator[None]:
    """A rank by itself, with the tokens of a trial."""
    before = vars(context).copy()
    assert context.target is not None
    batch = trial.segment(context.target)
    frames = Frames()
    frames.enter("", "")
    changed: dict[str, Any] = {"trial": trial, "segment": batch, "target": batch, "source": None, "frames": frames}
    for name in ("sequence", "data"):
        changed[name] = replace(getattr(context, name), size=1, rank=0, group=None)
    vars(context).update(changed, positions_found={})
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
    """Attributes, what they list, buffers and random numbers are left as they were."""
    modules = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    listed = [
        (value, value.copy())
        for _, attributes, _ in modules
        for name, value in attributes.items()
        if type(value) in (list, dict, set) and not name.startswith("_")
    ]
    buffers = [(buffer, version_of(buffer), buffer.clone()) for buffer in model.buffers()]
    devices = {weight.device for weight in model.parameters() if weight.device.type == "cuda"}
    numbers, more_numbers = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(numbers)
        np.random.set_state(more_numbers)
        for value, before in listed:
            value.clear()
            value.extend(before) if isinstance(value, list) else value.update(before)
        for module, attributes, own in modules:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(own)
        for buffer, version, values in buffers:
            if version_of(buffer) != version or buffer.is_inference():
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
