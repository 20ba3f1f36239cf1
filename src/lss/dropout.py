"""Dropout whose masks are keyed by global position, so that a run is the same at every number of ranks.

A mask is a function of (seed, step, site, sequence, global position, feature): Philox, a counter-based generator,
gives the random bits of any position without drawing those before it.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from lss.compiled import eager
from lss.context import SequenceContext
from lss.errors import ModelError
from lss.fake import has_values
from lss.frames import in_backward
from lss.layout import Piece

# Rates are multiples of 1 / LEVELS, as 16 random bits decide on a value.
LEVELS = 2**16
# Values that one step of the counter decides on: Philox 4x64 gives 256 bits.
_PER_COUNT = 16
# Keys whose attention weights are decided on together.
_KEYS = 64
# Positions that one generator draws on a GPU, where a counter cannot be set.
_BLOCK = 64


@dataclass
class Site:
    """One place of dropout in a parallelized model.

    Args:
        name: Of the module, for messages.
        rate: Share of values dropped, in [0, 1]; rounded to a multiple of 2**-16.
        index: Number of the place in the model.
        context: The context of the model.
        last_call: Number of the model's call that was here last.
        use: Number of the use of the place in that call, which keys its masks.
        first_sample: Index of the first sequence that it is used on among all of the step.
        part: Which of how many equal parts of the features or heads this rank has.
    """

    name: str
    rate: float
    index: int
    context: SequenceContext
    last_call: int = 0
    use: int = 0
    first_sample: int = 0
    part: tuple[int, int] = (0, 1)

    def enter(self, num_sequences: int, *, depth: int = 1) -> Site:
        """The place as it is used now. Two uses must not share a mask; a recomputation, inside backward, must.

        Args:
            num_sequences: B, on which it is used.
            depth: 1 if the innermost module's own code drops values, 2 if that module does nothing else.
        """
        frames = self.context.frames
        if not in_backward():
            if self.last_call == self.context.num_calls and not frames.running:  # compiled modules tell of no frame
                raise ModelError(
                    f"the dropout {self.name} is used twice in one call of a compiled model",
                    allowed="one place for each dropout module",
                    remedy="give each place a module of its own",
                )
            self.last_call = self.context.num_calls
        first_sample = self.context.first_sample(num_sequences)
        return replace(self, use=frames.use(self.name, depth=depth), first_sample=first_sample)

    @property
    def dropped_levels(self) -> int:
        """The rate in units of 1 / LEVELS."""
        return round(self.rate * LEVELS)

    @property
    def scale(self) -> float:
        """Factor of the kept values."""
        return LEVELS / (LEVELS - self.dropped_levels) if self.dropped_levels < LEVELS else 0.0

    def keep(
        self,
        sample: int,
        first_position: int,
        num_positions: int,
        features: int,
        device: torch.device,
        block: int = 0,
        groups: int = 1,
    ) -> Tensor:
        """True where a value is kept: bool [num_positions, features].

        Args:
            sample: Sequence of the present batch.
            first_position: Global position of the first row.
            num_positions: Rows.
            features: Columns.
            device: Where the mask is made.
            block: Number of the block of columns, where they come in several.
            groups: Of columns, of each of which this rank may have a part.
        """
        if not has_values():
            return self._like_drawn(num_positions, features, device)
        sequence = self.first_sample + sample
        place = (self.context.seed, self.context.step, self.index, sequence, block, *[self.use] * bool(self.use))
        fields = struct.pack(f"<{len(place)}q", *place)
        key = hashlib.blake2b(fields, digest_size=16).digest()
        draw = _draw_on_host if device.type == "cpu" else _draw_in_blocks
        index, number = self.part
        drawn = draw(key, first_position, num_positions, number * features, device)
        own: Tensor = drawn.unflatten(1, (groups, number, -1))[:, :, index].flatten(1)
        return own >= self.dropped_levels - LEVELS // 2

    def _like_drawn(self, num_positions: int, features: int, device: torch.device) -> Tensor:
        """A mask without values, made by as much work; on the host, bits are no tensor of torch's."""
        if self.context.sequence.device_type != "cuda":
            return torch.empty(num_positions, features, dtype=torch.bool, device=device)
        return torch.empty(num_positions, features, dtype=torch.int16, device=device).random_() >= 0


