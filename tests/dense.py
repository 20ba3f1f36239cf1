"""Dense softmax attention, the reference: every pair is looked at, by plain torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

import lss
from lss.bias import Alibi, RelativeBias
from lss.layout import Layout
from lss.masks import Causal, Dense, Documents, Full, Function, Mask, Padding, Prefix, Window

ROWS = 2


@dataclass(frozen=True)
class Case:
    """One point of the matrix."""

    mask: str
    layout: str
    gather: str
    keep: bool
    chunks: int
    ranks: int
    heads: tuple[int, int]
    width: int
    length: int
    kernel: str = "auto"
    bias: str = "none"
    sinks: bool = False
    strategy: str = "lss"


def documents(length: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Two sequences, cut differently, the second with padding at its end."""
    cut = max(1, length // 3)
    first = ((0, cut), (cut, length)) if length > 1 else ((0, length),)
    return first, ((0, max(1, length - 2)),)


# each mask, and the pairs it stands for as a function of query [S, 1], key [1, T] and sequence, written out again
MASKS: dict[str, tuple[Callable[[int], Mask], Callable[[Tensor, Tensor, int, int], Tensor]]] = {
    "full": (lambda n: Full(), lambda q, k, row, n: (q >= 0) & (k >= 0)),
    "causal": (lambda n: Causal(), lambda q, k, row, n: k <= q),
    "window": (lambda n: Window(2, 1), lambda q, k, row, n: (k >= q - 2) & (k <= q + 1)),
    "causal window": (lambda n: Causal() & Window(3, None), lambda q, k, row, n: (k <= q) & (q - k <= 3)),
    "prefix": (lambda n: Causal() | Prefix(n // 2), lambda q, k, row, n: (k <= q) | (k < n // 2)),
    "sink tokens": (
        lambda n: Causal() & (Window(2) | Prefix(1)),
        lambda q, k, row, n: (k <= q) & ((q - k <= 2) | (k < 1)),
    ),
    "documents": (lambda n: Causal() & Documents(documents(n)), lambda q, k, row, n: (k <= q) & same(q, k, row, n)),
    "documents, full": (lambda n: Documents(documents(n)), lambda q, k, row, n: same(q, k, row, n)),
    "padding": (
        lambda n: Padding(((((0, max(1, n - 2)),)), ((min(2, n - 1), n),))),
        lambda q, k, row, n: real(k, row, n) & (q >= 0),
    ),
    "function": (lambda n: Function(lambda q, k: (q + k) % 3 > 0), lambda q, k, row, n: (q + k) % 3 > 0),
    "dense": (lambda n: Dense(dense(n)), lambda q, k, row, n: dense(n)[row]),
    "prefixes": (lambda n: Prefix((1, n)) | Causal(), lambda q, k, row, n: (k <= q) | (k < (1, n)[row])),
}


def same(q: Tensor, k: Tensor, row: int, n: int) -> Tensor:
    number = torch.full((n,), -1)
    for index, (start, stop) in enumerate(documents(n)[row]):
        number[start:stop] = index
    return (number[q] == number[k]) & (number[q] >= 0)


def real(k: Tensor, row: int, n: int) -> Tensor:
    return k < max(1, n - 2) if row == 0 else k >= min(2, n - 1)


def dense(n: int) -> Tensor:
    return torch.rand(ROWS, 1, n, n, generator=torch.Generator().manual_seed(n)) > 0.4


def bias_of(name: str, heads: int) -> lss.bias.Bias | None:
    torch.manual_seed(3)
    if name == "alibi":
        return Alibi.of(heads)
    return RelativeBias(heads, 8, 6).double() if name == "relative" else None


def tensors(case: Case) -> dict[str, Tensor]:
    """Whole query, key, value, gradient of the output and sinks, in float64."""
    generator = torch.Generator().manual_seed(0)
    (heads, groups), shape = case.heads, (case.length, case.width)
    sizes = {"query": heads, "key": groups, "value": groups, "gradient": heads}
    found = {name: torch.randn(ROWS, h, *shape, dtype=torch.float64, generator=generator) for name, h in sizes.items()}
    return found | {"sinks": torch.randn(heads, dtype=torch.float64, generator=generator)}


def reference(case: Case) -> dict[str, Tensor]:
    """Output and gradients by softmax of all scores."""
    given = {name: tensor.clone().requires_grad_() for name, tensor in tensors(case).items()}
    heads, groups = case.heads
    key, value = (given[name].repeat_interleave(heads // groups, 1) for name in ("key", "value"))
    scores = given["query"] @ key.mT / case.width**0.5
    index = torch.arange(case.length)
    bias = bias_of(case.bias, heads)
    if bias is not None:
        scores = scores + bias(index, index)
    pairs = torch.stack([MASKS[case.mask][1](index[:, None], index[None], row, case.length) for row in range(ROWS)])
    scores = scores.masked_fill(~pairs[:, None].view(ROWS, 1, case.length, case.length), -torch.inf)
    if case.sinks:
        scores = torch.cat((scores, given["sinks"].view(1, -1, 1, 1).expand(ROWS, -1, case.length, 1)), -1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : case.length]
    output = weights @ value
    output.backward(given["gradient"])
    found = {"output": output.detach()} | {name: given[name].grad for name in ("query", "key", "value")}
    if case.sinks:
        found["sinks"] = given["sinks"].grad
    if case.bias == "relative":
        found["bias"] = bias.table.weight.grad
    return found


def over_ranks(cases: list[Case]) -> list[dict[str, Tensor]]:
    """The same by `lss.attention`, whole again, on every rank."""
    mesh = lss.init_mesh(cases[0].ranks, device="cpu")
    return [one(case, mesh) for case in cases]


def one(case: Case, mesh: object) -> dict[str, Tensor]:
    mask = MASKS[case.mask][0](case.length)
    if case.layout == "balanced":
        layout = Layout.balanced(case.length, case.ranks, list(range(1, case.length + 1)))
    else:
        layout = Layout.named(case.layout, case.length, case.ranks)
    rank = mesh.get_local_rank("sequence")
    whole = tensors(case)
    given = {
        name: layout.shard(whole[name], rank, dim=2, fill=0).requires_grad_() for name in ("query", "key", "value")
    }
    sinks = whole["sinks"].clone().requires_grad_() if case.sinks else None
    bias = bias_of(case.bias, case.heads[0])
    names = ("gather", "keep", "chunks", "kernel", "strategy")
    options = {name: getattr(case, name) for name in names}
    output = lss.attention(*given.values(), mask=mask, mesh=mesh, layout=layout, bias=bias, sinks=sinks, **options)
    output.backward(layout.shard(whole["gradient"], rank, dim=2, fill=0))
    found = {"output": output.detach()} | {name: tensor.grad for name, tensor in given.items()}
    axis = lss.collectives.Axis.of(mesh, "sequence", lss.Ledger())
    for name, part in found.items():
        gathered = axis.all_gather(part.transpose(0, 2).contiguous(), layer=name, phase="step")
        found[name] = layout.unshard(gathered, dim=0).transpose(0, 2)
    if sinks is not None:
        found["sinks"] = axis.all_reduce_(sinks.grad, layer="sinks", phase="step")
    if case.bias == "relative":
        found["bias"] = axis.all_reduce_(bias.table.weight.grad, layer="bias", phase="step")
    return found


def matrix(**restricted: tuple) -> Iterator[Case]:
    """The full product of the issue, or a restricted one."""
    axes = {
        "mask": tuple(MASKS),
        "layout": ("contiguous", "zigzag", "balanced"),
        "gather": ("kv", "separate"),
        "schedule": ((True, 1), (False, 1), (True, 2), (True, 3)),
        "ranks": (1, 2, 3, 4),
        "heads": ((8, 8), (8, 2), (6, 1), (3, 3)),
        "width": (4, 64, 80),
        "length": (12, 13, 3, 1),
    } | restricted
    for mask, layout, gather, (keep, chunks), ranks, heads, width, length in product(*axes.values()):
        yield Case(mask, layout, gather, keep, chunks, ranks, heads, width, length)
