"""Which module is the first to differ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lss.context import SequenceContext, context_of, is_parallelized
from lss.layout import Layout
from lss.outputs import named_tensors
from lss.segment import Segment
from lss.verification.compare import SMALL, relative_error
from lss.verification.runs import call_over_ranks, two_lines
from lss.verification.setting import Setting


@dataclass
class Trace:
    """Outputs of modules, and gradients at them, in order of execution. Of several tensors the first one counts.

    Args:
        setting: The batch. Where documents are run one by one, what modules give is put together to whole sequences.
    """

    setting: Setting
    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    repeated: set[str] = field(default_factory=set)
    place: tuple[int, slice] | None = None
    context: SequenceContext | None = None

    def watch(self, model: nn.Module) -> None:
        """Record every module that is called once; a trial of a parallelized model's code is no call."""
        self.context = context_of(model) if is_parallelized(model) else None
        for name, module in model.named_modules():
            module.register_forward_hook(self._hook(name or type(model).__name__))

    def move(self, row: int, slots: slice) -> None:
        """Say which document comes next."""
        self.place = row, slots
        self.called.clear()

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            if self.context is not None and self.context.trial is not None:
                return
            if name in self.called:  # calls of one module may come in another order over ranks
                self.repeated.add(name)
                self.outputs.pop(name, None)
            self.called.add(name)
            found = next((part for _, part in named_tensors(output) if part.dim() > 1), None)
            if found is not None and name not in self.repeated:
                self._note(self.outputs, name, self.place, found.detach())
                if found.requires_grad:
                    found.register_hook(partial(self._note_gradient, name, self.place))

        return record

    def _note_gradient(self, name: str, place: tuple[int, slice] | None, gradient: Tensor) -> None:
        if name not in self.repeated:
            self._note(self.gradients, name, place, gradient.detach())

    def _note(self, noted: dict[str, Tensor], name: str, place: tuple[int, slice] | None, part: Tensor) -> None:
        if place is None:
            noted[name] = part
            return
        row, slots = place
        if part.shape[:2] == (1, slots.stop - slots.start):
            whole = noted.setdefault(name, part.new_zeros(*self.setting.real.shape, *part.shape[2:]))
            whole[row, slots] = part[0]


def first_differences(plain: nn.Module, setting: Setting, bound: float) -> tuple[str, str, str]:
    """Names of three modules; empty where there is none.

    Returns:
        The first one whose output differs on any rank, the last one before it that was compared, and, going backward,
        the first one whose gradient differs.
    """
    serial, ranks = Trace(setting), Trace(setting)
    model = copy.deepcopy(plain)
    serial.watch(model)
    loss = setting.run_plainly(model, serial.move).loss
    assert loss is not None
    loss.backward()
    model, batch, labels = two_lines(copy.deepcopy(plain), setting, setting.mesh)
    ranks.watch(model)
    context = context_of(model)
    share, _ = call_over_ranks(model, setting, batch, labels)
    share.backward()
    forward, equal = _first(serial.outputs, ranks.outputs, setting, context, bound, is_gradient=False)
    backward, _ = _first(serial.gradients, ranks.gradients, setting, context, bound, is_gradient=True)
    return forward, equal, backward


def _first(
    serial: dict[str, Tensor],
    ranks: dict[str, Tensor],
    setting: Setting,
    context: SequenceContext,
    bound: float,
    *,
    is_gradient: bool,
) -> tuple[str, str]:
    names = list(serial)
    largest = max((part.abs().max().item() for part in serial.values()), default=0.0)
    own = len(names)
    compared = []
    for index, name in enumerate(names):
        pair = _matched(serial[name], ranks.get(name), setting, context, is_gradient)
        compared += [index] if pair else []
        if pair and not relative_error(*pair, floor=SMALL * largest if is_gradient else 0.0) <= bound:
            own = index
            break
    found = context.gather_from_ranks(torch.tensor([own], device=serial[names[0]].device) if names else torch.zeros(1))
    first = int(found.min())
    before = [index for index in compared if index < first]
    return names[first] if first < len(names) else "", names[before[-1]] if before else ""


def _matched(
    serial: Tensor, local: Tensor | None, setting: Setting, context: SequenceContext, is_gradient: bool
) -> tuple[Tensor, Tensor] | None:
    """This rank's values and what the serial run has in their place; None where the two cannot be laid together."""
    rank, rows = context.sequence.rank, setting.rows_of_group(context.data)
    if local is None or local.dim() != serial.dim():
        return None
    of_batch = serial.dim() > 1 + (setting.cut == "tokens") and serial.size(0) == len(setting.batch["labels"])
    if is_gradient and not of_batch and context.data.size > 1:
        return None  # shared by all sequences, of which a data group has only its own
    serial = serial[rows] if of_batch else serial
    if local.shape == serial.shape and not context.is_cut:
        return None if is_gradient else (local, serial)  # whole on every rank, and its gradient only that rank's part
    if not setting.is_whole and local.size(0) != serial.size(0):
        return None  # one row for all sequences, where documents have rows of their own
    dims = range(1 if of_batch else 0, serial.dim())
    places = ((dim, layout) for dim in dims for layout in _layouts(serial.size(dim), context))
    dim, layout = next((place for place in places if place[1].length == serial.size(place[0])), (0, None))
    if layout is None:
        return None
    known = setting.real_of(layout.length)[rows]
    if context.sequence.size > 1 and local.size(dim) == layout.padded_length:
        # gathered: whole on every rank, and its gradient there only that rank's part
        return None if is_gradient else _real(local.narrow(dim, 0, layout.length), serial, known, setting)
    if local.size(dim) != layout.segment_length:
        return None
    own = layout.num_tokens(rank)
    expected, real = layout.shard(serial, rank, dim=dim, fill=0), layout.shard(known, rank, dim=1, fill=0)
    return _real(local.narrow(dim, 0, own), expected.narrow(dim, 0, own), real[:, :own], setting)


def _layouts(length: int, context: SequenceContext) -> Iterator[Layout]:
    """By which so many tokens may be cut: as the batch's, as those of an encoder, or in the layers."""
    batch = context.target
    while isinstance(batch, Segment):
        yield batch.layout
        batch = batch.source
    if batch is not None:
        yield Layout.named(context.layout_name, length, context.sequence.size)


def _real(local: Tensor, serial: Tensor, real: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """Without the slots of padding; what was noted of documents that were run one by one is [B, L, ...]."""
    return (local, serial) if setting.is_whole else (local[real], serial[real])
