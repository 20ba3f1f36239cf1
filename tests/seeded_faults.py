"""Faults that other systems had, or might have, put into this one, one at a time. Each is a context manager."""

import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch

from lss import documents, dropout
from lss.attention import blocks, layer, schedule
from lss.attention.kernels import choice
from lss.attention.kernels.math import MATH
from lss.attention.plan import Block, Plan, Run
from lss.collectives import Axis
from lss.context import SequenceContext, context_of
from lss.dropout import PositionDropout, Site
from lss.layout import Layout, Piece
from lss.masks import View
from lss.positions import ShardedPositions
from lss.verification import runs

FAULTS: dict[str, Callable] = {}


def fault(function: Callable) -> Callable:
    FAULTS[function.__name__] = contextmanager(function)
    return function


def replaced(owner: object, name: str, wrap: Callable) -> object:
    """Patch `owner.name` with `wrap(original)`."""
    return patch.object(owner, name, wrap(getattr(owner, name)))


def after_averaging(change: Callable[[torch.nn.Module], None]) -> object:
    """Do something to gradients when they have been averaged."""

    def wrap(original: Callable) -> Callable:
        def averaged(model: torch.nn.Module) -> None:
            original(model)
            change(model)

        return averaged

    return replaced(runs, "average_gradients", wrap)


def scaled(factor: float, *names: str) -> Callable[[torch.nn.Module], None]:
    def change(model: torch.nn.Module) -> None:
        for name, weight in model.named_parameters():
            if weight.grad is not None and (not names or name in names):
                weight.grad.mul_(factor)

    return change


# Loss, labels, scale


@fault
def mean_of_means() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def local(model: torch.nn.Module, *labels: torch.Tensor) -> torch.Tensor:
            own = sum((part != -100).sum() for part in labels).double()
            return own * context_of(model).sequence.size * context_of(model).data.size

        return local

    with replaced(runs, "count_tokens", wrap):
        yield


@fault
def loss_times_ranks() -> Iterator[None]:
    with replaced(SequenceContext, "sum_over_ranks", lambda original: lambda self, value: 2 * original(self, value)):
        yield


@fault
def gradients_divided_again() -> Iterator[None]:
    with after_averaging(scaled(0.5)):
        yield


@fault
def positional_gradients_divided() -> Iterator[None]:
    with after_averaging(scaled(0.5, "positions.weight")):
        yield


@fault
def labels_shifted_inside_the_segment() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def shard(*args: object, **kwargs: object) -> dict:
            batch = original(*args, **kwargs)
            batch["labels"][:, -1] = -100
            return batch

        return shard

    with replaced(runs, "shard", wrap):
        yield


@fault
def labels_not_shifted() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def shard(*args: object, **kwargs: object) -> dict:
            batch = original(*args, **kwargs)
            batch["labels"] = batch["tokens"]
            return batch

        return shard

    with replaced(runs, "shard", wrap):
        yield


@fault
def last_token_dropped() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def shard(self: Layout, whole: torch.Tensor, rank: int, *, dim: int, fill: float) -> torch.Tensor:
            cut = whole.clone()
            cut.select(dim, self.length - 1).fill_(fill or 0)
            return original(self, cut, rank, dim=dim, fill=fill)

        return shard

    with replaced(Layout, "shard", wrap):
        yield


# Averaging and norm


@fault
def averaging_left_out() -> Iterator[None]:
    with patch.object(runs, "average_gradients", lambda model: setattr(context_of(model), "is_averaged", True)):
        yield


@fault
def averaging_left_out_for_one_parameter() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def averaged(model: torch.nn.Module) -> None:
            kept = model.norm.bias.grad.clone()
            original(model)
            model.norm.bias.grad.copy_(kept)

        return averaged

    with replaced(runs, "average_gradients", wrap):
        yield


def _axis_left_out(axis_name: str) -> object:
    def wrap(original: Callable) -> Callable:
        def all_reduce_(self: Axis, tensor: torch.Tensor, *, layer: str, phase: str) -> torch.Tensor:
            if self.name == axis_name and layer == "gradients":
                return tensor
            return original(self, tensor, layer=layer, phase=phase)

        return all_reduce_

    return replaced(Axis, "all_reduce_", wrap)


@fault
def sequence_axis_left_out() -> Iterator[None]:
    with _axis_left_out("sequence"):
        yield


@fault
def data_axis_left_out() -> Iterator[None]:
    with _axis_left_out("data"):
        yield


@fault
def positional_table_averaged_over_the_sequence() -> Iterator[None]:
    def change(model: torch.nn.Module) -> None:
        axis, gradient = context_of(model).sequence, model.positions.weight.grad
        axis.all_reduce_(gradient, layer="gradients", phase="step").div_(axis.size)

    with after_averaging(change):
        yield