class PositionDropout(nn.Module):
    """Dropout of [B, S, ...], or [B, F] of pooled sequences, in the place of an `nn.Dropout` of a parallelized model.

    The same masks fall at every degree of sequence and data parallelism, and again in activation recomputation.

    Args:
        site: The place.
    """

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    @property
    def p(self) -> float:
        """The rate, under the name that `nn.Dropout` gives it."""
        return self.site.rate

    def extra_repr(self) -> str:
        """Rate and place, as in `print(model)`."""
        return f"rate={self.site.rate}, site={self.site.index}"

    def forward(self, values: Tensor) -> Tensor:
        """Drop and scale; the identity in evaluation."""
        if not self.training or self.site.dropped_levels == 0:
            return values
        return drop(values, self.site, depth=2)


@eager
def drop(values: Tensor, site: Site, *, depth: int = 1) -> Tensor:
    """Drop values and scale the others.

    Args:
        values: [B, S, ...] of this rank's slots ([S, B, ...] where sequences come first), or [B, F] of whole sequences,
            the same on every rank of a sequence group.
        site: The place.
        depth: As in `Site.enter`.
    """
    context = site.context
    if context.trial is not None:
        return values
    if values.dim() == 2:
        used = site.enter(values.size(0), depth=depth)
        rows = [used.keep(row, 0, 1, values.size(1), values.device) for row in range(values.size(0))]
        return values * torch.cat(rows) * site.scale
    by_sequence = values.transpose(0, 1 - context.token_dim)  # [B, S, ...]
    used = site.enter(by_sequence.size(0), depth=depth)
    flat = torch.ones_like(by_sequence, dtype=torch.bool, memory_format=torch.contiguous_format).flatten(2)
    for piece in context.pieces(flat.size(1), f"the dropout {site.name}"):
        for row in range(flat.size(0)):
            drawn = used.keep(row, piece.start, len(piece), flat.size(2), values.device)
            flat[row, piece.slot : piece.slot + len(piece)] = drawn
    return values * flat.view(by_sequence.shape).transpose(0, 1 - context.token_dim) * site.scale


def keep_weights(site: Site, rows: range, queries: Piece, keys: Piece, num_heads: int, device: torch.device) -> Tensor:
    """Attention weights that are kept, of some queries over some keys: bool [rows, H, S, T].

    Bits are drawn by query and by block of keys, so that only blocks that are seen cost anything.

    Args:
        site: The place.
        rows: Sequences of the batch.
        queries: Their positions.
        keys: Theirs.
        num_heads: H.
        device: Where the mask is made.
    """
    first, last, number = keys.start // _KEYS, (keys.stop - 1) // _KEYS + 1, len(queries)
    shape = number, -1, num_heads
    if has_values():
        width = _KEYS * num_heads
        drawn = [
            [
                site.keep(row, queries.start, number, width, device, block, _KEYS).view(shape)
                for block in range(first, last)
            ]
            for row in rows
        ]
    else:  # all blocks at once
        drawn = [[site.keep(row, 0, number, _KEYS * num_heads * (last - first), device).view(shape)] for row in rows]
    masks = [torch.cat(blocks, 1) for blocks in drawn]
    wanted = torch.stack(masks)[:, :, keys.start - first * _KEYS : keys.stop - first * _KEYS]
    return wanted.permute(0, 3, 1, 2)  # [rows, S, T, H] -> [rows, H, S, T]


def _draw_on_host(key: bytes, first: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """Uniform int16 [rows, columns]; row r takes the counters from (first + r) * counts on."""
    counts = -(-columns // _PER_COUNT)
    philox = np.random.Philox(key=np.frombuffer(key, np.uint64), counter=first * counts)
    bits = philox.random_raw(rows * counts * (_PER_COUNT // 4)).view(np.int16)
    return torch.from_numpy(bits.reshape(rows, -1))[:, :columns]


def _draw_in_blocks(key: bytes, first: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """Uniform int16 [rows, columns]; the rows of a block come from one generator, and what is not needed is cut."""
    start, stop = first // _BLOCK, (first + rows - 1) // _BLOCK + 1
    generator = torch.Generator(device)
    bits = torch.empty(stop - start, _BLOCK, -(-columns // 4), dtype=torch.int64, device=device)
    for block in range(start, stop):
        digest = hashlib.blake2b(key + struct.pack("<q", block), digest_size=7).digest()
        generator.manual_seed(int.from_bytes(digest, "little"))
        bits[block - start].random_(-(2**63), None, generator=generator)
    return bits.view(torch.int16).flatten(0, 1)[first - start * _BLOCK :][:rows, :columns]
