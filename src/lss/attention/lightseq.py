"""LightSeq's order of ring attention under a causal mask (Li et al., 2023, "DistFlashAttn", Section 3.1).

Tokens lie contiguously, so the last rank has most to do. In step t rank r fetches the keys of rank r - t; ranks that
have no such one compute for a rank that has too much: it sends them its queries and is sent back the output over
their keys. So all is done in N / 2 steps instead of N - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lss.attention.attend import Call
from lss.attention.blocks import Gradients, Output, merge_, wide_zeros
from lss.attention.plan import Run
from lss.attention.schedule import Scene
from lss.errors import LayoutError
from lss.layout import Layout
from lss.masks import View


def require_order(scene: Scene, name: str) -> None:
    """Raise LayoutError unless no query sees keys of later ranks, and ranks hold contiguous parts of one sequence."""
    layout = scene.queries
    is_contiguous = layout == Layout.contiguous(layout.length, layout.num_ranks) and scene.keys == layout
    later = (
        scene.mask.view(row, span, (span[1], layout.length))
        for row in range(max(1, scene.mask.num_rows))
        for spans in layout.spans
        for span in spans
        if span[1] < layout.length
    )
    if not is_contiguous or any(view is not View.EMPTY for view in later):
        raise LayoutError(
            f"{name} by the order of LightSeq, {'with a mask that is not causal' if is_contiguous else 'not in a row'}",
            allowed="a causal mask, and layout contiguous: its order evens out what is uneven there alone",
            remedy="strategy ring, which takes any",
        )


@dataclass(frozen=True)
class Step:
    """What a rank does in a step, the t-th.

    Args:
        source: The rank whose keys it fetches; None for none.
        reader: The rank that fetches its keys.
        helped: The rank for whose queries it computes.
        helper: The rank that computes for its queries.
    """

    source: int | None
    reader: int | None
    helped: int | None
    helper: int | None

    @classmethod
    def of(cls, step: int, rank: int, size: int) -> Step:
        """Of rank `rank` of `size`, in step 1, 2, ... size / 2."""
        helps = 2 * step != size  # in the last step of an even number of ranks no pair is left over
        source = rank - step if rank >= step else None
        reader = rank + step if rank + step < size else None
        helped = rank + size - step if rank < step and helps else None
        helper = rank - size + step if rank >= size - step and helps else None
        return cls(source, reader, helped, helper)


def attend_in_order(query: Tensor, key: Tensor, value: Tensor, call: Call, sinks: Tensor | None = None) -> Tensor:
    """What `attend` gives, in LightSeq's order.

    Args:
        query: [B, H, S, D], of this segment.
        key: [B, K, S, D].
        value: [B, K, S, E].
        call: As of `attend`.
        sinks: [H], or None.
    """
    given = (*(tensor.contiguous() for tensor in (query, key, value)), sinks, *call.work.learned)
    output: Tensor = _InOrder.apply(call, *given)  # type: ignore[no-untyped-call]
    return output


class _InOrder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *learned: Tensor
    ) -> Tensor:
        messages, output = _Messages(call, "forward"), Output(query, value.size(-1))
        arriving = messages.fetched([key, value], [query])
        output.add(call.work, call.plan.own, query, key, value)
        for step, held, asked in arriving:
            if step.source is not None:
                _add(output, call, (call.axis.rank, step.source), query, *held)
            answer = [] if step.helped is None else _answer(call, step.helped, asked[0], key, value)
            made = [torch.empty_like(part) for part in (output.values, output.log_sum_exp)]
            take = partial(merge_, output.values, output.log_sum_exp, *made)
            messages.answer([(answer, step.helped)], [(made, step.helper)], take)
        messages.settle()
        if sinks is not None:
            output.add_sinks(sinks)
        values = output.values.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, values, output.log_sum_exp)
        ctx.call = call
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        query, key, value, sinks, output, log_sum_exp = ctx.saved_tensors
        messages, gradient = _Messages(call, "backward"), gradients[0].contiguous()
        arriving = messages.fetched([key, value], [query, output, log_sum_exp, gradient])
        back = Gradients(call.work, query, output, log_sum_exp, gradient)
        totals = back.of_query, wide_zeros(key), wide_zeros(value)
        back.add(call.plan.own, key, value, *totals[1:])
        for step, held, asked in arriving:
            to_source = [wide_zeros(part) for part in held]
            if step.source is not None:
                _add_back(back, call, (call.axis.rank, step.source), held, to_source)
            to_helped = []
            if step.helped is not None:
                other = Gradients(call.work, *asked)
                other.of_bias = back.of_bias
                _add_back(other, call, (step.helped, call.axis.rank), (key, value), totals[1:])
                to_helped = [other.of_query]
            made = [torch.zeros_like(total) for total in totals]
            take = partial(_sum, totals, made)
            expected = [(made[1:], step.reader), (made[:1], step.helper)]
            messages.answer([(to_source, step.source), (to_helped, step.helped)], expected, take)
        messages.settle()
        of_sinks = None if sinks is None else back.of_sinks(sinks)
        found = zip(totals, (query, key, value), strict=True)
        return None, *(total.to(tensor.dtype) for total, tensor in found), of_sinks, *back.of_bias


class _Messages:
    """What one call sends in one phase; the next keys and queries, and the last answers, are on their way meanwhile."""

    def __init__(self, call: Call, phase: str) -> None:
        axis = call.axis
        self.steps = [Step.of(step, axis.rank, axis.size) for step in range(1, axis.size // 2 + 1)]
        self.send = partial(axis.start_send, layer=call.name, phase=phase, far=True)
        self.settle: Callable[[], None] = lambda: None

    def fetched(self, keys: list[Tensor], queries: list[Tensor]) -> Iterator[tuple[Step, list[Tensor], list[Tensor]]]:
        """Each step, the keys of its source, and what of queries its helped rank gives; the first is asked at once."""
        return self._fetched(self._fetch(self.steps[0], keys, queries), keys, queries) if self.steps else iter(())

    def answer(self, sent: Sequence[_Parcel], expected: Sequence[_Parcel], take: Callable[[], None]) -> None:
        """Send what was worked out, once the last answers are taken in; `take` is called when others' have come."""
        self.settle()
        if not any(rank is not None for _, rank in expected):
            take = _nothing
        wait = self.send(list(_addressed(sent)), list(_addressed(expected)))

        def settle() -> None:
            self.settle = _nothing
            wait()
            take()

        self.settle = settle

    def _fetched(
        self, wait: Callable[[], tuple[list[Tensor], list[Tensor]]], keys: list[Tensor], queries: list[Tensor]
    ) -> Iterator[tuple[Step, list[Tensor], list[Tensor]]]:
        for step, following in zip(self.steps, [*self.steps[1:], None], strict=True):
            held, asked = wait()
            if following is not None:
                wait = self._fetch(following, keys, queries)
            yield step, held, asked

    def _fetch(
        self, step: Step, keys: list[Tensor], queries: list[Tensor]
    ) -> Callable[[], tuple[list[Tensor], list[Tensor]]]:
        held = [torch.empty_like(part) for part in keys if step.source is not None]
        asked = [torch.empty_like(part) for part in queries if step.helped is not None]
        sent = [(keys, step.reader), (queries, step.helper)]
        wait = self.send(list(_addressed(sent)), list(_addressed([(held, step.source), (asked, step.helped)])))
        return lambda: wait() or (held, asked)


