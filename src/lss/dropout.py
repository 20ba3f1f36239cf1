"""Dropout whose masks are keyed by global position, so that a run is the same at every number of ranks."""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor, nn

from lss.context import SequenceContext
from lss.errors import LayoutError, ModelError

# Positions drawn by one generator. A segment that starts inside a block draws the whole block and cuts, so that a
# larger block wastes more at short segments and a smaller one reseeds more often.
BLOCK = 64


class PositionDropout(nn.Module):
    """Dropout of [B, S, F] whose mask is a function of (seed, step, site, sequence, global position, feature).

    The same masks fall at every degree of sequence and data parallelism, and again in activation recomputation. The
    rate is rounded to a multiple of 2**-16, and the kept values are scaled by the rounded rate.

    Args:
        rate: Share of values dropped, in [0, 1].
        site: Index of this dropout in the model.
        context: The context of the parallelized model.
    """

    def __init__(self, rate: float, site: int, context: SequenceContext) -> None:
        super().__init__()
        self.rate = rate
        self.site = site
        self.context = context
        self._last_call = 0

    def extra_repr(self) -> str:
        """Rate and site, as in `print(model)`."""
        return f"rate={self.rate}, site={self.site}"

    def forward(self, values: Tensor) -> Tensor:
        """Drop and scale; the identity in evaluation."""
        dropped_steps = round(self.rate * 2**16)
        if not self.training or dropped_steps == 0:
            return values
        layout = self.context.layout
        if values.dim() != 3 or values.size(1) != layout.segment_length:
            raise LayoutError(
                f"dropout of a tensor of shape {tuple(values.shape)} in a segment of {layout.segment_length} slots",
                allowed=f"[B, {layout.segment_length}, F]",
            )
        self._refuse_reuse()
        keep = self._keep_mask(values, dropped_steps)
        scale = 2**16 / (2**16 - dropped_steps) if dropped_steps < 2**16 else 0.0
        return values * keep * scale

    def _refuse_reuse(self) -> None:
        """Two places must not share a mask; a recomputation, which runs inside backward, must."""
        recomputed = torch._C._current_graph_task_id() != -1
        if self._last_call == self.context.num_calls and not recomputed:
            raise ModelError(
                f"dropout site {self.site} is used twice in one call of the model",
                allowed="one place for each nn.Dropout, as its masks are keyed by the module",
                remedy="give each place a module of its own",
            )
        if not recomputed:
            self._last_call = self.context.num_calls

    def _keep_mask(self, values: Tensor, dropped_steps: int) -> Tensor:
        """True where a value is kept: bool [B, S, F]."""
        num_samples, length, features = values.shape
        start = self.context.layout.start(self.context.sequence.rank)
        first, last = start // BLOCK, (start + length - 1) // BLOCK
        generator = torch.Generator(values.device)
        keep = torch.empty(num_samples, (last - first + 1) * BLOCK, features, dtype=torch.bool, device=values.device)
        for sample in range(num_samples):
            for block in range(first, last + 1):
                generator.manual_seed(self._key(sample, block))
                rows = slice((block - first) * BLOCK, (block - first + 1) * BLOCK)
                torch.ge(_bits(features, generator), dropped_steps - 2**15, out=keep[sample, rows])
        cut = start - first * BLOCK
        return keep[:, cut : cut + length]

    def _key(self, sample: int, block: int) -> int:
        fields = (self.context.seed, self.context.step, self.site, self.context.present.first_sample + sample, block)
        return int.from_bytes(hashlib.blake2b(struct.pack("<5q", *fields), digest_size=7).digest(), "little")


def _bits(features: int, generator: torch.Generator) -> Tensor:
    """Uniform int16 [BLOCK, F]. Four are cut from each 64-bit draw: several times faster than a draw an element."""
    draws = torch.empty(BLOCK, -(-features // 4), dtype=torch.int64, device=generator.device)
    return draws.random_(-(2**63), None, generator=generator).view(torch.int16)[:, :features]
