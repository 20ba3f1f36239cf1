"""Plain PyTorch models; nothing here knows that they may run on several ranks."""

from lss.models.gpt import GPT, PRESETS, GPTConfig

__all__ = ["GPT", "PRESETS", "GPTConfig"]
