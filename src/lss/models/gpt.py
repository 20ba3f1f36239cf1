"""A decoder-only transformer: pre-layer-norm, GELU, learned or rotary positions, optional grouped heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lss.errors import ModelError
from lss.models.positions import LearnedPositions, Rotary

Positions = Literal["learned", "rotary"]


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a GPT.

    Args:
        width: E.
        layers: Number of blocks.
        heads: H, query heads; E / H is the width of a head.
        key_value_heads: K, a divisor of H; 0 means H.
        vocabulary: Number of tokens; 256 for bytes.
        max_length: Rows of the learned positional table; unused with rotary positions.
        positions: `learned` or `rotary`.
        tie_weights: Whether the head shares the weight of the token embedding.
        dropout: Rate after the embedding, in the feed-forward, and on both residual branches.
        attention_dropout: Rate on the attention weights.
    """

    width: int
    layers: int
    heads: int
    key_value_heads: int = 0
    vocabulary: int = 256
    max_length: int = 1024
    positions: Positions = "learned"
    tie_weights: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "vocabulary", "max_length"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name}={getattr(self, name)}", allowed="at least 1")
        if self.width % self.heads:
            raise ModelError(f"width={self.width} with heads={self.heads}", allowed="heads that divide the width")
        if self.key_value_heads < 0 or self.heads % self.num_key_value_heads:
            raise ModelError(
                f"key_value_heads={self.key_value_heads} with heads={self.heads}", allowed="a divisor of heads, or 0"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ModelError(f"rotary positions with heads {self.head_width} wide", allowed="an even width of a head")

    @property
    def head_width(self) -> int:
        """D."""
        return self.width // self.heads

    @property
    def num_key_value_heads(self) -> int:
        """K."""
        return self.key_value_heads or self.heads


PRESETS: dict[str, GPTConfig] = {
    "gpt-tiny": GPTConfig(width=128, layers=4, heads=4),
    "gpt-20m": GPTConfig(width=512, layers=6, heads=8),  # the paper's small model
    "gpt-1.5b": GPTConfig(width=2048, layers=24, heads=16),  # the paper's large model
}


class Attention(nn.Module):
    """Causal self-attention. The key has no bias: its true gradient is zero, and Adam would amplify the rounding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, key_value_width = config.width, config.num_key_value_heads * config.head_width
        self.is_causal = True
        self.attention_dropout = config.attention_dropout
        self.scale: float | None = None
        self.head_width = config.head_width
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, key_value_width, bias=False)
        self.value = nn.Linear(width, key_value_width)
        self.output = nn.Linear(width, width)
        self.rotary = Rotary(config.head_width) if config.positions == "rotary" else None

    def project_query(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B, S, E] at `positions`, [S] or [B, S], to [B, H, S, D]."""
        return self._rotate(self._split_heads(self.query(x)), positions)

    def project_key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, E] at `positions`, [S] or [B, S], to keys and values, each [B, K, S, D]."""
        return self._rotate(self._split_heads(self.key(x)), positions), self._split_heads(self.value(x))

    def project_output(self, attended: Tensor) -> Tensor:
        """[B, H, S, D] to [B, S, E]."""
        merged: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return merged

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B, S, E] at `positions` [S] to [B, S, E]."""
        key, value = self.project_key_value(x, positions)
        attended = F.scaled_dot_product_attention(
            self.project_query(x, positions),
            key,
            value,
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=True,
        )
        return self.project_output(attended)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)  # [B, S, H * D] -> [B, H, S, D]

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        rotated: Tensor = heads if self.rotary is None else self.rotary(heads, positions)
        return rotated


class FeedForward(nn.Sequential):
    """Linear, GELU, dropout, linear."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(approximate="tanh"),
            nn.Dropout(config.dropout),
            nn.Linear(4 * config.width, config.width),
        )


class Block(nn.Module):
    """Attention and feed-forward, each on a normalised input and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.attention_residual_dropout = nn.Dropout(config.dropout)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)
        self.feed_forward_residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """[B, S, E] at `positions` [S] to [B, S, E]."""
        x = x + self.attention_residual_dropout(self.attention(self.attention_norm(x), positions))
        fed: Tensor = self.feed_forward_residual_dropout(self.feed_forward(self.feed_forward_norm(x)))
        return x + fed


class GPT(nn.Module):
    """A GPT over tokens.

    Args:
        config: Its shape.

    Example:
        >>> model = GPT(GPTConfig(width=32, layers=2, heads=4, max_length=16))
        >>> model(torch.zeros(2, 16, dtype=torch.int64)).shape
        torch.Size([2, 16, 256])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        learned = config.positions == "learned"
        self.positions = LearnedPositions(config.max_length, config.width) if learned else None
        self.embedding_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tie_weights:
            self.head.weight = self.tokens.weight
        self._initialise()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token: int64 [B, S] to [B, S, vocabulary]."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(positions)
        x = self.embedding_dropout(x)
        for block in self.blocks:
            x = block(x, positions)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _initialise(self) -> None:
        """Normal of deviation 0.02; smaller where a branch is added to the residual stream, as in GPT-2."""
        residual = 0.02 / math.sqrt(2 * self.config.layers)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, weight in self.named_parameters():
            if name.endswith(("attention.output.weight", "feed_forward.3.weight")):
                nn.init.normal_(weight, std=residual)
