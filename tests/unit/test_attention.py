"""Segments of attention put together equal torch's scaled_dot_product_attention of the whole."""

import pytest
import torch
from torch.nn import functional as F

from lss.attention import Work, attend, plan
from lss.attention.kernels import FLASH_CPU, MATH
from lss.layout import Layout
from tests.models import assert_same

KERNELS = pytest.mark.parametrize("kernel", [FLASH_CPU, MATH], ids=lambda kernel: kernel.name)


def inputs(length, heads, key_value_heads, dtype, width=8):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, width), (2, key_value_heads, length, width), (2, key_value_heads, length, width)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def by_segments(query, key, value, num_ranks, is_causal, kernel):
    """What N ranks compute, one after the other, and joined."""
    layout = Layout(query.size(2), num_ranks)
    padding = (0, 0, 0, layout.padded_length - layout.length)
    key, value = F.pad(key, padding), F.pad(value, padding)
    outputs = []
    for rank in range(num_ranks):
        segment = layout.shard(query, rank, dim=2, fill=0)
        tiles = plan(layout, rank, None, is_causal, kernel.max_queries)
        outputs.append(attend(segment, key, value, Work(tiles, kernel)))
    return layout.unshard(torch.cat(outputs, 2), dim=2)


@KERNELS
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("length", "num_ranks"), [(12, 1), (12, 3), (13, 4), (2, 3), (1, 2), (130, 2)])
@pytest.mark.parametrize(("heads", "key_value_heads"), [(4, 4), (6, 2), (3, 1)])
def test_equals_the_whole(kernel, is_causal, length, num_ranks, heads, key_value_heads):
    torch.manual_seed(0)
    tensors = inputs(length, heads, key_value_heads, torch.float64)
    expected = F.scaled_dot_product_attention(*tensors, is_causal=is_causal, enable_gqa=True)
    weight = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), tensors)
    actual = by_segments(*tensors, num_ranks, is_causal, kernel)
    gradients = torch.autograd.grad((actual * weight).sum(), tensors)
    assert_same(actual, expected, "output", 1e-12)
    for name, gradient, reference in zip(("query", "key", "value"), gradients, expected_gradients, strict=True):
        if length == 1 and name != "value":
            assert gradient.abs().max() < 1e-13  # one key: its weight is 1 whatever the scores
        else:
            assert_same(gradient, reference, name, 1e-12)


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_does_not_grow_with_ranks(kernel, dtype):
    tensors = inputs(96, 2, 2, dtype)
    exact = F.scaled_dot_product_attention(*(tensor.double() for tensor in tensors), is_causal=True)
    errors = [(by_segments(*tensors, n, True, kernel) - exact).abs().max().item() for n in (1, 2, 8)]
    assert errors[0] > 0
    assert max(errors) < 4 * errors[0]


def test_scale_is_used():
    tensors = inputs(6, 2, 2, torch.float64)
    expected = F.scaled_dot_product_attention(*tensors, is_causal=True, scale=0.7)
    actual = attend(*tensors, Work(plan(Layout(6, 1), 0, None, True), MATH, scale=0.7))
    assert_same(actual, expected, "output", 1e-12)
