"""Whether a model's code keeps tokens alone outside attention, and numbers them by their place in the whole sequence.

Before its first call, its code is run on a few tokens of the rank at once, and again on either half of them, with
something in the place of attention that keeps tokens alone too. Whatever then differs would differ between ranks.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lss.adapters import losses
from lss.adapters.alike import alike
from lss.adapters.aside import aside, opened
from lss.adapters.few_tokens import FewTokens, layouts_of, unusual_numbers
from lss.callers import Caller
from lss.collectives import agree
from lss.compiled import eager
from lss.context import SequenceContext
from lss.errors import ModelError
from lss.fake import has_values
from lss.frames import is_within
from lss.layout import Layout
from lss.trial import KEEPS, RANDOM, RETURNS, Trial, is_as_noted

_ALONE = "alone, as tried on a few tokens"
_ONE_TOKEN = "not tried: a segment has one token"
_KEPT_POSITIONS = "not tried: it keeps positions of earlier calls"
_EQUAL_TOKENS = "not tried: all tokens of a segment are the same"
# What later batches may be free of, and how many calls of a model they are waited for.
_OF_THE_BATCH, _CALLS = (_ONE_TOKEN, _EQUAL_TOKENS), 8


class _StoppedError(Exception):
    """The model's code raised an error, its cause."""


