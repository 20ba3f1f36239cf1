"""Whether a model's code keeps tokens alone outside attention, and numbers them by their place in the whole sequence.

Before its first call, its code is run on a few tokens of the rank at once, and again on either half of them, with
something in the place of attention that keeps tokens alone too. Whatever then differs would differ between ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lss.adapters import losses
from lss.adapters.alike import alike
from lss.adapters.aside import aside
from lss.adapters.few_tokens import FewTokens, layouts_of, unusual_numbers
from lss.collectives import agree
from lss.compiled import eager
from lss.context import SequenceContext
from lss.errors import ModelError
from lss.frames import is_within
from lss.trial import RANDOM, Place, Trial, is_as_noted

_LOSS = "a loss"
_ALONE = "alone, as tried on a few tokens"


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
        if context.sequence.size == 1 or context.trial is not None:
            return
        way = _way(self.model.training, args, kwargs)
        if way in context.tried:
            return
        attempt = partial(self._try, args, kwargs)
        if context.num_calls == 1:  # later ways may be those of one rank, which must not wait for others
            attempt = partial(agree, attempt, context.sequence.group)
            if self.model.training and context.data.size > 1:  # evaluation may be of one data group
                attempt = partial(agree, attempt, context.data.group)
        outcome = attempt()
        if outcome:
            context.tried[way] = outcome
        if outcome not in ("", _ALONE) and context.sequence.rank == 0:
            warnings.warn(f"whether {type(self.model).__name__} keeps tokens alone was {outcome}", stacklevel=2)

    def _try(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What came of it, for people; nothing where a segment of one token has no parts."""
        context, numbers_tokens = self.context, dict(self.context.numbers_tokens)
        if any(layout.segment_length < 2 for layout in layouts_of(context)):
            return ""
        try:
            found = self._first_difference(unusual_numbers(self.model, (args, kwargs)), args, kwargs)
        except _StoppedError as stopped:
            context.numbers_tokens = numbers_tokens
            return f"not tried, {type(stopped.__cause__).__name__}: {stopped.__cause__}"
        if found:
            raise _refusal(*found)
        return _ALONE

    def _first_difference(
        self, halves: tuple[int, int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str, str] | None:
        """The module whose code is the first to make something else of a token, and what."""
        tokens = range(sum(halves))
        parts = (tokens, tokens[: halves[0]], tokens[halves[0] :])
        trials, results = zip(*(self._run(halves, part, args, kwargs) for part in parts), strict=True)
        whole, *others = (trial.notes for trial in trials)
        with torch._C.DisableTorchFunction():  # the mode that is in force costs time
            for place, note in whole.items():
                if len({trial.counts[place[:2]] for trial in trials}) > 1:
                    continue  # as often as values say
                found = (note, *(part[place] for part in others))
                if all(is_as_noted(*each) for each in found) and not self._passes(
                    place, halves, *(values for values, _ in found)
                ):
                    return None if is_within(place[0], self.context.safe) else place[:2]
            return ("", _LOSS) if _is_of_one_rank(*results) else None

    def _passes(self, place: Place, halves: tuple[int, int], whole: Tensor, first: Tensor, second: Tensor) -> bool:
        name, what, _ = place
        is_random, is_call = what.startswith(RANDOM), what.startswith("calls")
        if (is_random or is_call) and is_within(name, self.context.safe):
            return True  # of a module that is declared safe what it returns tells
        if is_random:
            return False
        if is_call and not whole.dim():
            return True
        return alike(whole, first, second, halves, may_count=is_call)

    def _run(
        self, halves: tuple[int, int], tokens: range, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Trial, Any]:
        """What the model's code makes of some tokens, and returns."""
        context = self.context
        trial = Trial(context.sequence.rank, context.sequence.size, halves, tokens)
        few = FewTokens(trial, list(layouts_of(context)), context.token_dim)
        args, kwargs = few(args), few(kwargs)
        with aside(self.model, context, trial, self.mode):
            try:
                if context.cut == "tokens" and not few.has_cut:
                    raise ModelError(f"no tensor of {context.layout.segment_length} tokens among the arguments")
                result = self.forward(*args, **kwargs)
            except Exception as error:
                raise _StoppedError from error
            trial.note("returns", result, integers=True)
        return trial, result


def _refusal(name: str, what: str) -> ModelError:
    if what == _LOSS:
        return losses.of_its_own()
    return ModelError(
        f"{name or 'the model'} {what} other values for a token where the rank has fewer tokens: it mixes tokens or "
        "picks some, draws random numbers, or counts positions from its segment's start",
        allowed="attention by scaled_dot_product_attention; outside of it functions of each token alone; positions by "
        "torch.arange(S) or by the first S rows of a table",
        remedy=f"lss.parallelize(model, mesh, cut='layers'), or safe=[{name!r}] if it is right all the same",
    )


def _is_of_one_rank(whole: Any, first: Any, second: Any) -> bool:
    """Whether a loss is neither the same on all ranks nor the sum of what they return."""
    found = [loss_of(result) for result in (whole, first, second)]
    if any(loss is None for loss in found):
        return False
    total, *parts = (float(loss) for loss in found if loss is not None)
    within = 1e-4 * max(map(abs, (total, *parts)))
    return max(abs(total - part) for part in parts) > within and abs(total - sum(parts)) > within


def loss_of(result: Any) -> Tensor | None:
    """A scalar that a model returns as `loss`, or alone, or as the first of a tuple."""
    found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
    found = found[0] if isinstance(found, tuple | list) and found else found
    return found if isinstance(found, Tensor) and not found.dim() and found.is_floating_point() else None


def _way(training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """In which of its ways a model is called: what it is given, and what is switched on."""
    said = [type(value).__name__ if not isinstance(value, bool | str) else str(value) for value in args]
    named = {name: value for name, value in sorted(kwargs.items()) if value is not None}
    said += [f"{name}={value}" if isinstance(value, bool | str) else name for name, value in named.items()]
    return f"{'training' if training else 'evaluation'} with {', '.join(said)}"
