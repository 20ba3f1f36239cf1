"""Exact training of transformers on sequences too long for one device."""

from lss import bias, masks
from lss.attention import AttentionLayer, attention
from lss.batch import shard, unshard
from lss.context import context_of
from lss.errors import LssError
from lss.explain import explain
from lss.gradients import average_gradients, clip_gradient_norm, gradient_norm, positional_tables
from lss.layout import Layout
from lss.ledger import Ledger
from lss.losses import count_tokens, token_mean_cross_entropy
from lss.mesh import init_mesh
from lss.parallelize import parallelize
from lss.segment import Segment
from lss.state import full_gradients, full_state_dict, load_full_state_dict
from lss.verification import verify

__version__ = "0.1.0"

__all__ = [
    "AttentionLayer",
    "Layout",
    "Ledger",
    "LssError",
    "Segment",
    "attention",
    "average_gradients",
    "bias",
    "clip_gradient_norm",
    "context_of",
    "count_tokens",
    "explain",
    "full_gradients",
    "full_state_dict",
    "gradient_norm",
    "init_mesh",
    "load_full_state_dict",
    "masks",
    "parallelize",
    "positional_tables",
    "shard",
    "token_mean_cross_entropy",
    "unshard",
    "verify",
]
