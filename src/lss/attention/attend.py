"""Attention of a segment's queries over the keys of all ranks, which are gathered while the own ones are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lss.attention.blocks import Gradients, Output, Work, wide_zeros
from lss.attention.kernels import Needs, dense
from lss.attention.plan import Chunk, Plan, Run
from lss.attention.sources import Source
from lss.attention.transport import Gathered, Passed, Transport
from lss.collectives import Axis
from lss.errors import LayoutError
from lss.layout import Layout


@dataclass(frozen=True)
class Call:
    """One call of one attention layer.

    Args:
        work: How blocks are computed.
        plan: Which blocks.
        source: What is gathered.
        queries: The layout of the queries.
        keys: The layout of the keys.
        axis: The sequence axis.
        name: Of the layer, for the ledger.
        keep: Whether what was gathered is kept for backward; else it is gathered again.
        needs: What the kernel was chosen for.
        is_stored: Whether all scores are computed at once and kept, instead of the plan's blocks.
        is_passed: Whether keys and values go from rank to rank in a ring, and are not gathered.
        plan_of: The plan of any rank.
    """

    work: Work
    plan: Plan
    source: Source
    queries: Layout
    keys: Layout
    axis: Axis
    name: str
    keep: bool
    needs: Needs
    is_stored: bool = False
    is_passed: bool = False
    plan_of: Callable[[int], Plan] | None = None

    def transport(self, phase: str) -> Transport:
        """Of keys and values in a phase."""
        return (Passed if self.is_passed else Gathered)(self.plan.chunks, self.axis, self.name, phase)

    def slots(self, chunk: Chunk, device: torch.device) -> Tensor:
        """Slots in rank order, of all segments, that a chunk brings: int64 [N * (stop - start)]."""
        own = torch.arange(chunk.start, chunk.stop, device=device)
        firsts = torch.arange(self.keys.num_ranks, device=device) * self.keys.segment_length
        return (firsts[:, None] + own).flatten()

    def own_key_value(self, gathered: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of this rank's slots, out of those of all."""
        size = self.keys.segment_length
        own = Run(self.axis.rank * size, (self.axis.rank + 1) * size, ())
        return self.source.key_value(gathered, torch.empty(0), own)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    sinks: Tensor | None = None,
    inputs: tuple[Tensor, ...] = (),
) -> Tensor:
    """What `scaled_dot_product_attention` of the whole sequence gives at this segment's queries.

    Args:
        query: [B, H, S, D], of this segment.
        key: [B, K, S, D], of this segment; H is a multiple of K.
        value: [B, K, S, D].
        call: Who sees what, what is gathered, and how it is computed.
        sinks: [H], a score a head that every query sees besides, without a value.
        inputs: What else the source gathers, or makes keys and values with: the layer's input and its parameters.

    Returns:
        [B, H, S, D], in the dtype of `query`; zeros for queries that see no key.

    Raises:
        LayoutError: Sinks do not fit.
    """
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise LayoutError(
            f"{call.name} has sinks of shape {tuple(sinks.shape)}", allowed=f"[{query.size(1)}], one a head"
        )
    given = (dense(query), key, value, sinks, *inputs, *call.work.learned)
    output: Tensor = _Attend.apply(call, len(inputs), *given)  # type: ignore[no-untyped-call]
    return output


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        num_inputs: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        *learned: Tensor,
    ) -> Tensor:
        inputs = learned[:num_inputs]
        arriving = call.transport("forward").arriving(_messages(call, key, value, inputs))
        output = Output(query, value.size(-1))
        output.add(call.work, call.plan.own, query, key, value)
        kept: list[Tensor] = []
        for chunk, gathered in arriving:
            slots = call.slots(chunk, query.device)
            for run in chunk.runs:
                output.add(call.work, run.blocks, query, *call.source.key_value(gathered, slots, run))
            kept += gathered if call.keep else []
        if sinks is not None:
            output.add_sinks(sinks)
        values = output.values.to(query.dtype)
        own = (None, None) if kept and call.source.gathers_key_value else (key, value)  # what is gathered holds them
        ctx.save_for_backward(query, *own, sinks, values, output.log_sum_exp, *inputs, *kept)
        ctx.call, ctx.num_inputs = call, num_inputs
        kind = query.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        query, key, value, sinks, output, log_sum_exp, *rest = ctx.saved_tensors
        inputs, kept = tuple(rest[: ctx.num_inputs]), rest[ctx.num_inputs :]
        if key is None:
            key, value = call.own_key_value(kept)
        back = Gradients(call.work, query, output, log_sum_exp, dense(gradients[0]))
        of_key, of_value = wide_zeros(key), wide_zeros(value)
        transport = call.transport("backward")
        returned = _Returned(call, transport, [None] * ctx.num_inputs)
        if call.keep:
            returned.add_all(_kept(call, kept), back, ctx.autocast)
            back.add(call.plan.own, key, value, of_key, of_value)  # while the last gradients are on their way
        else:
            arriving = transport.arriving(_messages(call, key, value, inputs))
            back.add(call.plan.own, key, value, of_key, of_value)  # while the first keys are on their way
            returned.add_all(arriving, back, ctx.autocast)
        of_inputs = returned.finish(of_key, of_value)
        of_sinks = None if sinks is None else back.of_sinks(sinks)
        found = zip((back.of_query, of_key, of_value), (query, key, value), strict=True)
        return None, None, *(total.to(tensor.dtype) for total, tensor in found), of_sinks, *of_inputs, *back.of_bias


