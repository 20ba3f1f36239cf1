"""`lss.attention` over ranks against a dense softmax: a sample that covers the matrix.

`python -m benchmarks.attention_matrix` computes the full product.
"""

import random
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional as F

import lss
from lss.attention.kernels import choice
from lss.attention.kernels.flash_cpu import FLASH_CPU
from lss.bias import RelativeBias
from lss.errors import KernelError
from lss.layout import Layout
from lss.masks import Causal, Documents, Full, Mask, Window
from lss.models.gpt import Attention
from lss.state import full_gradients
from tests.dense import MASKS, Case, matrix, over_ranks, reference
from tests.models import assert_same, tiny_gpt, tokens_and_labels

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
            drawn.choice(["auto", "math", "stored"]),
            drawn.choice(["none", "alibi", "relative"]),
            drawn.choice([False, True]),
        )
        for case in plain
    ]
    compare(ranks, cases)


def rivals(num_ranks: int) -> list[Case]:
    """Of each, a sample of what its method takes."""
    generator, found = random.Random(num_ranks), []
    by_heads = tuple(heads for heads in ((8, 8), (8, 2), (6, 1), (3, 3), (12, 4)) if heads[0] % num_ranks == 0)
    in_order = {"mask": tuple(name for name in MASKS if name in CAUSAL), "layout": ("contiguous",)}
    for strategy, restricted in (("ring", {}), ("ulysses", {"heads": by_heads}), ("lightseq", in_order)):
        for case in covering(num_ranks, 24, schedule=((True, 1),), width=(4, 64), **restricted):
            bias = generator.choice(["none", "alibi", "relative"]) if case.length > 3 else "none"  # its gradient is 0
            kernel = generator.choice(["auto", "math", "stored"] if strategy == "ulysses" else ["auto", "math"])
            sinks = generator.choice([False, True])
            found.append(replace(case, strategy=strategy, bias=bias, kernel=kernel, sinks=sinks))
    return found


CAUSAL = ("causal", "causal window", "sink tokens", "documents")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_rivals(ranks, num_ranks):
    compare(ranks, rivals(num_ranks))


CROSS: dict[str, Mask] = {
    "full": Full(),
    "bottom right": Causal(17 - 9),
    "documents": Documents((((0, 4), (4, 9)), ((0, 9),)), (((0, 11), (11, 17)), ((3, 17),))),
}


def crossing(name: str, keep: bool, chunks: int, kernel: str) -> dict[str, torch.Tensor]:
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
        kernel=kernel,
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
@pytest.mark.parametrize(
    ("keep", "chunks", "kernel"), [(True, 1, "auto"), (False, 1, "auto"), (True, 2, "auto"), (True, 1, "stored")]
)
def test_cross_attention(ranks, name, keep, chunks, kernel):
    given = {n: tensor.requires_grad_() for n, tensor in cross_tensors().items()}
    pairs = torch.stack([CROSS[name].pairs(row, torch.arange(9), torch.arange(17)) for row in range(2)])
    expected = F.scaled_dot_product_attention(*given.values(), attn_mask=pairs[:, None], enable_gqa=True)
    (expected * torch.ones(2, 4, 9, 8).cumsum(-1)).sum().backward()
    wanted = {"output": expected.detach()} | {n: tensor.grad for n, tensor in given.items()}
    for found in ranks.run(crossing, 3, name, keep, chunks, kernel):
        for n, tensor in wanted.items():
            assert_same(found[n], tensor, n, TOLERANCE)


class Odd(Attention):
    """An attention layer that says all that a layer may say; its own forward is written out."""

    def forward(self, x, positions):
        query = self.project_query(x, positions)
        key, value = self.project_key_value(x, positions)
        index = torch.arange(x.size(1))
        scores = query @ key.mT * self.scale + self.bias(index, index)
        distance = index[:, None] - index
        scores = scores.masked_fill((distance < 0) | (distance > 4), -torch.inf)
        sinks = self.sinks.view(1, -1, 1, 1).expand(x.size(0), -1, x.size(1), 1)
        return self.project_output(torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ value)


