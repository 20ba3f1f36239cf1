"""Adapters of Hugging Face's peft: which of them are exact over segments."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lss.errors import ModelError

# Forms of LoRA that work on each token alone, and change no loss.
_VARIANTS = ("NoneType", "DoraLinearVariant", "DoraEmbeddingVariant")


def refusals(model: nn.Module) -> Iterator[ModelError]:
    """Adapters that prepend tokens, add to the loss, or look at more than the token they work on."""
    for name, module in model.named_modules():
        configured = getattr(module, "peft_config", None)
        for config in configured.values() if isinstance(configured, dict) else ():
            kind = str(getattr(config.peft_type, "value", config.peft_type))
            if kind != "LORA":
                yield ModelError(
                    f"{name or type(model).__name__} has an adapter of peft of the kind {kind}", allowed="LoRA"
                )
        for variant in getattr(module, "lora_variant", {}).values():
            if type(variant).__name__ not in _VARIANTS:
                yield ModelError(f"{name} is a LoRA with a {type(variant).__name__}", allowed="LoRA as it is, and DoRA")
