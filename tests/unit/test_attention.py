"""Kernels against each other and torch, what they refuse, biases against their sources."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

import lss
from lss.attention import Schedule
from lss.bias import Alibi, DenseBias, RelativeBias
from lss.errors import KernelError, LayoutError, MaskError
from lss.layout import Layout
from lss.masks import Causal, Dense, Documents, Full, Function, Padding, Prefix, Window
from tests.models import assert_same


def inputs(length, heads=4, key_value_heads=4, dtype=torch.float64, width=8):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, width), (2, key_value_heads, length, width), (2, key_value_heads, length, width)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("kernel", ["flash", "math"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [1, 7, 700])
def test_one_rank_is_torchs_function(kernel, is_causal, length):
    tensors = inputs(length, 6, 2)
    expected = F.scaled_dot_product_attention(*tensors, is_causal=is_causal, enable_gqa=True, scale=0.7)
    actual = lss.attention(*tensors, mask=Causal() if is_causal else None, kernel=kernel, scale=0.7)
    assert_same(actual, expected, "output", 1e-12)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), tensors)
    for name, gradient, reference in zip(
        ("query", "key", "value"), torch.autograd.grad((actual * weight).sum(), tensors), wanted, strict=True
    ):
        if length == 1 and name != "value":
            assert gradient.abs().max() < 1e-13  # one key: its weight is 1 whatever the scores
        else:
            assert_same(gradient, reference, name, 1e-12)


@pytest.mark.parametrize("kernel", ["flash", "math"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_blocks_cost_no_precision(kernel, dtype):
    tensors = inputs(1000, dtype=dtype)
    exact = F.scaled_dot_product_attention(*(tensor.double() for tensor in tensors), is_causal=True)
    torchs = F.scaled_dot_product_attention(*tensors, is_causal=True)
    errors = [
        (found - exact).abs().max().item() for found in (torchs, lss.attention(*tensors, mask=Causal(), kernel=kernel))
    ]
    assert 0 < errors[1] <= 2 * errors[0]


# ways in which the numbers of a tensor [B, H, L, D] lie in memory
STRIDES = {
    "transposed": lambda part: part.mT.contiguous().mT,
    "interleaved": lambda part: torch.stack((part, part, part), -1)[..., 1],
    "reversed in batch and length": lambda part: part.transpose(0, 2).contiguous().transpose(0, 2),
}


@pytest.mark.parametrize("lie", STRIDES)
@pytest.mark.parametrize("kernel", ["flash", "math"])
def test_tensors_may_lie_in_memory_as_they_do(kernel, lie):
    tensors = inputs(9)
    weight = torch.randn(2, 4, 9, 8, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(*tensors, is_causal=True)
    actual = lss.attention(*map(STRIDES[lie], tensors), mask=Causal(), kernel=kernel)
    assert_same(actual, expected, "output", 1e-12)
    found, wanted = (torch.autograd.grad(output, tensors, STRIDES[lie](weight)) for output in (actual, expected))
    for name, gradient, reference in zip(("query", "key", "value"), found, wanted, strict=True):
        assert_same(gradient, reference, name, 1e-12)


@pytest.mark.parametrize("kernel", ["flash", "math"])
def test_a_dense_bias_hides_pairs(kernel):
    tensors = inputs(600)
    hidden = torch.full((600, 600), -torch.inf, dtype=torch.float64).triu(1) + torch.randn(600, 600).double()
    hidden[5] = -torch.inf  # a query that sees nothing
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=hidden).nan_to_num(0.0)
    actual = lss.attention(*tensors, bias=DenseBias(hidden), kernel=kernel)
    assert_same(actual, expected, "output", 1e-12)
    weight = torch.randn_like(expected)
    visible = [0, *range(1, 5), *range(6, 600)]
    wanted = F.scaled_dot_product_attention(tensors[0][:, :, visible], *tensors[1:], attn_mask=hidden[visible])
    pairs = (actual, weight), (wanted, weight[:, :, visible])
    found, references = (torch.autograd.grad(output, tensors, given) for output, given in pairs)
    for name, gradient, reference in zip(("query", "key", "value"), found, references, strict=True):
        assert_same(gradient, reference, name, 1e-12)


def test_a_dense_mask_may_be_changed_in_place():
    tensors, seen = inputs(8), torch.ones(8, 8).bool()
    mask = Dense(seen)
    first = lss.attention(*tensors, mask=mask)
    seen.tril_()
    assert_same(lss.attention(*tensors, mask=mask), lss.attention(*tensors, mask=Causal()), "output", 1e-12)
    assert not torch.equal(first, lss.attention(*tensors, mask=mask))


def test_autocast_costs_no_precision():
    tensors = inputs(64, dtype=torch.bfloat16)
    expected = lss.attention(*tensors, mask=Causal(), kernel="math")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(lss.attention(*tensors, mask=Causal(), kernel="math"), expected)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32, torch.bfloat16), (torch.float64,) * 3])
def test_autocast_is_that_of_torch(dtypes):
    tensors = [tensor.to(dtype) for tensor, dtype in zip(inputs(64), dtypes, strict=True)]
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = lss.attention(*tensors, mask=Causal()), F.scaled_dot_product_attention(*tensors, is_causal=True)
    assert found.dtype == wanted.dtype
    assert_same(found, wanted, "output", 1e-12 if wanted.dtype == torch.float64 else 2**-7)


def test_sinks_of_nothing():
    tensors = inputs(4)
    nothing = torch.full((4,), -torch.inf, dtype=torch.float64, requires_grad=True)
    output = lss.attention(*tensors, mask=Padding((((1, 3),), ())), sinks=nothing)
    assert output[1].abs().max() == 0
    assert all(part.isfinite().all() for part in torch.autograd.grad(output.sum(), [*tensors, nothing]))


def test_alibi_counts_distances_to_both_sides():
    index = torch.arange(5)
    slopes = torch.tensor([2.0 ** -(8 * head / 4) for head in (1, 2, 3, 4)], dtype=torch.float64)
    wanted = torch.tensor([[-abs(i - j) for j in range(5)] for i in range(5)]) * slopes.view(4, 1, 1)
    assert_same(Alibi.of(4)(index, index), wanted, "bias", 1e-15)


def test_padding_of_a_mask():
    assert Padding.of(torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0]])) == Padding((((1, 3), (4, 5)), ()))


def test_chunks_are_never_kept():
    assert Schedule(keep=True).keeps
    assert not Schedule(keep=True, chunks=2).keeps


def test_values_of_another_width():
    query, key, _ = inputs(9)
    value = torch.randn(2, 4, 9, 5, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert_same(lss.attention(query, key, value, mask=Causal()), expected, "output", 1e-12)


def test_alibi_is_that_of_bloom():
    for heads in (4, 8, 12):
        mask = torch.ones(1, 9)
        theirs = build_alibi_tensor(mask, heads, torch.float64).view(heads, 1, 9)
        index = torch.arange(9)
        ours = Alibi.of(heads)(index, index)
        row = ours[:, -1:, :]  # the last query's distances; theirs counts from the first key, a constant apart
        assert_same(row - row[..., :1], theirs - theirs[..., :1], f"{heads} heads", 1e-6)


@pytest.mark.parametrize("is_bidirectional", [True, False])
def test_relative_bias_is_that_of_t5(is_bidirectional):
    offsets = torch.arange(-400, 401)
    theirs = T5Attention._relative_position_bucket(offsets, is_bidirectional, 32, 128)
    ours = RelativeBias(4, is_bidirectional=is_bidirectional).buckets(offsets)
    assert torch.equal(ours, theirs)


def test_flops_are_those_of_the_mask():
    """Counted by torch, forward and backward, of the operator that it does not know by its own formula."""
    aten = torch.ops.aten
    known = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **others: sdpa_flop_count(*shapes[:3]),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda *shapes, **others: sdpa_backward_flop_count(*shapes[:4])
        ),
    }
    length, tensors = 2048, inputs(2048, 1, 1, torch.float32, 8)
    areas = {Full(): length**2, Causal(): length**2 / 2, Causal() & Window(511): length * 512 - 512**2 / 2}
    counted = []
    for mask, area in areas.items():
        with FlopCounterMode(display=False, custom_mapping=known) as counter:
            lss.attention(*tensors, mask=mask).sum().backward()
        counted.append(counter.get_total_flops() / area)
    assert counted[0] > 0
    assert max(counted) <= 1.1 * counted[0]


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(part, torch.Tensor):
                self.largest = max(self.largest, part.numel())
        return result


@pytest.mark.parametrize(
    "mask", [Causal(), Causal() & Window(300), Window(100, 100), Documents((((0, 900), (900, 2048)),) * 2)]
)
def test_no_tensor_of_all_pairs_exists(mask):
    tensors = inputs(2048, 1, 1, torch.float32)
    with Sizes() as seen:
        lss.attention(*tensors, mask=mask).sum().backward()
    assert seen.largest <= 2048 * 2 * 8  # a query


REFUSALS = {
    "it gives a bias no gradient": lambda q, k, v: lss.attention(q, k, v, bias=RelativeBias(4), kernel="flash"),
    "keys and values of one width": lambda q, k, v: lss.attention(q, k, v[..., :3], kernel="flash"),
    "attention.kernel = 'flesh'": lambda q, k, v: lss.attention(q, k, v, kernel="flesh"),
    "'cudnn': it runs on cuda, and tensors are on cpu": lambda q, k, v: lss.attention(q, k, v, kernel="cudnn"),
    "a bias without a rule for positions": lambda q, k, v: lss.attention(q, k, v, bias=torch.zeros(4, 6, 6)),
    "padding of 3 sequences in a batch of 2": lambda q, k, v: lss.attention(
        q, k, v, mask=Padding((((0, 1),), ((0, 2),), ()))
    ),
    "documents of 3 sequences in a batch of 2": lambda q, k, v: lss.attention(
        q, k, v, mask=Documents((((0, 6),),) * 3)
    ),
    "prefixes of 3 sequences": lambda q, k, v: lss.attention(q, k, v, mask=Causal() | Prefix((1, 2, 3))),
    "spans up to 7 in sequences of 6 tokens": lambda q, k, v: lss.attention(q, k, v, mask=Documents((((0, 7),),) * 2)),
    "in order, none over another": lambda q, k, v: Documents((((3, 6), (0, 3)),)),
    "spans ((0, 4), (3, 6))": lambda q, k, v: Padding((((0, 4), (3, 6)),)),
    "spans of no sequence": lambda q, k, v: Documents(()),
    "a dense mask of shape (4, 4) for 6 queries": lambda q, k, v: lss.attention(
        q, k, v, mask=Dense(torch.ones(4, 4) > 0)
    ),
    "a dense bias of shape (4, 4) for 6 queries": lambda q, k, v: lss.attention(
        q, k, v, bias=DenseBias(torch.ones(4, 4))
    ),
    "a mask function that returns torch.float32": lambda q, k, v: lss.attention(
        q, k, v, mask=Function(lambda a, b: torch.where(b <= a, 0.0, -torch.inf))
    ),
    "Tensor as a mask": lambda q, k, v: lss.attention(q, k, v, mask=torch.ones(6, 6).bool()),
    "Causal as a mask": lambda q, k, v: lss.attention(q, k, v, mask=Causal),
    "str as a mask": lambda q, k, v: Causal() & "causal",
    "is no parameter of it": lambda q, k, v: lss.attention(q, k, v, bias=RelativeBias(4).double().forward),
    "a bias of shape (3, 2, 3)": lambda q, k, v: lss.attention(q, k, v, bias=Alibi.of(3)),
    "a bias that returns torch.float64 (2, 3)": lambda q, k, v: lss.attention(
        q, k, v, bias=lambda a, b: (a[:, None] - b).double()
    ),
    "a bias that returns torch.int64": lambda q, k, v: lss.attention(q, k, v, bias=lambda a, b: (a[:, None] - b)[None]),
    "slopes for 0 heads": lambda q, k, v: Alibi.of(0),
    "8 buckets up to a distance of 2": lambda q, k, v: RelativeBias(4, 8, 2),
    "sinks of shape (3,)": lambda q, k, v: lss.attention(q, k, v, sinks=torch.zeros(3)),
    "['torch.int64', 'torch.int64', 'torch.int64']": lambda q, k, v: lss.attention(q.long(), k.long(), v.long()),
    "'torch.complex128'": lambda q, k, v: lss.attention(*(part + 0j for part in (q, k, v))),
    "(2, 4, 6, 0)]": lambda q, k, v: lss.attention(q, k, v[..., :0]),
    "query, key and value of shapes [(4,), (4,), (4,)]": lambda q, k, v: lss.attention(*[torch.zeros(4)] * 3),
    "spans that hold every token once": lambda q, k, v: Layout(6, (((0, 4),), ((3, 6),))),
    "a mask for 2 of 4 heads": lambda q, k, v: lss.attention(q, k, v, mask=Dense(torch.ones(2, 2, 6, 6).bool())),
    "a dense mask of torch.float64": lambda q, k, v: Dense(torch.zeros(6, 6).double()),
    "a dense bias of torch.int64": lambda q, k, v: DenseBias(torch.zeros(6, 6).long()),
    "a window of -1": lambda q, k, v: Window(-1),
    "a padding mask of shape (3,)": lambda q, k, v: Padding.of(torch.ones(3)),
    "query, key and value of shapes": lambda q, k, v: lss.attention(q, k[:, :3], v[:, :3]),
    "['torch.float64', 'torch.float32', 'torch.float64']": lambda q, k, v: lss.attention(q, k.float(), v),
    "a query of 6 slots": lambda q, k, v: lss.attention(q, k, v, layout=Layout.contiguous(7, 1)),
    "gather='x'": lambda q, k, v: lss.attention(q, k, v, gather="x"),
    "chunks=0": lambda q, k, v: lss.attention(q, k, v, chunks=0),
    "padding of 3 sequences": lambda q, k, v: lss.attention(
        q, k, v, mask=Padding((((0, 1),), ())) & Padding((((0, 1),), (), ()))
    ),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_cannot_be_done_is_refused(message):
    with pytest.raises((KernelError, MaskError, LayoutError, lss.LssError)) as raised:
        REFUSALS[message](*inputs(6))
    assert message in str(raised.value)
    assert "allowed" in str(raised.value)
