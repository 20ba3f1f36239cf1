"""Faults of dropout."""

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch

from lss import dropout
from lss.attention import blocks
from lss.attention.kernels import choice
from lss.attention.kernels.math import MATH
from lss.dropout import PositionDropout, Site
from lss.layout import Piece
from tests.faults.registry import fault, replaced


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
