"""Dropout of the serial run, written again from its rule, to compare with.

The bits of a place are those of Philox 4x64 keyed by (seed, step, place, sequence, block of columns): row p of C
columns takes the counters from p * ceil(C / 16) on, 16 bits a value. A value is kept where its bits, as a signed
number, are at least the rate in units of 2**-16, minus 2**15.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import count
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lss.adapters import transformers
from lss.attention import attention_layers, mask_of
from lss.frames import user_of
from lss.parallelize import attention_dropout

_KEYS = 64  # keys of a block of attention weights


@dataclass
class Place:
    """Where the serial run is.

    Args:
        step: The step.
        row: First sequence of what the model is given.
        start: Position of its first token.
    """

    step: int = 0
    row: int = 0
    start: int = 0

    def keep(
        self, number: int, rate: float, row: int, length: int, columns: int, block: int = 0, use: int = 0
    ) -> Tensor:
        """Factor of each value, 0 or 1 / (1 - rate), of `length` tokens from `start` on: float64 [length, columns]."""
        said = (0, self.step, number, self.row + row, block, *([use] if use else []))
        fields = struct.pack(f"<{len(said)}q", *said)
        key = np.frombuffer(hashlib.blake2b(fields, digest_size=16).digest(), np.uint64)
        counts = math.ceil(columns / 16)
        stop = self.start + length
        bits = np.random.Philox(key=key).random_raw(4 * counts * stop).view(np.int16).reshape(stop, -1)
        levels = round(rate * 2**16)
        kept = torch.from_numpy((bits[self.start :, :columns].astype(np.int64) >= levels - 2**15).astype(np.float64))
        return kept * (2**16 / (2**16 - levels))

    def keep_weights(self, number: int, rate: float, weights: Tensor) -> Tensor:
        """The same for attention weights [B, H, L, T], of tokens and keys from `start` on, drawn a block of keys."""
        rows, heads, length, num_keys = weights.shape
        first, stop = self.start // _KEYS, (self.start + num_keys - 1) // _KEYS + 1
        keep = torch.zeros(rows, length, (stop - first) * _KEYS, heads, dtype=weights.dtype)
        for row in range(rows):
            for block in range(first, stop):
                drawn = self.keep(number, rate, row, length, _KEYS * heads, block)
                begin = (block - first) * _KEYS
                keep[row, :, begin : begin + _KEYS] = drawn.view(length, _KEYS, heads)
        begin = self.start - first * _KEYS
        return keep[:, :, begin : begin + num_keys].permute(0, 3, 1, 2)


@dataclass
class Owner:
    """A module that uses dropout modules.

    Args:
        name: Of the module.
        entry: How many times it was entered before in the present call of the model.
        used: How often each dropout was used since.
    """

    name: str
    entry: int = -1
    used: Counter[str] = field(default_factory=Counter)

    def begin(self, *given: object) -> None:
        """The model is called."""
        self.entry = -1

    def enter(self, *given: object) -> None:
        """The module is."""
        self.entry += 1
        self.used.clear()

    def use(self, name: str) -> int:
        """The key of a use of a dropout: 0 for the first in a call of the model, else of 56 bits."""
        number = self.used[name]
        self.used[name] += 1
        if not number and not self.entry:
            return 0
        said = f"{self.name} {self.entry} {name} {number}"
        return 1 + int.from_bytes(hashlib.blake2b(said.encode(), digest_size=7).digest(), "little")


class SerialDropout(nn.Module):
    """Takes the place of an `nn.Dropout` in the serial run."""

    def __init__(self, place: Place, number: int, p: float, name: str, owner: Owner) -> None:
        super().__init__()
        self.place, self.number, self.p, self.name, self.owner = place, number, p, name, owner

    def forward(self, values: Tensor) -> Tensor:
        """[B, L, F], or [B, F]."""
        if not self.training or not self.p:
            return values
        place = self.place if values.dim() == 3 else replace(self.place, start=0)  # [B, F]: one row, the first
        length, use = values.size(1) if values.dim() == 3 else 1, self.owner.use(self.name)
        keep = [place.keep(self.number, self.p, row, length, values.size(-1), use=use) for row in range(values.size(0))]
        return values * torch.stack(keep).view(values.shape).to(values.dtype)


@dataclass(frozen=True)
class SerialAttention:
    """The forward of an attention layer with dropout of its weights: softmax of all scores, then the masks."""

    layer: nn.Module
    place: Place
    number: int
    rate: float

    def __call__(self, x: Tensor, *others: object, **named: object) -> Tensor:
        """[B, L, E]."""
        layer: Any = self.layer
        index = torch.arange(x.size(1), device=x.device)
        query = layer.project_query(x, index)
        key, value = layer.project_key_value(x, index)
        key, value = (part.repeat_interleave(query.size(1) // part.size(1), 1) for part in (key, value))
        scale = getattr(layer, "scale", None) or query.size(-1) ** -0.5
        scores = query @ key.mT * scale
        bias, mask, sinks = getattr(layer, "bias", None), mask_of(layer), getattr(layer, "sinks", None)
        scores = scores if bias is None else scores + bias(index, index)
        assert mask is not None
        scores = scores.masked_fill(~mask.pairs(0, index, index), -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
        weights = scores.softmax(-1).nan_to_num(0.0)[..., : x.size(1)]
        if layer.training:
            weights = weights * self.place.keep_weights(self.number, self.rate, weights)
        output: Tensor = layer.project_output(weights @ value)
        return output


class SerialWeights(TorchFunctionMode):
    """Within an attention module of transformers, `F.dropout` of attention weights drops by the masks of a place."""

    def __init__(self, place: Place, number: int) -> None:
        super().__init__()
        self.place, self.number = place, number

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        return self._dropped(*args, **given) if function is F.dropout else function(*args, **given)

    def _dropped(self, weights: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return weights * self.place.keep_weights(self.number, p, weights) if training and p else weights


def with_serial_dropout(model: nn.Module) -> Place:
    """Give a plain model the masks that a parallelized one draws on the CPU with seed 0; in place.

    Places are numbered as modules come, dropout modules before the weights of attention layers.

    Returns:
        Where the run is, to be told by the caller.
    """
    place, numbers = Place(), count()
    layers = attention_layers(model)
    rates = {name: attention_dropout(layer) for name, layer in layers.items()}
    replaced: dict[int, SerialDropout] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, nn.Dropout):
            if id(module) not in replaced:
                made = SerialDropout(place, next(numbers), module.p, name, _owner(model, name))
                replaced[id(module)] = made.train(module.training)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replaced[id(module)])
    for name, layer in layers.items():
        if rates[name]:
            cast(Any, layer).forward = SerialAttention(layer, place, next(numbers), rates[name])
    if transformers.is_pretrained(model):
        for module in transformers.attention_modules(model).values():
            cast(Any, module).forward = _within(SerialWeights(place, next(numbers)), module.forward)
    return place


def _owner(model: nn.Module, name: str) -> Owner:
    """The nearest module that holds a dropout and is no list, watched."""
    owner = Owner(user_of(model, name))
    model.register_forward_pre_hook(owner.begin)
    model.get_submodule(owner.name).register_forward_pre_hook(owner.enter)
    return owner


def _within(mode: SerialWeights, forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return wrapped