def odd_gpt():
    model = tiny_gpt(13)
    for block in model.blocks:
        layer = block.attention
        layer.__class__ = Odd
        layer.mask, layer.scale = Causal() & Window(4), 0.3
        layer.bias = RelativeBias(4, 8, 6).double()
        layer.sinks = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))
    return model


def run_odd(gather: str, kernel: str) -> dict[str, torch.Tensor]:
    mesh = lss.init_mesh(2, device="cpu")
    model = lss.parallelize(odd_gpt(), mesh, gather=gather, kernel=kernel)
    tokens, labels = tokens_and_labels(2, 13)
    batch = lss.shard({"tokens": tokens, "labels": labels}, mesh, shift_labels=0)
    logits = model(batch["tokens"], segment=batch["segment"])
    count = lss.count_tokens(model, batch["labels"])
    lss.token_mean_cross_entropy(logits, batch["labels"], count).backward()
    lss.average_gradients(model)
    return full_gradients(model)


@pytest.mark.parametrize("kernel", ["auto", "stored"])
@pytest.mark.parametrize("gather", ["x", "kv", "separate"])
def test_what_a_layer_says_is_honoured(ranks, gather, kernel):
    model = odd_gpt()
    tokens, labels = tokens_and_labels(2, 13)
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100).backward()
    for found in ranks.run(run_odd, 2, gather, kernel):
        for name, weight in model.named_parameters():
            assert_same(found[name], weight.grad, name)


def narrow_values() -> torch.Tensor:
    mesh = lss.init_mesh(2, device="cpu")
    layout, rank = Layout.zigzag(9, 2), mesh.get_local_rank("sequence")
    whole = torch.arange(216.0).view(3, 1, 2, 9, 4).sin()
    query, key, value = (layout.shard(part, rank, dim=2, fill=0) for part in whole)
    output = lss.attention(query, key, value[..., :3], mesh=mesh, layout=layout)
    axis = lss.collectives.Axis.of(mesh, "sequence", lss.Ledger())
    gathered = axis.all_gather(output.transpose(0, 2).contiguous(), layer="output", phase="step")
    return layout.unshard(gathered, dim=0).transpose(0, 2)


def test_values_of_another_width(ranks):
    query, key, value = torch.arange(216.0).view(3, 1, 2, 9, 4).sin()
    expected = F.scaled_dot_product_attention(query, key, value[..., :3])
    for found in ranks.run(narrow_values, 2):
        assert_same(found, expected, "output", 1e-5)


def forced(rank_of_kernel: str) -> str:
    """A kernel that takes no masks, forced where only some ranks have a block that a mask cuts through."""
    maskless = replace(FLASH_CPU, name=rank_of_kernel, cannot=lambda needs: "it takes no mask" if needs.masks else "")
    mesh = lss.init_mesh(4, device="cpu")
    tensors = [torch.zeros(1, 1, 1024, 8) for _ in range(3)]
    with patch.object(choice, "KERNELS", (maskless, choice.MATH)), pytest.raises(KernelError) as raised:
        lss.attention(*tensors, mask=Causal() & Window(1024), mesh=mesh, kernel=rank_of_kernel)
    return str(raised.value)


def test_a_forced_kernel_is_refused_on_all_ranks_or_none(ranks):
    assert all("it takes no mask" in said for said in ranks.run(forced, 4, "flash"))


def test_every_mask_differs_from_every_other():
    index = torch.arange(12)
    found = set()
    for _, sees in MASKS.values():
        rows = [sees(index[:, None], index[None], row, 12).view(12, 12) for row in (0, 1)]
        found.add(tuple(torch.stack(rows).flatten().tolist()))
    assert len(found) == len(MASKS)
