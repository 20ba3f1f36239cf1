"""Other ways of training on a sequence over several ranks, to compare with."""

from lss.strategies.concatenated import parallelize_concatenated
from lss.strategies.megatron import parallelize_as_megatron

__all__ = ["parallelize_as_megatron", "parallelize_concatenated"]
