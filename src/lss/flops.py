"""Floating-point operations of torch's operators."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


@lru_cache(maxsize=1)
def formulas() -> Mapping[Any, Any]:
    """Torch's own formulas by operator, and the same for its flash attention on the CPU, which it lacks."""
    aten = torch.ops.aten
    return {
        **flop_registry,
        aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
        aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
            aten._scaled_dot_product_flash_attention_backward
        ],
    }