@fault
def positional_table_left_out_of_the_data_axis() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def averaged(model: torch.nn.Module) -> None:
            kept = model.positions.weight.grad.clone()
            original(model)
            model.positions.weight.grad.copy_(kept)

        return averaged

    with replaced(runs, "average_gradients", wrap):
        yield


@fault
def tied_weight_counted_twice() -> Iterator[None]:
    with after_averaging(scaled(2.0, "tokens.weight")):
        yield


@fault
def gradients_swapped_in_a_bucket() -> Iterator[None]:
    def change(model: torch.nn.Module) -> None:
        first, second = model.blocks[0].attention_norm.bias.grad, model.blocks[0].feed_forward_norm.bias.grad
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)

    with after_averaging(change):
        yield


@fault
def clipped_by_the_local_norm() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def clip(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
            return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

        return clip

    with replaced(runs, "clip_gradient_norm", wrap):
        yield


@fault
def shared_parameters_counted_by_every_rank() -> Iterator[None]:
    with replaced(runs, "clip_gradient_norm", lambda original: lambda model, limit: original(model, limit) * 2**0.5):
        yield


@fault
def replicas_drift_apart() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def different(model: torch.nn.Module) -> list[str]:
            with torch.no_grad():
                model.norm.bias[0] += 1e-16 * context_of(model).sequence.rank + 1e-17
                if context_of(model).sequence.rank:
                    bits = model.norm.bias.view(torch.int64)
                    bits[0] += 1
            return original(model)

        return different

    with replaced(runs, "replicas_that_differ", wrap):
        yield


@fault
def ranks_start_from_different_weights() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def parallelize(model: torch.nn.Module, mesh: object, **kwargs: object) -> torch.nn.Module:
            model = original(model, mesh, **kwargs)
            with torch.no_grad():
                model.blocks[0].attention.query.weight.add_(1e-6 * context_of(model).sequence.rank)
            return model

        return parallelize

    with replaced(runs, "parallelize", wrap):
        yield


# Collectives


def gathers(change: Callable) -> object:
    """Change what an all-gather of an attention layer returns."""
    return waits("start_all_gather", change)


def waits(operation: str, change: Callable) -> object:
    """Change what a collective of an attention layer returns when it has been waited for."""

    def wrap(original: Callable) -> Callable:
        def start(self: Axis, tensor: torch.Tensor, *, layer: str, phase: str) -> Callable:
            wait = original(self, tensor, layer=layer, phase=phase)
            return (lambda: change(self, wait())) if "attention" in layer else wait

        return start

    return replaced(Axis, operation, wrap)


@fault
def stale_gather() -> Iterator[None]:
    kept: list[torch.Tensor] = []

    def change(axis: Axis, whole: torch.Tensor) -> torch.Tensor:
        kept.append(whole)
        return kept[-2] if len(kept) > 1 else whole

    with gathers(change):
        yield


@fault
def segments_in_the_wrong_order() -> Iterator[None]:
    with gathers(lambda axis, whole: whole.roll(whole.size(0) // axis.size, 0)):
        yield


@fault
def sent_in_float32() -> Iterator[None]:
    def narrowed(axis: Axis, whole: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():  # as a cast by the package itself, which `verify` leaves as it is
            return whole.float().double()

    with gathers(narrowed):
        yield


@fault
def reduce_scatter_left_out() -> Iterator[None]:
    def own_part(self: Axis, whole: torch.Tensor, *, layer: str, phase: str) -> Callable:
        return lambda: whole.chunk(self.size)[self.rank].clone()

    with patch.object(Axis, "start_reduce_scatter", own_part):
        yield


@fault
def reduce_scatter_averages() -> Iterator[None]:
    with waits("start_reduce_scatter", lambda axis, part: part / axis.size):
        yield


@fault
def gather_without_gradient() -> Iterator[None]:
    with waits("start_reduce_scatter", lambda axis, part: torch.zeros_like(part)):
        yield


# Attention


def planned(change: Callable[[Block], Block], change_runs: Callable[[tuple], tuple] = lambda runs: runs) -> object:
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

    with replaced(layer, "attend", wrap):
        yield


@fault
def keys_and_values_swapped() -> Iterator[None]:
    with replaced(layer, "attend", lambda original: lambda q, k, v, *rest: original(q, v, k, *rest)):
        yield


@fault
def key_heads_in_the_wrong_order() -> Iterator[None]:
    with replaced(
        layer, "attend", lambda original: lambda q, k, v, *rest: original(q, k.roll(1, 1), v.roll(1, 1), *rest)
    ):
        yield


# Positions


@fault
def positions_start_anew_in_every_segment() -> Iterator[None]:
    def local(self: Layout, rank: int, device: torch.device | None = None) -> torch.Tensor:
        return torch.arange(self.segment_length, device=device)

    with patch.object(Layout, "positions", local):
        yield


@fault
def key_positions_start_anew() -> Iterator[None]:
    def local(self: Layout, device: torch.device | None = None) -> torch.Tensor:
        return torch.arange(self.segment_length, device=device).repeat(self.num_ranks)

    with patch.object(Layout, "all_positions", local):
        yield


@fault
def positional_rows_off_by_one() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def shifted(self: ShardedPositions, indices: torch.Tensor) -> torch.Tensor:
            with torch._C.DisableTorchFunction():  # in the model's own code it would be refused
                return original(self, indices).roll(1, -2)

        return shifted

    with replaced(ShardedPositions, "forward", wrap):
        yield


# Dropout


@fault
def dropout_masks_repeated_on_every_rank() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def keep(self: Site, sample: int, first_position: int, *rest: object) -> torch.Tensor:
            first = self.context.layout.pieces(self.context.sequence.rank)[0].start
            return original(self, sample, first_position - first, *rest)

        return keep

    with replaced(Site, "keep", wrap):
        yield


@fault
def dropout_masks_repeated_in_every_data_group() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def keep(self: Site, sample: int, *rest: object) -> torch.Tensor:
            return original(self, sample - self.context.present.first_sample, *rest)

        return keep

    with replaced(Site, "keep", wrap):
        yield


@fault
def attention_dropout_off_by_one() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        def keep(site: Site, rows: range, queries: Piece, *rest: object) -> torch.Tensor:
            rank = site.context.sequence.rank
            return original(site, rows, Piece(queries.slot, queries.start + rank, queries.stop + rank), *rest)

        return keep

    with replaced(blocks, "keep_weights", wrap):
        yield


@fault
def dropout_left_out() -> Iterator[None]:
    with patch.object(PositionDropout, "forward", lambda self, values: values):
        yield


@fault
def dropout_not_rescaled() -> Iterator[None]:
    with patch.object(Site, "scale", 1.0):
        yield


@fault
def dropout_rate_doubled() -> Iterator[None]:
    with patch.object(Site, "dropped_levels", property(lambda self: round(2 * self.rate * 2**16))):
        yield


@contextmanager
def keyed_by(change: Callable) -> Iterator[None]:
    """Change what the masks of dropout are keyed by: seed, step, place, sequence, block."""

    def pack(layout: str, *fields: int) -> bytes:
        return struct.pack(layout, *(change(*fields) if len(fields) > 1 else fields))

    with patch.object(dropout, "struct", SimpleNamespace(pack=pack)):
        yield


@fault
def dropout_masks_repeated_in_every_step() -> Iterator[None]:
    with keyed_by(lambda seed, step, place, sequence, block: (seed, 0, place, sequence, block)):
        yield


@fault
def dropout_masks_repeated_at_every_place() -> Iterator[None]:
    with keyed_by(lambda seed, step, place, sequence, block: (seed, step, 0, sequence, block)):
        yield


@fault
def dropout_masks_repeated_in_every_sequence() -> Iterator[None]:
    with keyed_by(lambda seed, step, place, sequence, block: (seed, step, place, 0, block)):
        yield


@fault
def dropout_masks_repeated_for_every_token() -> Iterator[None]:
    with replaced(Site, "keep", lambda original: lambda self, sample, first, *rest: original(self, sample, 0, *rest)):
        yield


@fault
def attention_dropout_left_out_of_backward() -> Iterator[None]:
    def wrap(original: Callable) -> Callable:
        return lambda given, *rest: original(replace(given, keep=None), *rest)

    with patch.object(choice, "KERNELS", (*choice.KERNELS[:-1], replace(MATH, backward=wrap(MATH.backward)))):
        yield


# What users call around the model


@fault
def loss_doubled() -> Iterator[None]:
    with replaced(runs, "token_mean_cross_entropy", lambda original: lambda *given: 2 * original(*given)):
        yield


@fault
def labels_shifted_twice() -> Iterator[None]:
    with replaced(
        documents, "shift", lambda original: lambda labels, offset, *rest: original(labels, 2 * offset, *rest)
    ):
        yield


@fault
def outputs_joined_in_reverse() -> Iterator[None]:
    with replaced(runs, "unshard", lambda original: lambda *given, **named: original(*given, **named).flip(1)):
        yield


@contextmanager
def nothing() -> Iterator[None]:
    """No fault: the control."""
    with ExitStack():
        yield