class _Returned:
    """Gradients of what was gathered, on their way back to the ranks that sent it."""

    def __init__(self, call: Call, transport: Transport, of_inputs: list[Tensor | None]) -> None:
        self.call, self.transport, self.of_inputs = call, transport, of_inputs

    def add_all(
        self,
        arriving: Iterator[tuple[Chunk, list[Tensor]]],
        back: Gradients,
        autocast: tuple[str, torch.dtype, bool],
    ) -> None:
        """Work out the gradients of each chunk and send them."""
        for chunk, gathered in arriving:
            with torch.autocast(*autocast):
                sums = self._of_chunk(chunk, gathered, back)
            del gathered  # before memory is taken for what is sent
            self.transport.send_back(sums)

    def finish(self, of_key: Tensor, of_value: Tensor) -> list[Tensor | None]:
        """Add what has come back to the gradients of the rank's own keys and values; return those of the inputs."""
        received = self.transport.received_back()
        if received:
            to_key, to_value, to_inputs = self.call.source.unpack(received)
            if to_key is not None and to_value is not None:
                of_key += to_key
                of_value += to_value
            self._add(to_inputs)
        return self.of_inputs

    def _of_chunk(self, chunk: Chunk, gathered: list[Tensor], back: Gradients) -> list[Tensor]:
        sums = [wide_zeros(message) for message in gathered]
        slots = self.call.slots(chunk, gathered[0].device)
        for run in chunk.runs:
            add = partial(back.add, run.blocks)
            self._add(self.call.source.add_gradients(gathered, sums, slots, run, add))
        return sums

    def _add(self, parts: list[Tensor | None]) -> None:
        for index, part in enumerate(parts):
            if part is not None:
                before = self.of_inputs[index]
                self.of_inputs[index] = part if before is None else before + part


def _messages(call: Call, key: Tensor, value: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return call.source.messages(key, value, inputs) if call.plan.chunks else []


def _kept(call: Call, kept: list[Tensor]) -> Iterator[tuple[Chunk, list[Tensor]]]:
    number = len(kept) // max(1, len(call.plan.chunks))
    for index, chunk in enumerate(call.plan.chunks):
        yield chunk, kept[index * number : (index + 1) * number]
