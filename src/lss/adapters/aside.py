"""Running a model's code aside: nothing is sent, what it makes is noted, and all is left as it was."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from lss.context import SequenceContext
from lss.frames import Frames
from lss.trial import Trial, version_of


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
        for around in (_as_it_was(model), _in_trial(context, trial), _watched(model, trial), _quiet()):
            stack.enter_context(around)
        if not any(other is mode for other in _get_current_function_mode_stack()):
            stack.enter_context(mode)
        yield


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
