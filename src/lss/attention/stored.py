"""Attention whose scores are all kept for backward, as the paper ran it: [B, H, S, L] of them in every layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lss.attention.attend import Call
from lss.attention.plan import Run
from lss.dropout import Site, keep_weights
from lss.dtypes import wide
from lss.duals import gather
from lss.layout import Layout, Piece
from lss.masks import Full


def attend_stored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    sinks: Tensor | None = None,
    inputs: tuple[Tensor, ...] = (),
) -> Tensor:
    """What `attend` gives, by matrix products over all keys at once, in the graph of the model.

    Args:
        query: [B, H, S, D].
        key: [B, K, S, D].
        value: [B, K, S, E].
        call: What is gathered, the mask, the scale, the bias and the dropout.
        sinks: [H].
        inputs: As of `attend`.

    Returns:
        [B, H, S, E], in the dtype of `query`; zeros for queries that see no key.
    """
    key, value = _collected(key, value, call, inputs)
    work, groups = call.work, key.size(1)
    scale = 1 / math.sqrt(query.size(-1)) if work.scale is None else work.scale
    grouped = wide(query * scale).unflatten(1, (groups, -1))
    scores = torch.einsum("bkgsd,bktd->bkgst", grouped, wide(key)).flatten(1, 2)
    queries = call.queries.positions(_rank(call, call.queries), query.device)
    keys = call.keys.all_positions(query.device)
    if work.bias is not None:
        scores = scores + work.bias(queries, keys)
    seen = _seen(call, query.size(0), queries, keys)
    if seen is not None:
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    weights = _softmax(scores, sinks)
    if work.dropout is not None:
        weights = weights * _kept(work.dropout, query, call) * work.dropout.scale
    attended = torch.einsum("bkgst,bktd->bkgsd", weights.unflatten(1, (groups, -1)), wide(value)).flatten(1, 2)
    if seen is not None:
        attended = attended * seen.any(-1, keepdim=True)
    return attended.to(query.dtype)


def _collected(key: Tensor, value: Tensor, call: Call, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Keys and values of all slots, in rank order."""
    if call.keys.num_ranks == 1:
        return key, value
    gathered = [gather(message, call.axis, call.name) for message in call.source.messages(key, value, inputs)]
    number = call.keys.padded_length
    return call.source.key_value(gathered, torch.arange(number, device=key.device), Run(0, number, ()))


def _rank(call: Call, layout: Layout) -> int:
    """This rank in a layout, which may be that of tokens that every rank has whole."""
    return call.axis.rank if layout.num_ranks > 1 else 0


def _seen(call: Call, num_sequences: int, queries: Tensor, keys: Tensor) -> Tensor | None:
    """Which queries see which keys: bool [B or 1, H or 1, S, T]; None where all see all."""
    mask, layout = call.work.mask, call.keys
    is_padded = layout.padded_length > layout.length
    if mask == Full() and not is_padded:
        return None
    rows = [mask.pairs(row, queries, keys) for row in range(num_sequences if mask.num_rows else 1)]
    seen = torch.stack([row if row.dim() == 3 else row[None] for row in rows])
    if is_padded:
        real = torch.zeros(layout.padded_length, dtype=torch.bool, device=keys.device)
        for piece in layout.all_pieces():
            real[piece.slot : piece.slot + len(piece)] = True
        seen = seen & real
    return seen


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).view(-1, 1, 1).expand(scores.size(0), -1, scores.size(2), 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def _kept(dropout: Site, query: Tensor, call: Call) -> Tensor:
    """Attention weights that are kept: bool [B, H, S, T]."""
    num_sequences, heads, size, _ = query.shape
    own, others = call.queries.pieces(_rank(call, call.queries)), tuple(_joined(call.keys.all_pieces()))
    drawn = [
        [keep_weights(dropout, range(num_sequences), piece, other, heads, query.device) for other in others]
        for piece in own
    ]
    if len(own) == len(others) == 1 and (len(own[0]), len(others[0])) == (size, call.keys.padded_length):
        return drawn[0][0]
    kept = torch.ones(num_sequences, heads, size, call.keys.padded_length, dtype=torch.bool, device=query.device)
    for piece, parts in zip(own, drawn, strict=True):
        for other, part in zip(others, parts, strict=True):
            kept[:, :, piece.slot : piece.slot + len(piece), other.slot : other.slot + len(other)] = part
    return kept


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Neighbours in memory and in the sequence become one."""
    last: Piece | None = None
    for piece in pieces:
        if last and piece.slot == last.slot + len(last) and piece.start == last.stop:
            last = Piece(last.slot, last.start, piece.stop)
            continue
        if last:
            yield last
        last = piece
    if last:
        yield last
