"""Losses of whole sequences, which do not decompose over tokens: each costs one collective forward and its dual.

The ranks of a sequence group compute such a loss together and each returns its share, an N-th. Sequences are counted
over all data groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lss.batch import IGNORE_INDEX
from lss.context import context_of
from lss.dtypes import wide
from lss.duals import gather, sum_over
from lss.errors import LayoutError
from lss.segment import Segment


def sequence_share(model: nn.Module, loss_of_group: Tensor) -> Tensor:
    """A loss that all ranks of a sequence group have computed alike, as shares: each rank's N-th.

    Args:
        model: The parallelized model.
        loss_of_group: The group's part of the loss: for a mean over sequences, its sum divided by the number of
            sequences of all groups.
    """
    return loss_of_group / context_of(model).sequence.size


def share_of_mean(model: nn.Module, values: Tensor) -> Tensor:
    """This rank's share of the mean over the sequences (or pairs) of all data groups, which may have unequal numbers.

    Args:
        model: The parallelized model.
        values: [sequences of this group], the same on every rank of the sequence group.
    """
    count = torch.tensor([float(values.numel())], dtype=torch.float64, device=values.device)
    context_of(model).data.all_reduce_(count, layer="losses", phase="step")
    return sequence_share(model, values.sum() / count[0].to(values.dtype))


def sequence_sum(model: nn.Module, values: Tensor, segment: Segment) -> Tensor:
    """Sum over the tokens of each sequence, on every rank of its group: [B, S, ...] to [B, ...], in float32 or wider.

    Padding is left out. Costs one all-reduce of the result, forward and backward. Of packed documents it is the sum
    over all of a sequence's documents.

    Args:
        model: The parallelized model.
        values: [B, S, ...] of this rank's slots.
        segment: What `shard` returned with the batch that they come from.
    """
    context = context_of(model)
    padding = ~segment.layout.shard(_real(segment, values), context.sequence.rank, dim=1, fill=0)
    total = wide(values).masked_fill(padding.view(*values.shape[:2], *[1] * (values.dim() - 2)), 0.0).sum(1)
    return sum_over(total, context.sequence, "losses")


def sequence_mean(model: nn.Module, values: Tensor, segment: Segment) -> Tensor:
    """Mean over the real tokens of each sequence, as in mean pooling: [B, S, ...] to [B, ...]; see `sequence_sum`."""
    counts = _real(segment, values).sum(1).clamp(min=1)
    return sequence_sum(model, values, segment) / counts.view(-1, *[1] * (values.dim() - 2))


def sequence_log_probability(model: nn.Module, logits: Tensor, labels: Tensor, segment: Segment) -> Tensor:
    """Log-probability of each sequence's labels: [B, S, vocabulary] and int64 [B, S] to [B], in float32 or wider.

    Labels are shifted already; -100 is ignored. Costs as `sequence_sum`, of [B].
    """
    rows = wide(logits).flatten(0, 1)
    by_token = -F.cross_entropy(rows, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return sequence_sum(model, by_token.view(labels.shape), segment)


def ranking(model: nn.Module, better: Tensor, worse: Tensor) -> Tensor:
    """Share of the pairwise ranking loss, the mean of -log sigmoid(better - worse), over all pairs of all groups.

    Args:
        model: The parallelized model.
        better: [pairs], scores of sequences, from `sequence_sum` or `sequence_mean`.
        worse: [pairs], scores of their rivals.
    """
    return share_of_mean(model, -F.logsigmoid(better - worse))


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
        better: [pairs], log-probabilities of preferred answers, from `sequence_log_probability`.
        worse: [pairs], of the others.
        reference_better: [pairs], of preferred answers under the reference model; without gradient.
        reference_worse: [pairs], of the others.
        beta: Strength of the pull to the reference.
    """
    return ranking(model, beta * (better - reference_better), beta * (worse - reference_worse))


def contrastive(model: nn.Module, first: Tensor, second: Tensor, temperature: float = 0.1) -> Tensor:
    """Share of the contrastive loss (InfoNCE) over all pairs of all data groups, each the others' negative.

    With several data groups it gathers their embeddings: one all-gather forward, one reduce-scatter backward.

    Args:
        model: The parallelized model.
        first: [B, E], embeddings of sequences, from `sequence_mean`; the same B in all data groups.
        second: [B, E], of their partners.
        temperature: Divides the cosine similarities.

    Raises:
        LayoutError: Data groups have different numbers of pairs.
    """
    context = context_of(model)
    numbers = torch.tensor([first.size(0)], device=first.device)
    everywhere = context.data.all_gather(numbers, layer="losses", phase="step")
    if (everywhere != numbers).any():
        raise LayoutError(f"data groups of {everywhere.tolist()} pairs", allowed="as many pairs in every data group")
    pairs = torch.stack((F.normalize(first, dim=-1), F.normalize(second, dim=-1)), 1)
    everyone = gather(pairs, context.data, "losses")  # [B, 2, E] -> [M * B, 2, E]
    similarities = pairs[:, 0] @ everyone[:, 1].T / temperature
    own = torch.arange(first.size(0), device=first.device) + context.data.rank * first.size(0)
    return sequence_share(model, F.cross_entropy(similarities, own) / context.data.size)


def gather_sequences(model: nn.Module, values: Tensor, segment: Segment) -> Tensor:
    """Whole sequences on every rank of the group, in the graph: [B, S, ...] to [B, L, ...].

    For losses that need all tokens at once. Costs an all-gather of everything forward and a reduce-scatter backward.
    """
    whole = gather(values.transpose(0, 1), context_of(model).sequence, "losses")  # [S, B, ...] -> [N * S, B, ...]
    return segment.layout.unshard(whole, dim=0).transpose(0, 1)


def connectionist_temporal_classification(
    model: nn.Module, logits: Tensor, segment: Segment, targets: Tensor, target_lengths: Tensor, blank: int = 0
) -> Tensor:
    """Share of the CTC loss, the mean over sequences of torch's `ctc_loss` divided by target length; costs a gather.

    Args:
        model: The parallelized model.
        logits: [B, S, classes].
        segment: What `shard` returned with the batch; its padding, on the right, says how long sequences are.
        targets: int64 [B, targets], whole on every rank.
        target_lengths: int64 [B].
        blank: The blank class.

    Raises:
        LayoutError: Sequences are padded on the left or packed.
    """
    if any(len(spans) > 1 or (spans and spans[0][0]) for spans in segment.documents or ()):
        raise LayoutError("CTC over packed or left-padded sequences", allowed="one sequence a row, padded on the right")
    lengths = _real(segment, logits).sum(1)
    log_probabilities = gather_sequences(model, wide(logits).log_softmax(-1), segment).transpose(0, 1)  # [L, B, C]
    losses = F.ctc_loss(log_probabilities, targets, lengths, target_lengths, blank, reduction="none")
    return share_of_mean(model, losses / target_lengths.clamp(min=1).to(losses))


def _real(segment: Segment, values: Tensor) -> Tensor:
    return segment.real(values.size(0), values.device)
