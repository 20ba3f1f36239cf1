"""Kernels of CUDA without a GPU: values on the CPU against `math`, shapes on fake tensors of CUDA, what is refused."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention

from lss.attention.kernels import KERNELS, Needs, Operands, choose, flex, why
from lss.attention.kernels.math import MATH
from lss.errors import KernelError
from tests.cuda_operators import cuda_operators_on_cpu
from tests.models import assert_same

CUDA = {kernel.name: kernel for kernel in KERNELS if kernel.device == "cuda"}
QUERIES, KEYS, WIDTH = 37, 50, 16


def operands(heads=(4, 4), keys=KEYS, dtype=torch.float32, device="cpu", **given):
    shapes = [(2, heads[0], QUERIES, WIDTH), (2, heads[1], keys, WIDTH), (2, heads[1], keys, WIDTH)]
    query, key, value = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
    return Operands(query, key, value, 0.3, **given)


def mask():
    pairs = torch.rand(4, QUERIES, KEYS) > 0.5
    pairs[1, 3] = False  # a query that sees no key
    return pairs


CASES = {
    "full": {},
    "grouped": {"heads": (4, 2)},
    "one for all": {"heads": (4, 1)},
    "causal": {"keys": QUERIES, "is_causal": True},
    "mask": {"mask": True},
    "bias": {"bias": True},
    "mask, bias, grouped": {"mask": True, "bias": True, "heads": (4, 2)},
}


def block(case):
    torch.manual_seed(0)
    given = dict(CASES[case])
    if "mask" in given:
        given["mask"] = mask()
    if "bias" in given:
        given["bias"] = torch.randn(4, QUERIES, KEYS)
    return operands(**given)


@pytest.fixture
def on_cpu():
    with (
        cuda_operators_on_cpu(),
        patch.object(flex_attention, "_validate_device", lambda *tensors: None),
        patch.object(flex, "_compiled", lambda: flex_attention.flex_attention),  # scores stored, by torch itself
    ):
        yield


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name in CUDA for case in CASES if name != "flash" or not {"mask", "bias"} & set(CASES[case])],
)
def test_a_block_as_math_computes_it(name, case, on_cpu):
    given = block(case)
    (output, rows), (expected, expected_rows) = (kernel.forward(given) for kernel in (CUDA[name], MATH))
    sees_none = expected_rows == -torch.inf
    assert torch.equal(rows == -torch.inf, sees_none)
    assert_same(rows[~sees_none], expected_rows[~sees_none], "log-sum-exp", 1e-5)
    assert_same(output[~sees_none], expected[~sees_none], "output", 1e-5)
    # a block's gradients are those of all keys: of an output and a log-sum-exp which other keys have changed
    total = torch.logaddexp(expected_rows, torch.randn_like(expected_rows)).masked_fill(sees_none, -torch.inf)
    whole, gradient = torch.randn_like(expected), torch.randn_like(expected)
    found, wanted = (kernel.backward(given, gradient, whole, total)[:3] for kernel in (CUDA[name], MATH))
    for part, actual, reference in zip(("query", "key", "value"), found, wanted, strict=True):
        assert_same(actual, reference, f"gradient of {part}", 1e-4)


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_torchs_operators_take_what_they_are_given(name, heads):
    with FakeTensorMode():
        given = operands(heads, dtype=torch.bfloat16, device="cuda:0")
        output, rows = CUDA[name].forward(given)
        assert (output.shape, rows.shape) == (given.query.shape, given.query.shape[:3])
        gradients = CUDA[name].backward(given, output, output, rows)
        assert [part.shape for part in gradients[:3]] == [given.query.shape, given.key.shape, given.value.shape]


NEEDS = Needs("cuda", torch.bfloat16)
CHOSEN = {
    "flash": NEEDS,
    "efficient": replace(NEEDS, masks=True),
    "efficient ": replace(NEEDS, dtype=torch.float32),
    "flex": replace(NEEDS, head_width=20, value_width=20),
    "flex ": replace(NEEDS, biases=True, head_width=64, value_width=32),
    "math": replace(NEEDS, dtype=torch.float64),
    "math ": replace(NEEDS, drops_weights=True),
    "math  ": replace(NEEDS, biases=True, learns_bias=True),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_the_kernel_that_auto_takes(name):
    assert choose("auto", CHOSEN[name]).name == name.strip()


REFUSED = {
    "flash": (replace(NEEDS, masks=True), "it takes no mask but the causal one"),
    "flash ": (replace(NEEDS, dtype=torch.float32), "it takes float16 and bfloat16, not torch.float32"),
    "cudnn": (replace(NEEDS, head_width=256, value_width=256), "it takes heads up to 128 wide, and these are 256"),
    "efficient": (replace(NEEDS, head_width=20, value_width=20), "whose width is a multiple of 8, and these are 20"),
    "flex": (replace(NEEDS, drops_weights=True), "it cannot drop attention weights"),
    "efficient ": (replace(NEEDS, device_type="cpu"), "it runs on cuda, and tensors are on cpu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_forced_kernel_says_what_it_cannot_do(name):
    needs, reason = REFUSED[name]
    with pytest.raises(KernelError, match=reason):
        choose(name.strip(), needs)


def test_why_faster_kernels_were_not_taken():
    needs = replace(NEEDS, masks=True)
    assert why(choose("auto", needs), needs) == "efficient (flash: it takes no mask but the causal one, and no bias)"
