"""What is measured: one strategy's forward and backward, ready to be called again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from lss.attention import attention
from lss.batch import shard
from lss.config import AttentionConfig
from lss.context import context_of
from lss.gradients import average_gradients
from lss.layout import Layout
from lss.ledger import Ledger
from lss.losses import count_tokens, token_mean_cross_entropy
from lss.masks import Causal, Full
from lss.models import GPT, GPTConfig
from lss.parallelize import parallelize


@dataclass(frozen=True)
class Measured:
    """One thing to time.

    Args:
        run: Forward and backward, on this rank.
        ledger: Counts what it sends.
        model: For the tracker of memory; None where there is none.
        optimizer: The same.
    """

    run: Callable[[], None]
    ledger: Ledger
    model: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None


@dataclass(frozen=True)
class AttentionShape:
    """The tensors of one call of attention: B sequences, H and K heads, D wide."""

    batch: int = 1
    heads: int = 8
    key_value_heads: int = 8
    head_width: int = 64
    causal: bool = True
    dtype: torch.dtype = torch.float32


def serial_attention(shape: AttentionShape, length: int, device: torch.device) -> Measured:
    """`scaled_dot_product_attention` of whole sequences."""
    query, key, value = _tensors(shape, length, device)
    gradient = torch.ones_like(query)

    def run() -> None:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=shape.causal, enable_gqa=True)
        output.backward(gradient)

    return Measured(run, Ledger())


def lss_attention(shape: AttentionShape, length: int, mesh: DeviceMesh, options: AttentionConfig) -> Measured:
    """`lss.attention` of this rank's segment."""
    rank, size = mesh.get_local_rank("sequence"), mesh["sequence"].size()
    layout, ledger = Layout.named(options.layout, length, size), Ledger()
    whole = _tensors(shape, length, torch.device(mesh.device_type))
    query, key, value = (
        layout.shard(part.detach(), rank, dim=2, fill=0).contiguous().requires_grad_() for part in whole
    )
    gradient, mask = torch.ones_like(query), Causal() if shape.causal else Full()
    how = {name: value for name, value in asdict(options).items() if name != "layout"}
    how["gather"] = "kv" if options.gather == "auto" else options.gather

    def run() -> None:
        output = attention(query, key, value, mask=mask, mesh=mesh, layout=layout, ledger=ledger, **how)
        output.backward(gradient)

    return Measured(run, ledger)


def serial_step(shape: GPTConfig, batch: int, length: int, device: torch.device) -> Measured:
    """Forward and backward of the plain model."""
    model, tokens = _model(shape, length, device), _tokens(shape, batch, length, device)

    def run() -> None:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()

    return Measured(run, Ledger(), model)


def lss_step(shape: GPTConfig, batch: int, length: int, mesh: DeviceMesh, options: AttentionConfig) -> Measured:
    """Forward, backward and averaging of the parallelized model."""
    device = torch.device(mesh.device_type)
    model = parallelize(_model(shape, length, device), mesh, **asdict(options))
    tokens = _tokens(shape, batch, length, device)
    part = shard({"tokens": tokens, "labels": tokens}, mesh, shift_labels=0, layout=options.layout)
    count = count_tokens(model, part["labels"])

    def run() -> None:
        logits = model(part["tokens"], segment=part["segment"])
        token_mean_cross_entropy(logits, part["labels"], count).backward()
        average_gradients(model)

    return Measured(run, context_of(model).ledger, model)


def _model(shape: GPTConfig, length: int, device: torch.device) -> GPT:
    torch.manual_seed(0)
    return GPT(replace(shape, max_length=length)).to(device)


def _tokens(shape: GPTConfig, batch: int, length: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(shape.vocabulary, (batch, length), generator=generator).to(device)


def _tensors(shape: AttentionShape, length: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (shape.heads, shape.key_value_heads, shape.key_value_heads)
    drawn = (torch.randn(shape.batch, h, length, shape.head_width, generator=generator) for h in heads)
    return [tensor.to(device, shape.dtype).requires_grad_() for tensor in drawn]
