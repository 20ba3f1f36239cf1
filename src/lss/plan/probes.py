"""What `lss calibrate` runs: operators as they come in a step, of shapes that are common there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lss.attention.kernels import KERNELS, Needs, Operands
from lss.plan.trace import Operator, Recorder

TOKENS, WIDTH, HEADS = 2048, 512, 8


@dataclass(frozen=True)
class Probe:
    """Some operators.

    Args:
        run: Runs them.
        flops: Their operations.
        moved: Bytes that they read and write.
        number: Of operators.
    """

    run: Callable[[], object]
    flops: float
    moved: float
    number: int


def _probe(run: Callable[[], object]) -> Probe:
    recorder = Recorder()
    with recorder.recording():
        run()
    operators = [event for event in recorder.trace.events if isinstance(event, Operator)]
    return Probe(run, sum(o.flops for o in operators), sum(o.moved for o in operators), len(operators))


def product_probes(device: torch.device, *, batched: bool) -> dict[str, Probe]:
    """Matrix products by dtype."""
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
    found = {}
    for name, dtype in kinds.items():
        tokens = TOKENS if name == "fp32" else TOKENS // 8  # some processors have no products of the others
        if batched:
            one = torch.ones(HEADS, tokens // 8, WIDTH // HEADS, dtype=dtype, device=device)
            other = torch.ones(HEADS, WIDTH // HEADS, TOKENS, dtype=dtype, device=device)
            found[name] = _probe(lambda one=one, other=other: torch.bmm(one, other))  # type: ignore[misc]
        else:
            x = torch.ones(tokens, WIDTH, dtype=dtype, device=device)
            weight = torch.ones(4 * WIDTH, WIDTH, dtype=dtype, device=device)
            gradient = torch.ones(tokens, 4 * WIDTH, dtype=dtype, device=device)
            found[name] = _probe(_linear(x, weight, gradient))
    return found


def _linear(x: Tensor, weight: Tensor, gradient: Tensor) -> Callable[[], object]:
    """The three products of a linear layer in a step."""
    return lambda: (x @ weight.t(), gradient @ weight, gradient.t() @ x)


def attention_probes(device: torch.device) -> tuple[dict[str, Probe], dict[str, Probe]]:
    """Forward and backward of the kernel that is taken by itself, in a block of many keys, by dtype."""
    forwards, backwards = {}, {}
    for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        needs = Needs(device.type, dtype, head_width=WIDTH // HEADS, value_width=WIDTH // HEADS)
        kernel = next(kernel for kernel in KERNELS if not kernel.refuses(needs))
        query = torch.randn(1, HEADS, 512, WIDTH // HEADS, device=device).to(dtype)
        key = torch.randn(1, HEADS, TOKENS // 2, WIDTH // HEADS, device=device).to(dtype)
        given = Operands(query, key, key, 0.1)
        output, log_sum_exp = kernel.forward(given)
        forwards[name] = _probe(lambda kernel=kernel, given=given: kernel.forward(given))  # type: ignore[misc]
        backwards[name] = _probe(_backward(kernel, given, output, log_sum_exp))
    return forwards, backwards


def _backward(kernel: Any, given: Operands, output: Tensor, log_sum_exp: Tensor) -> Callable[[], object]:
    return lambda: kernel.backward(given, torch.ones_like(output), output, log_sum_exp)


def pass_probes(device: torch.device) -> dict[str, Probe]:
    """Passes over memory by operator; `add` stands for all that are not named."""
    x = torch.randn(TOKENS, 4 * WIDTH, device=device)
    narrow, rows = (torch.randn(TOKENS, width, device=device) for width in (WIDTH, 256))
    weight = torch.ones(WIDTH, device=device)
    aten = torch.ops.aten
    _, mean, scale = aten.native_layer_norm(narrow, [WIDTH], weight, weight, 1e-5)
    logs = F.log_softmax(rows, -1)
    runs: dict[str, Callable[[], object]] = {
        "add": lambda: x + x,
        "mul": lambda: x * 2.0,
        "add_": lambda: x.add_(x, alpha=0.0),
        "copy_": lambda: torch.empty_like(x).copy_(x),
        "clone": lambda: x.t().clone(memory_format=torch.contiguous_format),
        "cat": lambda: torch.cat([narrow, narrow]),
        "sum": lambda: x.sum(0),
        "gelu": lambda: F.gelu(x, approximate="tanh"),
        "gelu_backward": lambda: aten.gelu_backward(x, x, approximate="tanh"),
        "silu": lambda: F.silu(x),
        "native_layer_norm": lambda: aten.native_layer_norm(narrow, [WIDTH], weight, weight, 1e-5),
        "native_layer_norm_backward": lambda: aten.native_layer_norm_backward(
            narrow, narrow, [WIDTH], mean, scale, weight, weight, [True, True, True]
        ),
        "_log_softmax": lambda: F.log_softmax(rows, -1),
        "_log_softmax_backward_data": lambda: aten._log_softmax_backward_data(logs, logs, -1, torch.float32),
        "_softmax": lambda: rows.softmax(-1),
        "lerp_": lambda: x.lerp_(x, 0.5),
        "masked_fill": lambda: x.masked_fill(x > 1e9, 0.0),
        "zeros_like": lambda: torch.zeros_like(x),
    }
    return {name: _probe(run) for name, run in runs.items()}


def host_seconds(device: torch.device) -> float:
    """Of the host for one operator of a step: forward and backward of a layer on next to nothing."""
    weight = torch.ones(8, 8, device=device, requires_grad=True)
    x = torch.ones(2, 8, device=device)

    def step() -> None:
        weight.grad = None
        F.layer_norm(F.gelu(x @ weight) + x, (8,)).sum().backward()

    number = _probe(step).number
    found = []
    for _ in range(50):
        started = time.perf_counter()
        step()
        found.append(time.perf_counter() - started)
    return median(found) / number
