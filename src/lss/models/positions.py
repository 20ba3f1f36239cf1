"""Learned and rotary positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LearnedPositions(nn.Embedding):
    """A learned table with one row a position."""


class Rotary(nn.Module):
    """Rotary position embedding (Su et al., 2021), in the half-split form.

    Args:
        head_width: D, even.
        base: Ratio of the slowest to the fastest wavelength.
    """

    def __init__(self, head_width: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.head_width = head_width
        self.base = base

    def forward(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotate [B, H, S, D] by the angles of `positions`, [S] or [B, S], which are computed in float64."""
        exponents = torch.arange(0, self.head_width, 2, dtype=torch.float64, device=heads.device) / self.head_width
        angles = positions[..., None] * self.base**-exponents
        angles = angles.unsqueeze(-3)  # [S, D / 2] -> [1, S, D / 2], or [B, S, D / 2] -> [B, 1, S, D / 2]
        wide = torch.promote_types(heads.dtype, torch.float32)
        cosine, sine = angles.cos().to(wide), angles.sin().to(wide)
        left, right = heads.chunk(2, -1)
        return torch.cat((left * cosine - right * sine, right * cosine + left * sine), -1).to(heads.dtype)
