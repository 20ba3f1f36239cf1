"""What a model's code calls of torch, as it has to be over segments: attention, positions, dropout, losses.

The functions are taken in hand while the outermost module of a parallelized model runs, in a recomputation too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from lss.adapters import losses, positions
from lss.adapters.locality import Locality
from lss.adapters.rules import Rule, Rules, slots
from lss.attention import Route, Schedule
from lss.callers import Caller
from lss.compiled import eager
from lss.context import SequenceContext
from lss.dropout import Site, drop
from lss.errors import ModelError
from lss.frames import in_backward, number_of
from lss.masks import Causal, Full

_ALWAYS = {F.scaled_dot_product_attention, F.dropout} | losses.TAKEN
_TAKEN = _ALWAYS | positions.MADE
# Makes masks of transformers, which are made of rules instead.
_MAKES_MASKS = "transformers.masking_utils"


class Functions(TorchFunctionMode):
    """Takes functions of torch in hand.

    Args:
        context: Of the parallelized model.
        schedule: How attention is computed.
        rules: Of masks.
        tables: What may hold a row a position; None where the model is told positions.
    """

    def __init__(
        self, context: SequenceContext, schedule: Schedule, rules: Rules, tables: positions.Tables | None
    ) -> None:
        super().__init__()
        self.context, self.schedule, self.rules, self.tables = context, schedule, rules, tables
        self.is_entered = False

    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if torch.compiler.is_compiling():  # a module of the model is, and the model is not
            wanted = _ALWAYS if self.tables is None else _TAKEN
            return self.taken(function, args, given, Caller()) if function in wanted else function(*args, **given)
        if function in _TAKEN and not (caller := Caller.of(sys._getframe(1))).is_this_package:
            result = self.taken(function, args, given, caller)
        else:
            result = function(*args, **given)
        if self.context.trial is not None:
            with torch._C.DisableTorchFunction():
                self.context.trial.note_call(function.__name__, result)
        return result

    @eager
    def taken(self, function: Callable[..., Any], args: Any, kwargs: Any, caller: Caller) -> Any:
        """What a function gives over segments.

        Args:
            function: Of torch.
            args: What it is given.
            kwargs: The same by name.
            caller: The place in code that calls it.
        """
        context = self.context
        if function is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if function is F.dropout:
            return self._dropout(*args, **kwargs)
        if function in losses.TAKEN:
            return losses.whole(function, args, kwargs, context)
        works = context.is_running or in_backward()  # else a head is called on what the model gave
        if (
            works
            and context.is_cut
            and not context.is_alone
            and self.tables is not None
            and caller.module != _MAKES_MASKS
        ):
            found = positions.made(function, args, kwargs, context, self.tables, caller)
            if found is not None:
                return found
        return function(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if query.dim() not in (3, 4):
            raise ModelError(
                f"attention of queries {tuple(query.shape)} in {self._here}", allowed="[B, H, S, D] or [B, S, D]"
            )
        heads = [part if part.dim() == 4 else part.unsqueeze(1) for part in (query, key, value)]
        rule: Rule = (Causal() if is_causal else Full(), None)
        if attn_mask is not None:
            rule = self.rules.of_pairs(attn_mask, slots(self.context))
        route = Route(self.context, self.schedule, self._here)
        dropout = self._site(dropout_p) if dropout_p else None
        attended = route.attend(
            heads[0],
            heads[1],
            heads[2],
            rule[0],
            scale=scale,
            bias=rule[1],
            dropout=dropout,
            of_source=route.is_of_source(heads[1].size(2)),
        )
        return attended if query.dim() == 4 else attended.squeeze(1)

    def _dropout(self, values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return drop(values, self._site(p)) if training and p else values

    def _site(self, rate: float) -> Site:
        """The place of a function in the innermost module's code, of which there may be several."""
        if in_backward() and not self.context.frames.running:
            raise ModelError(
                "dropout in code that is recomputed apart from its module",
                allowed="recomputation of modules: checkpoint(block, x), not checkpoint(block.forward, x)",
            )
        name = self.context.drops_by_function = f"{self._here}.dropout()"
        return Site(name, rate, number_of(name), self.context)

    @property
    def _here(self) -> str:
        return self.context.frames.innermost or "the model"


class Entered:
    """Has `Functions` be in force while a model's modules run.

    Args:
        mode: What is to be in force.
    """

    def __init__(self, mode: Functions) -> None:
        self.mode = mode

    @eager
    def enter(self) -> None:
        """The outermost module begins."""
        if not any(mode is self.mode for mode in _get_current_function_mode_stack()):
            self.mode.__enter__()  # type: ignore[no-untyped-call]
            self.mode.is_entered = not in_backward()

    @eager
    def leave(self) -> None:
        """It is over. In a recomputation its caller goes on, perhaps with attention: autograd drops modes by itself."""
        if not in_backward():
            self.mode.is_entered = False
            self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class Compiled:
    """A model's forward with `Functions` in force where it is compiled as a whole: hooks cannot do it there.

    Args:
        forward: The model's own.
        mode: What is to be in force.
        locality: Tries the model's code first.
    """

    def __init__(self, forward: Callable[..., Any], mode: Functions, locality: Locality) -> None:
        self.forward, self.mode, self.locality = forward, mode, locality
        update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own."""
        self.locality.require(args, kwargs)
        if self.mode.is_entered:
            return self.forward(*args, **kwargs)
        with _Traced(self.mode):
            return self.forward(*args, **kwargs)


class _Traced(TorchFunctionMode):
    """The same while a graph is traced: a graph ends at each function that is taken."""

    def __init__(self, mode: Functions) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if function in _ALWAYS or (self.mode.tables is not None and function in _TAKEN):
            return self.mode.taken(function, args, given, Caller())
        return function(*args, **given)
