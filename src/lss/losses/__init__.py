"""Losses over segments. What a rank returns is its share: the shares of all ranks add up to the loss."""

from lss.losses.chunked import linear_cross_entropy
from lss.losses.sequence import (
    connectionist_temporal_classification,
    contrastive,
    gather_sequences,
    preference,
    ranking,
    sequence_log_probability,
    sequence_mean,
    sequence_share,
    sequence_sum,
    share_of_mean,
)
from lss.losses.token import (
    count_tokens,
    token_mean,
    token_mean_binary_cross_entropy,
    token_mean_cross_entropy,
    token_mean_squared_error,
)

__all__ = [
    "connectionist_temporal_classification",
    "contrastive",
    "count_tokens",
    "gather_sequences",
    "linear_cross_entropy",
    "preference",
    "ranking",
    "sequence_log_probability",
    "sequence_mean",
    "sequence_share",
    "sequence_sum",
    "share_of_mean",
    "token_mean",
    "token_mean_binary_cross_entropy",
    "token_mean_cross_entropy",
    "token_mean_squared_error",
]
