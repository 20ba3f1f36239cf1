"""Attention over segments: blocks of a mask, kernels that compute them, and the schedule of what is gathered."""

from lss.attention.functional import attention
from lss.attention.kernels import KernelName
from lss.attention.layer import (
    PROJECTIONS,
    AttentionLayer,
    DistributedAttention,
    Route,
    attention_layers,
    bias_of,
    mask_of,
)
from lss.attention.schedule import Schedule, Strategy
from lss.attention.sources import GATHERS, Gather

__all__ = [
    "GATHERS",
    "PROJECTIONS",
    "AttentionLayer",
    "DistributedAttention",
    "Gather",
    "KernelName",
    "Route",
    "Schedule",
    "Strategy",
    "attention",
    "attention_layers",
    "bias_of",
    "mask_of",
]