class Locality:
    """Tries a model's code before its first call in training, in evaluation, and with other arguments.

    Args:
        model: The parallelized model.
        forward: Its own forward.
        context: Of the model.
        mode: Is to be in force.
    """

    def __init__(
        self, model: nn.Module, forward: Callable[..., Any], context: SequenceContext, mode: TorchFunctionMode
    ) -> None:
        self.model, self.forward, self.context, self.mode = model, forward, context, mode

    @eager
    def require(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ModelError if tokens would not be alone, or not know their places.

        Args:
            args: Of the call that is to come.
            kwargs: The same by name.
        """
        context = self.context
        if context.sequence.size == 1 or context.trial is not None or not has_values():
            return
        way = _way(self.model.training, args, kwargs)
        if way in context.findings.tried:
            return
        attempt = partial(self._try, args, kwargs)
        is_first_trained = self.model.training and context.num_trained == 1
        if context.num_calls == 1 or is_first_trained:  # later ways may be those of one rank
            attempt = partial(agree, attempt, context.sequence.group)
        if is_first_trained and context.data.size > 1:  # evaluation may be of one data group
            attempt = partial(agree, attempt, context.data.group)
        outcome = attempt()
        if outcome not in _OF_THE_BATCH or context.num_calls >= _CALLS:
            context.findings.tried[way] = outcome
        if outcome != _ALONE and context.sequence.rank == 0:
            warnings.warn(f"whether {type(self.model).__name__} keeps tokens alone was {outcome}", stacklevel=2)

    def _try(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What came of it, for people."""
        findings = self.context.findings
        numbers_tokens, said = dict(findings.numbers_tokens), ""
        if any(layout.segment_length < 2 for layout in layouts_of(self.context)):
            return _ONE_TOKEN
        for halves in unusual_numbers(self.model, (args, kwargs)):
            try:
                with opened(self.model):
                    return self._compare(halves, args, kwargs)
            except _StoppedError as stopped:
                findings.numbers_tokens.clear()
                findings.numbers_tokens.update(numbers_tokens)
                said = said or f"not tried, {_said(stopped)}"
        return said

    def _compare(self, halves: tuple[int, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What came of it with so many tokens, for people."""
        tokens = range(sum(halves))
        parts = (tokens, tokens[: halves[0]], tokens[halves[0] :])
        runs = [self._run(halves, part, args, kwargs) for part in parts]
        found = self._first_difference(halves, runs)
        if found is not None and self.context.num_calls > 1 and self.context.findings.keeps_positions:
            return _KEPT_POSITIONS
        if found is not None and not is_within(found[0], self.context.safe):
            raise _refusal(*found)
        if found is not None:
            return f"tried up to {found[0]}, which is declared safe and makes other values"
        return _ALONE if runs[0].tokens_differ else _EQUAL_TOKENS

    def _first_difference(self, halves: tuple[int, int], runs: Sequence[Trial]) -> tuple[str, str, Tensor] | None:
        """The module whose code is the first to make something else of a token, how, and what."""
        safe = self.context.safe
        with torch._C.DisableTorchFunction():  # the mode that is in force costs time
            for place in runs[0].notes:
                name, what, _ = place
                if is_within(name, safe) and not (name in safe and what == RETURNS):
                    continue  # what it returns tells
                if len({run.counts[name, what] for run in runs}) > 1:
                    continue  # as often as values say
                found = [run.notes[place] for run in runs]
                if all(is_as_noted(*each) for each in found) and not _passes(
                    what, halves, *(part for part, _ in found)
                ):
                    return name, what, found[0][0]
        return None

    def _run(self, halves: tuple[int, int], tokens: range, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trial:
        """What the model's code makes of some tokens."""
        context, findings = self.context, self.context.findings
        trial, again = (Trial(context.sequence.rank, context.sequence.size, halves, tokens) for _ in range(2))
        layouts = list(layouts_of(context))
        with aside(self.model, context, trial, self.mode):
            made = self._call(layouts, args, kwargs)
            if made and len(tokens) == sum(halves):
                context.trial = again
                with suppress(_StoppedError):
                    findings.keeps_positions |= bool(made - self._call(layouts, args, kwargs))
        return trial

    def _call(self, layouts: list[Layout], args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[Caller]:
        """Note what comes of a call; where it made positions."""
        context = self.context
        trial, come_by = context.trial, context.findings.come_by
        assert trial is not None
        trial.seed()
        few = FewTokens(trial, layouts, context.token_dim)
        with torch._C.DisableTorchFunction():
            args, kwargs = few(args), few(kwargs)
        come_by.clear()
        try:
            if context.cut == "tokens" and not few.has_cut:
                raise ModelError(f"no tensor of {layouts[0].segment_length} tokens among the arguments")
            trial.note(RETURNS, self.forward(*args, **kwargs), integers=True)
        except Exception as error:
            raise _StoppedError from error
        trial.note_draws()
        trial.tokens_differ = few.tokens_differ
        for name, buffer in self.model.named_buffers():
            trial.note(KEEPS, buffer.clone(), integers=True, by=name)  # it is put back
        return come_by.copy()


def _passes(what: str, halves: tuple[int, int], whole: Tensor, first: Tensor, second: Tensor) -> bool:
    is_call = what.startswith("calls")
    if what.startswith(RANDOM):
        return False
    return (is_call and not whole.dim()) or alike(whole, first, second, halves, may_count=is_call)


def _refusal(name: str, what: str, made: Tensor) -> ModelError:
    if what == KEEPS:
        return ModelError(
            f"the model keeps in {name} what it makes of its rank's tokens: ranks would come to hold unlike values",
            allowed="buffers in which no tokens are counted or averaged",
            remedy=f"safe=[{name!r}] if ranks may differ there",
        )
    if (name, what) == ("", RETURNS) and not made.dim() and made.is_floating_point():
        return losses.of_its_own()
    apart = f"safe=[{name!r}]" if name else "put it into a module of its own and declare that by safe=[...]"
    return ModelError(
        f"{name or 'the model'} {what} other values for a token where the rank has fewer tokens: it mixes tokens or "
        "picks some, draws random numbers, or counts positions from its segment's start",
        allowed="attention by scaled_dot_product_attention; outside of it functions of each token alone; positions by "
        "torch.arange(S) or by the first S rows of a parameter, a buffer or an attribute of a module",
        remedy=f"lss.parallelize(model, mesh, cut='layers'), or {apart} if it is right all the same",
    )


def _said(stopped: _StoppedError) -> str:
    """The error of a model's code, and where it was where it says nothing."""
    cause = stopped.__cause__
    assert cause is not None
    (place,) = traceback.extract_tb(cause.__traceback__, limit=-1)
    return f"{type(cause).__name__}: {cause if str(cause) else place.line}"


def _way(training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """In which of its ways a model is called: what it is given, and what is switched on."""
    said = [type(value).__name__ if not isinstance(value, bool | str) else str(value) for value in args]
    named = {name: value for name, value in sorted(kwargs.items()) if value is not None}
    said += [f"{name}={value}" if isinstance(value, bool | str) else name for name, value in named.items()]
    return f"{'training' if training else 'evaluation'} with {', '.join(said)}"
