"""Losses of whole sequences, which do not decompose over tokens: each costs one collective forward and its dual.

The ranks of a sequence group compute such a loss together and each returns its share, an N-th. Sequences are counted
over all data groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lss.batch import IGNORE_INDEX
from lss.collectives import gather, sum_over
from lss.context import SequenceContext, context_of


def sequence_share(model: nn.Module, loss_of_group: Tensor) -> Tensor:
    """A loss that all ranks of a sequence group have computed alike, as shares: each rank's N-th.

    Args:
        model: The parallelized model.
        loss_of_group: The group's part of the loss: for a mean over sequences, its sum divided by the number of
            sequences of all groups.
    """
    return loss_of_group / context_of(model).sequence.size


def sequence_sum(model: nn.Module, values: Tensor) -> Tensor:
    """Sum over the tokens of each sequence, on every rank of its group: [B, S, ...] to [B, ...]. Padding is left out.

    Costs one all-reduce of the result, forward and backward. Of a batch of packed documents it is the sum over all of a
    sequence's documents.
    """
    context = context_of(model)
    valid = _valid(context, values).view(*values.shape[:2], *[1] * (values.dim() - 2))
    return sum_over((values * valid).sum(1), context.sequence, "losses")


def sequence_mean(model: nn.Module, values: Tensor) -> Tensor:
    """Mean over the real tokens of each sequence, as in mean pooling: [B, S, ...] to [B, ...]; see `sequence_sum`."""
    context = context_of(model)
    documents = context.present.documents
    lengths = [sum(stop - start for start, stop in spans) for spans in documents] if documents else []
    counts = values.new_tensor(lengths or [context.layout.length] * values.size(0)).clamp(min=1)
    return sequence_sum(model, values) / counts.view(-1, *[1] * (values.dim() - 2))


def sequence_log_probability(model: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each sequence's labels: [B, S, vocabulary] and int64 [B, S] to [B], in float32 or wider.

    Labels are shifted already; -100 is ignored. Costs as `sequence_sum`, of [B].
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    by_token = -F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return sequence_sum(model, by_token.view(labels.shape))


def ranking(model: nn.Module, better: Tensor, worse: Tensor) -> Tensor:
    """Share of the pairwise ranking loss, the mean of -log sigmoid(better - worse), over all pairs of all groups.

    Args:
        model: The parallelized model.
        better: [B], scores of sequences, from `sequence_sum` or `sequence_mean`.
        worse: [B], scores of their rivals.
    """
    groups = context_of(model).data.size
    return sequence_share(model, -F.logsigmoid(better - worse).mean() / groups)


def preference(
    model: nn.Module,
    better: Tensor,
    worse: Tensor,
    reference_better: Tensor,
    reference_worse: Tensor,
    beta: float = 0.1,
) -> Tensor:
    """Share of the direct preference optimisation loss (Rafailov et al., 2023, equation 7), over all pairs.

    Args:
        model: The parallelized model.
        better: [B], log-probabilities of preferred answers, from `sequence_log_probability`.
        worse: [B], of the others.
        reference_better: [B], of preferred answers under the reference model; without gradient.
        reference_worse: [B], of the others.
        beta: Strength of the pull to the reference.
    """
    return ranking(model, beta * (better - reference_better), beta * (worse - reference_worse))


def contrastive(model: nn.Module, first: Tensor, second: Tensor, temperature: float = 0.1) -> Tensor:
    """Share of the contrastive loss (InfoNCE) over all pairs of all data groups, each the others' negative.

    With several data groups it gathers their embeddings: one all-gather forward, one reduce-scatter backward.

    Args:
        model: The parallelized model.
        first: [B, E], embeddings of sequences, from `sequence_mean`.
        second: [B, E], of their partners.
        temperature: Divides the cosine similarities.
    """
    context = context_of(model)
    pairs = torch.stack((F.normalize(first, dim=-1), F.normalize(second, dim=-1)), 1)
    everyone = gather(pairs, context.data, "losses")  # [B, 2, E] -> [M * B, 2, E]
    similarities = pairs[:, 0] @ everyone[:, 1].T / temperature
    own = torch.arange(first.size(0), device=first.device) + context.data.rank * first.size(0)
    return sequence_share(model, F.cross_entropy(similarities, own) / context.data.size)


def gather_sequences(model: nn.Module, values: Tensor) -> Tensor:
    """Whole sequences on every rank of the group, in the graph: [B, S, ...] to [B, L, ...].

    For losses that need all tokens at once. Costs an all-gather of everything forward and a reduce-scatter backward.
    """
    context = context_of(model)
    whole = gather(values.transpose(0, 1), context.sequence, "losses")  # [S, B, ...] -> [N * S, B, ...]
    return context.layout.unshard(whole, dim=0).transpose(0, 1)


def connectionist_temporal_classification(
    model: nn.Module, logits: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int = 0
) -> Tensor:
    """Share of the CTC loss, the mean over sequences of torch's `ctc_loss` divided by target length; costs a gather.

    Args:
        model: The parallelized model.
        logits: [B, S, classes].
        targets: int64 [B, targets], whole on every rank.
        input_lengths: int64 [B], tokens of each sequence.
        target_lengths: int64 [B].
        blank: The blank class.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_probabilities = gather_sequences(model, wide.log_softmax(-1)).transpose(0, 1)  # [B, L, C] -> [L, B, C]
    loss = F.ctc_loss(log_probabilities, targets, input_lengths, target_lengths, blank)
    return sequence_share(model, loss / context_of(model).data.size)


def _valid(context: SequenceContext, values: Tensor) -> Tensor:
    """Slots of this rank that hold a real token: [B, S], in the dtype of `values`."""
    layout, rank = context.layout, context.sequence.rank
    real = values.new_zeros(values.size(0), layout.length)
    documents = context.present.documents or (((0, layout.length),),) * values.size(0)
    for row, spans in enumerate(documents):
        for start, stop in spans:
            real[row, start:stop] = 1
    return layout.shard(real, rank, dim=1, fill=0)
