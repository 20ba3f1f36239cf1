"""Running a model's code aside: nothing is sent, what it makes is noted, and all is left as it was."""

from __future__ import annotations

import random
import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from lss.context import SequenceContext
from lss.frames import Frames
from lss.fully_sharded import own_part, sharded_modules
from lss.trial import RETURNS, Trial

# What torch itself keeps in a module.
_OF_TORCH = frozenset(vars(nn.Module()))
# Weights whose numbers are all the same and no larger than this are gates that are shut, and heads as they are made.
_NEXT_TO_NOTHING = 1e-3


@contextmanager
def aside(model: nn.Module, context: SequenceContext, trial: Trial, mode: TorchFunctionMode) -> Iterator[None]:
    """Within it the model's code is tried.

    Args:
        model: The model.
        context: Of the model.
        trial: Notes what its modules are given and return.
        mode: Is in force.
    """
    with ExitStack() as stack:
        for around in (_as_it_was(model), _in_trial(context, trial), _watched(model, context), _quiet()):
            stack.enter_context(around)
        if not any(other is mode for other in _get_current_function_mode_stack()):
            stack.enter_context(mode)
        yield


@contextmanager
def opened(model: nn.Module) -> Iterator[None]:
    """Weights that are all next to nothing hold other numbers, the same on all ranks: else they hide things."""
    with ExitStack() as stack:
        stack.callback(_reshard, model)
        for number, weight in enumerate(model.parameters()):
            values = own_part(weight).detach()
            if weight.requires_grad and (constant := _constant(values)) is not None:
                stack.callback(values.data.fill_, constant)  # the same bits: graphs that hold the weight may go on
                values.data.uniform_(-0.05, 0.05, generator=torch.Generator(values.device).manual_seed(number))
        yield


def _reshard(model: nn.Module) -> None:
    """Free the whole weights that `fully_shard` has gathered in the trial."""
    for module in sharded_modules(model):
        if module is not model:
            module.reshard()


def _constant(values: Tensor) -> float | None:
    is_there = values.numel() and values.untyped_storage().size()
    if not is_there or not values.is_floating_point() or values.element_size() < 2:
        return None
    least, most = (bound.item() for bound in values.aminmax())
    return least if least == most and abs(least) <= _NEXT_TO_NOTHING else None


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
    changed["findings"] = replace(context.findings, positions={}, come_by=set())
    vars(context).update(changed)
    try:
        yield
    finally:
        vars(context).update(before)


@contextmanager
def _watched(model: nn.Module, context: SequenceContext) -> Iterator[None]:
    """Have a trial note what modules are given and return."""

    def enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        trial = context.trial
        assert trial is not None
        trial.note(f"gives {name}", (args, kwargs))
        trial.note_draws()
        trial.running.append(name)

    def leave(module: nn.Module, args: Any, outputs: Any) -> None:
        trial = context.trial
        assert trial is not None
        trial.note(RETURNS, outputs)
        trial.note_draws()
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
    """Attributes, what they list, tensors that are no weights, and random numbers are left as they were."""
    devices = {weight.device.index for weight in model.parameters() if weight.device.type == "cuda"}
    devices |= {torch.cuda.current_device()} if torch.cuda.is_initialized() else set()
    with ExitStack() as stack, torch.random.fork_rng(devices):
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        seen: set[int] = set()
        for module in model.modules():
            attributes = vars(module)
            for value in (module._buffers, *(value for name, value in attributes.items() if name not in _OF_TORCH)):
                for restore in _restores(value, seen):
                    stack.callback(restore)
            stack.callback(_put_back, attributes, attributes.copy())
        yield


def _restores(value: Any, seen: set[int]) -> Iterator[Callable[[], None]]:
    """What puts back what a value holds."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if type(value) is Tensor and value.layout is torch.strided and not value.is_meta:
        yield partial(_write_back, value, value.detach().clone())
    elif isinstance(value, SimpleNamespace):
        yield from _restores(vars(value), seen)
    elif isinstance(value, list | deque | dict | set):
        yield partial(_put_back, value, dict(value) if isinstance(value, dict) else copy(value))
        for part in value.values() if isinstance(value, dict) else value:
            yield from _restores(part, seen)


def _put_back(value: Any, before: Any) -> None:
    """Into a container, whatever its own kind allows."""
    kind: Any = next(kind for kind in (OrderedDict, dict, list, deque, set) if isinstance(value, kind))
    kind.clear(value)
    if isinstance(value, dict):
        for name, part in before.items():
            kind.__setitem__(value, name, part)
    else:
        (kind.update if kind is set else kind.extend)(value, before)


def _write_back(tensor: Tensor, before: Tensor) -> None:
    """Unseen by graphs that hold it."""
    if not torch.equal(tensor, before):
        (tensor if tensor.is_inference() else tensor.data).copy_(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without graphs, warnings, compilation and what autocast remembers."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # else autocast would take numbers of the trial for weights later, and weights for numbers of the trial
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
