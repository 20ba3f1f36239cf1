"""Small models and batches that tests share, and a comparison that fails on zeros."""

import torch
from torch import Tensor, nn

from lss.models import GPT, GPTConfig


def tiny_gpt(length: int, dtype: torch.dtype = torch.float64, **changes: object) -> GPT:
    """A GPT of 2 layers whose table is as long as the sequence; the weights are large enough to matter."""
    torch.manual_seed(0)
    shape = {"width": 24, "layers": 2, "heads": 4, "vocabulary": 17, "max_length": length} | changes
    model = GPT(GPTConfig(**shape)).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


def tokens_and_labels(num_sequences: int, length: int, vocabulary: int = 17) -> tuple[Tensor, Tensor]:
    """Random tokens and labels [B, L], some labels ignored."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary, (num_sequences, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    if length > 3:
        labels[0, 1] = -100
    return tokens[:, :-1].contiguous(), labels


def assert_same(actual: Tensor, expected: Tensor, name: str, tolerance: float = 1e-10) -> None:
    """Equal to `tolerance` of the largest expected entry, which must not be zero."""
    assert actual.shape == expected.shape, name
    scale = expected.abs().max()
    assert scale > 0, f"{name}: the reference is all zeros"
    error = (actual - expected).abs().max() / scale
    assert error <= tolerance, f"{name}: relative error {error:.2e}"


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradient of every parameter."""
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
