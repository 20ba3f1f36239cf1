"""Faults of models of transformers over ranks, one at a time. Each is a context manager; and what they are shown by."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import nn

from lss.context import SequenceContext, context_of
from lss.dropout import PositionDropout
from lss.verification import runs
from tests.faults.attention import documents_seen_across
from tests.faults.averaging import scaled
from tests.faults.loss import labels_shifted_inside_the_segment
from tests.faults.registry import FAULTS, changed_model, nothing, replaced
from tests.faults.use import shifted


@dataclass(frozen=True)
class Case:
    """A fault, where it is put, and what `verify` must say of it.

    Args:
        model: Of `tests.pretrained.MODELS`.
        batch: Of `tests.pretrained.KINDS`.
        failed: A kind of check that must fail.
        forward: The first module whose output differs; empty for none.
    """

    model: str
    batch: str
    failed: str
    forward: str = ""


def changed_batch(change: Callable[[dict], dict]) -> AbstractContextManager:
    """Change what is given to `lss.shard`."""

    def wrap(original: Callable) -> Callable:
        return lambda batch, mesh, **kwargs: original(change(batch), mesh, **kwargs)

    return replaced(runs, "shard", wrap)


# Positions, padding and windows


def positions_start_anew() -> AbstractContextManager:
    def local(self: SequenceContext, device: torch.device) -> torch.Tensor:
        return torch.arange(self.layout.segment_length, device=device)

    return patch.object(SequenceContext, "positions", local)


def padding_not_said() -> AbstractContextManager:
    return changed_batch(lambda batch: {name: part for name, part in batch.items() if name != "attention_mask"})


def window_off_by_one() -> AbstractContextManager:
    def widen(model: nn.Module) -> None:
        model.config.sliding_window += 1

    return changed_model(widen, before=True)


# Labels and the model's own loss


def labels_not_shifted() -> AbstractContextManager:
    return shifted(0)


def mean_of_the_segment() -> AbstractContextManager:
    """The loss and its number of tokens, which are summed together, stay this rank's own."""

    def wrap(original: Callable) -> Callable:
        return lambda self, value: value.clone() if value.numel() == 2 else original(self, value)

    return replaced(SequenceContext, "sum_over_ranks", wrap)


def last_label_of_a_segment_lost() -> AbstractContextManager:
    return labels_shifted_inside_the_segment()


# Gradients


def before_averaging(change: Callable[[nn.Module], None]) -> AbstractContextManager:
    def wrap(original: Callable) -> Callable:
        def averaged(model: nn.Module) -> None:
            change(model)
            original(model)

        return averaged

    return replaced(runs, "average_gradients", wrap)


def gradient_of_a_rank_lost() -> AbstractContextManager:
    def lose(model: nn.Module) -> None:
        if context_of(model).sequence.rank == 1:
            for weight in model.parameters():
                weight.grad = None if weight.grad is None else torch.zeros_like(weight.grad)

    return before_averaging(lose)


def tied_gradient_doubled() -> AbstractContextManager:
    return before_averaging(scaled(2.0, "transformer.wte.weight"))


# Dropout


def dropout_not_keyed() -> AbstractContextManager:
    """In the trial of the model's code it drops nothing, else it would be refused there."""

    def dropped(self: PositionDropout, x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(x, self.p, self.training and self.site.context.trial is None)

    return patch.object(PositionDropout, "forward", dropped)


def evaluated_in_training() -> AbstractContextManager:
    """Dropout stays on in evaluation."""

    def evaluate(model: nn.Module) -> None:
        model.eval = model.train  # type: ignore[method-assign]

    return changed_model(evaluate)


_MORE = (
    positions_start_anew,
    documents_seen_across,
    padding_not_said,
    window_off_by_one,
    labels_not_shifted,
    mean_of_the_segment,
    last_label_of_a_segment_lost,
    gradient_of_a_rank_lost,
    tied_gradient_doubled,
    dropout_not_keyed,
    evaluated_in_training,
    nothing,
)
PRETRAINED_FAULTS: dict[str, Callable] = FAULTS | {function.__name__: function for function in _MORE}
CASES = [
    ("positions_start_anew", Case("Llama", "whole", "output", "model.rotary_emb")),
    ("positions_start_anew", Case("GPT-2", "packed", "output", "transformer.drop")),
    ("positions_start_anew", Case("BERT", "padded left", "output", "bert.embeddings.LayerNorm")),
    ("documents_seen_across", Case("Llama", "packed", "output", "model.layers.0.self_attn.o_proj")),
    ("documents_seen_across", Case("BERT", "padded right", "output", "bert.encoder.layer.0.attention.self")),
    ("padding_not_said", Case("BERT", "padded right", "output", "bert.encoder.layer.0.attention.self")),
    ("window_off_by_one", Case("Gemma 3", "whole", "output", "model.layers.0.self_attn.o_proj")),
    ("labels_not_shifted", Case("Llama", "whole", "loss")),
    ("labels_not_shifted", Case("GPT-2", "packed", "loss")),
    ("labels_shifted_twice", Case("Llama", "whole", "loss")),
    ("last_label_of_a_segment_lost", Case("BERT", "whole", "loss")),
    ("mean_of_the_segment", Case("Gemma 3", "padded right", "loss")),
    ("loss_times_ranks", Case("GPT-2", "whole", "loss")),
    ("gradient_of_a_rank_lost", Case("Llama", "whole", "gradient")),
    ("tied_gradient_doubled", Case("GPT-2", "whole", "gradient")),
    ("averaging_left_out", Case("BERT", "packed", "gradient")),
    ("reduce_scatter_left_out", Case("Llama", "packed", "gradient")),
    ("border_key_not_seen", Case("GPT-2", "whole", "output", "transformer.h.0.attn.c_proj")),
    ("past_segments_not_seen", Case("BERT", "whole", "output", "bert.encoder.layer.0.attention.self")),
    ("dropout_not_keyed", Case("GPT-2", "whole", "loss, dropout")),
    ("dropout_masks_repeated_on_every_rank", Case("BERT", "whole", "loss, dropout")),
    ("dropout_masks_repeated_at_every_place", Case("Llama", "whole", "loss, dropout")),
    ("attention_dropout_off_by_one", Case("Llama", "packed", "gradient, dropout")),
    ("attention_dropout_left_out_of_backward", Case("Gemma 3", "whole", "gradient, dropout")),
    ("evaluated_in_training", Case("GPT-2", "whole", "output")),
    ("outputs_joined_in_reverse", Case("Llama", "whole", "output")),
]
