"""Attention with Q distributed and K, V collected."""

from lss.attention.blocks import Work, attend
from lss.attention.kernels import kernel_for, why
from lss.attention.layer import GATHERS, AttentionLayer, DistributedAttention, Gather
from lss.attention.plan import plan

__all__ = ["GATHERS", "AttentionLayer", "DistributedAttention", "Gather", "Work", "attend", "kernel_for", "plan", "why"]
