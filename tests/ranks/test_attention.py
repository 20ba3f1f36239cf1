"""`lss.attention` over ranks against a dense softmax: a sample that covers the matrix.

`python benchmarks/attention_matrix.py` computes the full product.
"""

import random

import pytest
import torch
from torch.nn import functional as F

import lss
from lss.layout import Layout
from lss.masks import Causal, Documents, Full, Mask
from tests.dense import MASKS, Case, matrix, over_ranks, reference
from tests.models import assert_same

TOLERANCE = 1e-11


def compare(ranks, cases: list[Case]) -> None:
    """Outputs and gradients of every rank against the reference, relative to the reference's largest."""
    for together in (cases[start : start + 60] for start in range(0, len(cases), 60)):
        for case, *results in zip(together, *ranks.run(over_ranks, together[0].ranks, together), strict=True):
            expected = reference(case)
            for result in results:
                assert result.keys() == expected.keys()
                for name, tensor in expected.items():
                    scale = max(tensor.abs().max().item(), 1e-3)
                    assert (result[name] - tensor).abs().max().item() <= TOLERANCE * scale, (case, name)


def covering(num_ranks: int, number: int, **restricted: tuple) -> list[Case]:
    """A sample in which every value of every axis comes often."""
    every = list(matrix(ranks=(num_ranks,), **restricted))
    return random.Random(num_ranks).sample(every, number)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_masks_layouts_schedules_and_shapes(ranks, num_ranks):
    cases = covering(num_ranks, 120)
    for axis, values in {"mask": 12, "layout": 3, "gather": 2, "heads": 4, "width": 3, "length": 4}.items():
        assert len({getattr(case, axis) for case in cases}) == values
    compare(ranks, cases)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_biases_sinks_and_kernels(ranks, num_ranks):
    masks = ("full", "causal", "window", "documents", "dense")
    plain = covering(num_ranks, 100, mask=masks, width=(4,), length=(13, 5))
    drawn = random.Random(0)
    cases = [
        Case(
            *(getattr(case, name) for name in ("mask", "layout", "gather", "keep", "chunks", "ranks", "heads")),
            case.width,
            case.length,
            drawn.choice(["auto", "math"]),
            drawn.choice(["none", "alibi", "relative"]),
            drawn.choice([False, True]),
        )
        for case in plain
    ]
    compare(ranks, cases)


CROSS: dict[str, Mask] = {
    "full": Full(),
    "bottom right": Causal(17 - 9),
    "documents": Documents((((0, 4), (4, 9)), ((0, 9),)), (((0, 11), (11, 17)), ((3, 17),))),
}


def crossing(name: str, keep: bool, chunks: int) -> dict[str, torch.Tensor]:
    """Queries of 9 tokens in zigzag, keys of 17 in a row."""
    mesh = lss.init_mesh(3, device="cpu")
    rank = mesh.get_local_rank("sequence")
    layouts = {"query": Layout.zigzag(9, 3), "key": Layout.contiguous(17, 3), "value": Layout.contiguous(17, 3)}
    given = {n: layouts[n].shard(t, rank, dim=2, fill=0).requires_grad_() for n, t in cross_tensors().items()}
    output = lss.attention(
        *given.values(),
        mask=CROSS[name],
        mesh=mesh,
        layout=layouts["query"],
        key_layout=layouts["key"],
        keep=keep,
        chunks=chunks,
    )
    (output * layouts["query"].shard(torch.ones(2, 4, 9, 8), rank, dim=2, fill=0).cumsum(-1)).sum().backward()
    axis = lss.collectives.Axis.of(mesh, "sequence", lss.Ledger())
    found = {"output": (output.detach(), layouts["query"])} | {n: (t.grad, layouts[n]) for n, t in given.items()}
    return {
        n: layout.unshard(axis.all_gather(t.transpose(0, 2).contiguous(), layer=n, phase="step"), dim=0).transpose(0, 2)
        for n, (t, layout) in found.items()
    }


def cross_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"query": (4, 9), "key": (2, 17), "value": (2, 17)}
    return {n: torch.randn(2, *size, 8, dtype=torch.float64, generator=generator) for n, size in sizes.items()}


@pytest.mark.parametrize("name", CROSS)
@pytest.mark.parametrize(("keep", "chunks"), [(True, 1), (False, 1), (True, 2)])
def test_cross_attention(ranks, name, keep, chunks):
    given = {n: tensor.requires_grad_() for n, tensor in cross_tensors().items()}
    pairs = torch.stack([CROSS[name].pairs(row, torch.arange(9), torch.arange(17)) for row in range(2)])
    expected = F.scaled_dot_product_attention(*given.values(), attn_mask=pairs[:, None], enable_gqa=True)
    (expected * torch.ones(2, 4, 9, 8).cumsum(-1)).sum().backward()
    wanted = {"output": expected.detach()} | {n: tensor.grad for n, tensor in given.items()}
    for found in ranks.run(crossing, 3, name, keep, chunks):
        for n, tensor in wanted.items():
            assert_same(found[n], tensor, n, TOLERANCE)


def test_every_mask_differs_from_every_other():
    index = torch.arange(12)
    found = set()
    for _, sees in MASKS.values():
        rows = [sees(index[:, None], index[None], row, 12).view(12, 12) for row in (0, 1)]
        found.add(tuple(torch.stack(rows).flatten().tolist()))
    assert len(found) == len(MASKS)
