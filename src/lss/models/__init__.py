"""Plain PyTorch models; nothing here knows that they may run on several ranks."""

from lss.models.gpt import GPT, PRESETS, GPTConfig
from lss.models.positions import LearnedPositions

__all__ = ["GPT", "PRESETS", "GPTConfig", "LearnedPositions"]