# Tensors, and the rank that they go to or come from; None for none.
_Parcel = tuple[Sequence[Tensor], int | None]


def _addressed(parcels: Sequence[_Parcel]) -> Iterator[tuple[Tensor, int]]:
    for tensors, rank in parcels:
        yield from ((tensor, rank) for tensor in tensors if rank is not None)


def _nothing() -> None:
    pass


def _runs(call: Call, of_queries: int, of_keys: int) -> tuple[Run, ...]:
    """What of the keys of a rank the queries of another need."""
    assert call.plan_of is not None
    return call.plan_of(of_queries).chunks[(of_queries - of_keys - 1) % call.axis.size].runs


def _of_run(run: Run, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    return (tensor[:, :, run.start : run.stop] for tensor in tensors)


def _add(output: Output, call: Call, pair: tuple[int, int], query: Tensor, key: Tensor, value: Tensor) -> None:
    for run in _runs(call, *pair):
        output.add(call.work, run.blocks, query, *_of_run(run, (key, value)))


def _answer(call: Call, helped: int, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """The output of another rank's queries over this rank's keys, and its log-sum-exp."""
    made = Output(query, value.size(-1))
    _add(made, call, (helped, call.axis.rank), query, key, value)
    return [made.values, made.log_sum_exp]


def _add_back(
    back: Gradients, call: Call, pair: tuple[int, int], held: Sequence[Tensor], sums: Sequence[Tensor]
) -> None:
    for run in _runs(call, *pair):
        back.add(run.blocks, *_of_run(run, held), *_of_run(run, sums))


def _sum(totals: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for total, part in zip(totals, parts, strict=True):
        total += part
