"""Kernels of CUDA against `math` in float64; skipped without a GPU."""

from dataclasses import replace

import pytest
import torch

import lss
from lss.attention.kernels import KERNELS, Needs, Operands
from lss.attention.kernels.math import MATH
from lss.masks import Causal, Documents, Window

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

CUDA = {kernel.name: kernel for kernel in KERNELS if kernel.device == "cuda"}
ERRORS = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 5e-3}  # of products in TF32 at worst


def operands(heads, keys, dtype, width, **given):
    shapes = [(2, heads[0], 300, width), (2, heads[1], keys, width), (2, heads[1], keys, width)]
    return Operands(*(torch.randn(shape, dtype=dtype, device="cuda") for shape in shapes), width**-0.5, **given)


def widened(given):
    wide = {name: getattr(given, name).double() for name in ("query", "key", "value")}
    return replace(given, **wide, bias=None if given.bias is None else given.bias.double())


def close(actual, expected, dtype):
    assert expected.abs().max() > 0
    assert (actual.double() - expected).abs().max() <= ERRORS[dtype] * expected.abs().max()


@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (6, 1)])
@pytest.mark.parametrize("kind", ["full", "causal", "mask", "bias"])
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("name", CUDA)
def test_a_block_as_math_computes_it(name, dtype, kind, heads, width):
    needs = Needs("cuda", dtype, kind == "mask", kind == "bias", head_width=width, value_width=width)
    if CUDA[name].refuses(needs):
        pytest.skip(CUDA[name].refuses(needs))
    torch.manual_seed(0)
    given = operands(heads, 300 if kind == "causal" else 500, dtype, width, is_causal=kind == "causal")
    if kind == "mask":
        pairs = torch.rand(heads[0], 300, 500, device="cuda") > 0.5
        pairs[1, 3] = False
        given = replace(given, mask=pairs)
    if kind == "bias":
        given = replace(given, bias=torch.randn(heads[0], 300, 500, device="cuda"))
    (output, rows), (expected, expected_rows) = CUDA[name].forward(given), MATH.forward(widened(given))
    sees_none = expected_rows == -torch.inf
    assert torch.equal(rows == -torch.inf, sees_none)
    close(rows[~sees_none], expected_rows[~sees_none], dtype)
    close(output[~sees_none], expected[~sees_none], dtype)
    total = torch.logaddexp(expected_rows, torch.randn_like(expected_rows)).masked_fill(sees_none, -torch.inf)
    whole, gradient = (torch.randn_like(expected).to(dtype) for _ in range(2))
    found = CUDA[name].backward(given, gradient, whole, total.float())
    wanted = MATH.backward(widened(given), gradient.double(), whole.double(), total)
    for actual, reference in zip(found[:3], wanted[:3], strict=True):
        close(actual, reference, dtype)


@pytest.mark.parametrize(
    "mask", [Causal(), Causal() & Window(100), Causal() & Documents((((0, 200), (200, 999)),) * 2)]
)
@pytest.mark.parametrize("dtype", ERRORS)
def test_the_whole_of_attention(dtype, mask):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 8, 999, 64, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3)]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    results = [lss.attention(*tensors, mask=mask), lss.attention(*exact, mask=mask, kernel="math")]
    close(*(result.detach() for result in results), dtype)
    gradient = torch.randn_like(results[1])
    found = torch.autograd.grad(results[0], tensors, gradient.to(dtype))
    for actual, reference in zip(found, torch.autograd.grad(results[1], exact, gradient), strict=True):
        close(actual, reference, dtype)
