"""Where a model computes attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import isfunction, unwrap
from types import CodeType

from torch import nn

from lss.adapters import transformers
from lss.attention import attention_layers

_FUNCTION = "scaled_dot_product_attention"
# Calls from one function of a model's code to the next that are followed.
_DEPTH = 3


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that compute attention themselves, in any of the ways that are known, by name."""
    known = {**attention_layers(model), **transformers.attention_modules(model)}
    return {
        name: module
        for name, module in model.named_modules()
        if name in known or isinstance(module, nn.MultiheadAttention) or calls_attention(module)
    }


def calls_attention(module: nn.Module) -> bool:
    """Whether the code of a module's class calls scaled_dot_product_attention."""
    if type(module).__module__.split(".")[0] in ("torch", "lss", "transformers"):
        return False
    methods = [unwrap(method) for kind in type(module).__mro__ for method in vars(kind).values() if isfunction(method)]
    return any(_calls(method, _DEPTH) for method in methods if not _is_torchs(method))


def _calls(function: Callable[..., object], depth: int) -> bool:
    names = set(_names(function.__code__))
    if _FUNCTION in names:
        return True
    called = (function.__globals__.get(name) for name in names)
    followed = (other for other in called if isfunction(other) and not _is_torchs(other))
    return depth > 0 and any(_calls(unwrap(other), depth - 1) for other in followed)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_torchs(function: Callable[..., object]) -> bool:
    return (function.__module__ or "").split(".")[0] == "torch"
