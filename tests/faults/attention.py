"""Faults of who sees what, and of blocks and kernels."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

import torch

from lss import masks
from lss.attention import blocks, run, schedule
from lss.attention.plan import Block, Plan, Run
from lss.layout import Piece
from lss.masks import Full, View
from tests.faults.registry import fault, replaced


def planned(
    change: Callable[[Block], Block], change_runs: Callable[[tuple], tuple] = lambda runs: runs
) -> AbstractContextManager:
    """Change every block that attention computes, or the runs of gathered keys."""

    def of_run(run: Run) -> Run:
        return replace(run, blocks=tuple(map(change, run.blocks)))

    def wrap(original: Callable) -> Callable:
        def plan(*args: object) -> Plan:
            found = original(*args)
            chunks = [replace(chunk, runs=change_runs(tuple(map(of_run, chunk.runs)))) for chunk in found.chunks]
            return Plan(tuple(map(change, found.own)), tuple(chunks))

        return plan

    return replaced(schedule, "plan", wrap)


def shorter(block: Block, first: int, last: int) -> Block:
    """A block of several keys, off the diagonal, without some at its ends."""
    keys = block.keys
    if block.view is View.CAUSAL or len(keys) < 2:
        return block
    return replace(block, keys=Piece(keys.slot + first, keys.start + first, keys.stop - last))


@fault
def border_key_not_seen() -> Iterator[None]:
    with planned(lambda block: shorter(block, 0, 1)):
        yield


@fault
def first_key_not_seen() -> Iterator[None]:
    with planned(lambda block: shorter(block, 1, 0)):
        yield


@fault
def future_seen_inside_the_segment() -> Iterator[None]:
    with planned(lambda block: replace(block, view=View.FULL)):
        yield


@fault
def past_segments_not_seen() -> Iterator[None]:
    with planned(lambda block: block, lambda runs: ()):
        yield


def documents_seen_across() -> AbstractContextManager:
    """Attention that knows of no documents; none of `FAULTS`, as only batches of several documents show it."""
    return replaced(masks, "Documents", lambda original: lambda spans: Full())


@fault
def merged_without_weights() -> Iterator[None]:
    def merge(output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
        output.add_(other).div_(2)
        lse.copy_(torch.logaddexp(lse, other_lse))

    with patch.object(blocks, "merge_", merge):
        yield


@fault
def backward_with_the_last_block_only() -> Iterator[None]:
    """The log-sum-exp of the last block is kept instead of that of all."""

    def wrap(original: Callable) -> Callable:
        def merge(output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
            original(output, lse.clone(), other, other_lse)
            lse.copy_(other_lse)

        return merge

    with replaced(blocks, "merge_", wrap):
        yield


@fault
def scores_scaled_wrongly() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        return lambda query, *rest: original(query * 1.001, *rest)

    with replaced(run, "attend", wrap):
        yield


@fault
def keys_and_values_swapped() -> Iterator[None]:
    with replaced(run, "attend", lambda original: lambda q, k, v, *rest: original(q, v, k, *rest)):
        yield


@fault
def key_heads_in_the_wrong_order() -> Iterator[None]:
    with replaced(
        run, "attend", lambda original: lambda q, k, v, *rest: original(q, k.roll(1, 1), v.roll(1, 1), *rest)
    ):
        yield
