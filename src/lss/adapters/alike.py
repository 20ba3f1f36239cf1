"""Whether what a model's code makes of tokens together is what it makes of them in two parts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_WITHIN = {torch.float64: 1e-6, torch.float32: 1e-4}
_WITHIN_16_BIT = 0.1


def alike(whole: Tensor, first: Tensor, second: Tensor, halves: tuple[int, int], *, may_count: bool) -> bool:
    """Whether the tensors agree; those that are no values of tokens do.

    Args:
        whole: Made of all tokens.
        first: Made in the same place of the first ones.
        second: Made of the others.
        halves: Numbers of the tokens of either part.
        may_count: Whether sums over tokens agree, as numbers of tokens of a kind.
    """
    if len({(part.dim(), part.dtype) for part in (whole, first, second)}) > 1:
        return True
    dims = [dim for dim, sizes in enumerate(zip(whole.shape, first.shape, second.shape, strict=True)) if _vary(sizes)]
    if not dims:
        same = _equal(whole[None], first[None]) and _equal(whole[None], second[None])
        return same or (may_count and _equal(whole[None], (first + second)[None]))
    if len(dims) > 1:
        return True  # of pairs of tokens
    number, *parts = (part.size(dims[0]) for part in (whole, first, second))
    for_each, rest = divmod(parts[1] - parts[0], halves[1] - halves[0])
    besides = parts[0] - for_each * halves[0]
    if rest or for_each < 1 or number != for_each * sum(halves) + besides:
        return True  # as many as values say
    if besides:
        return False  # some are left out, or others are among them
    return _of_tokens(whole, first, second, dims[0], halves) or (dims[0] == 0 and _same_rows(whole, first, second))


def _vary(sizes: tuple[int, ...]) -> bool:
    return len(set(sizes)) > 1


def _of_tokens(whole: Tensor, first: Tensor, second: Tensor, dim: int, halves: tuple[int, int]) -> bool:
    """Whether a dim is that of tokens, perhaps with others outside of it and inside, and they agree."""
    for outer in _divisors(whole.size(dim) // sum(halves)):
        pieces = [
            part.unflatten(dim, (outer, number, -1)).movedim(dim + 1, 0)
            for part, number in zip((whole, first, second), (sum(halves), *halves), strict=True)
        ]
        joined = torch.cat(pieces[1:])
        # rounding may send a token elsewhere in 16 bits: then those next to the middle tell
        places = slice(None) if not _is_coarse(whole) else slice(halves[0] - 1, halves[0] + 1)
        if _equal(pieces[0][places], joined[places]):
            return True
    return False


def _same_rows(whole: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether the rows are the same in any order, as those that an expert is given."""
    if not whole.numel():
        return True
    rows, others = (_flat(part) for part in (whole, torch.cat((first, second))))
    mixer = torch.randn(rows.size(1), 64, dtype=rows.dtype, generator=torch.Generator().manual_seed(0)).to(rows.device)
    enough = 0.5 if _is_coarse(whole) else 1.0  # rounding may send a token elsewhere in 16 bits
    shares = (
        _agree(one, other[_nearest(one @ mixer, other @ mixer)], _within(whole)).double().mean()
        for one, other in ((rows, others), (others, rows))
    )
    return all(share >= enough for share in shares)


def _nearest(rows: Tensor, others: Tensor) -> Tensor:
    """The row of the others [n, 64] that is next to each of [m, 64]: int64 [m]."""
    return torch.cat([torch.cdist(part, others).argmin(1) for part in rows.split(1024)])


def _divisors(number: int) -> Iterator[int]:
    return (outer for outer in range(1, number + 1) if number % outer == 0)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors [tokens, ...] agree, within a share of the largest value of each token."""
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    return bool(_agree(_flat(one), _flat(other), _within(one)).all())


def _flat(rows: Tensor) -> Tensor:
    """[rows, ...] as numbers [rows, n]."""
    return rows.reshape(len(rows), -1).double().nan_to_num(posinf=1e30, neginf=-1e30)


def _agree(one: Tensor, other: Tensor, within: float) -> Tensor:
    """Which rows [rows, n] agree: bool [rows]."""
    size = torch.maximum(one.abs(), other.abs()).amax(1)
    return (one - other).abs().amax(1) <= within * size


def _within(values: Tensor) -> float:
    """By how much of the largest value of a token it may differ: rounding, in its dtype."""
    if _is_coarse(values):
        return _WITHIN_16_BIT
    return _WITHIN.get(values.dtype, 0.0)


def _is_coarse(values: Tensor) -> bool:
    """Whether products that values come of are rounded to 16 bits."""
    cast = torch.is_autocast_enabled(values.device.type) and values.dtype == torch.float32
    return cast or (values.is_floating_point() and values.element_size() <= 2)
