"""Attention with Q distributed and K, V collected."""

from lss.attention.blocks import attend
from lss.attention.layer import GATHERS, AttentionLayer, Gather, distributed_attention

__all__ = ["GATHERS", "AttentionLayer", "Gather", "attend", "distributed_attention"]
