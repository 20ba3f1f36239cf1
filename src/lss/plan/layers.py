"""Models of many layers that are all alike, planned from two and three of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import nn

from lss.fake import fake_tensors
from lss.plan.memory import Peak
from lss.plan.result import Plan
from lss.plan.setup import Setup, container_of, explained
from lss.plan.timeline import Timeline
from lss.train.model import stacks_of

# Numbers of layers that are planned in the place of all.
FEW = (2, 3)


def num_like_layers(setup: Setup) -> int:
    """Layers of a model that are all alike; 0 if they are not, or in several stacks."""
    if setup.depth is not None:
        return 0
    return setup.config.gpt().layers if not setup.target else _of_function(setup)


@lru_cache(maxsize=16)
def _of_function(setup: Setup) -> int:
    with fake_tensors(), explained(setup):
        model, _ = setup.load()
    stacks = stacks_of(model)
    if len(stacks) != 1 or container_of(model, stacks[0]) is None:
        return 0
    signatures = [list(_signature(model.get_submodule(name))) for name in stacks[0]]
    return len(signatures) if all(signature == signatures[0] for signature in signatures) else 0


def _signature(layer: nn.Module) -> Iterator[Any]:
    """What tells two layers apart: kinds of modules, shapes, and settings, but not their numbers."""
    for name, module in layer.named_modules():
        yield name, type(module)
        yield [
            (name, tuple(weight.shape), weight.requires_grad) for name, weight in module.named_parameters(recurse=False)
        ]
        yield {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, str | bool | int | float) and "idx" not in key and "index" not in key
        }


def extrapolated(setup: Setup, few: Plan, more: Plan, number: int) -> Plan:
    """The plan of a run of many layers.

    Args:
        setup: The run.
        few: Its plan with few layers.
        more: With one layer more.
        number: Layers that the run has more than `few`.
    """

    def grown(one: float, other: float) -> int:
        return round(one + number * (other - one))

    found = {peak.phase: peak for peak in few.peaks}
    peaks = tuple(
        Peak({kind: grown(found[peak.phase].bytes[kind], size) for kind, size in peak.bytes.items()}, peak.phase)
        for peak in more.peaks
        if peak.phase in found
    )
    sent = {(message.axis, message.operation, message.phase): message for message in few.messages}
    messages = []
    for message in more.messages:
        nothing = replace(message, count=0, bytes=0, seconds=0.0)
        before = sent.get((message.axis, message.operation, message.phase), nothing)
        count, size = grown(before.count, message.count), grown(before.bytes, message.bytes)
        seconds = before.seconds + number * (message.seconds - before.seconds)
        messages.append(replace(message, count=count, bytes=size, seconds=seconds))
    spent = {}
    for name in ("computation", "communication", "waiting"):
        one, other = getattr(few.timeline, name), getattr(more.timeline, name)
        spent[name] = one + number * (other - one)
    flops = grown(few.flops, more.flops)
    plan = Plan(setup, few.hardware, peaks, flops, tuple(messages), Timeline(**spent), few.what_if)
    return overlapped(plan) if plan.what_if.overlap else plan


def overlapped(plan: Plan) -> Plan:
    """The same with all messages behind computation, as far as there is any."""
    sent = sum(message.seconds for message in plan.messages)
    return replace(plan, timeline=replace(plan.timeline, communication=max(0.0, sent - plan.timeline.computation)))
