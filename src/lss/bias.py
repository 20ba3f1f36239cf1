"""What attention adds to its scores: functions of global positions, one value a head, query and key.

A bias is any callable that takes the positions of some queries and keys, int64 [S] and [T], and returns [H, S, T] (or
[1, S, T] for all heads alike). If it is an nn.Module, its parameters are learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lss.errors import MaskError

Bias = Callable[[Tensor, Tensor], Tensor]


def is_rule(bias: object) -> bool:
    """Whether it can be asked for the values at any positions."""
    return callable(bias) and not isinstance(bias, Tensor)


def require_bias(bias: Any, num_heads: int, num_queries: int, num_keys: int) -> None:
    """Raise MaskError unless it is a bias of so many heads, whose gradient reaches parameters that are known.

    Args:
        bias: Any callable; it is asked for two queries and three keys.
        num_heads: H.
        num_queries: Of the whole sequence.
        num_keys: Of the whole sequence.
    """
    if not is_rule(bias):
        raise MaskError(
            f"a bias without a rule for positions: a {type(bias).__name__}",
            allowed="a function of the positions of queries and keys, such as those of lss.bias",
            remedy="wrap a whole tensor [H, L, L] as lss.bias.DenseBias",
        )
    if isinstance(bias, DenseBias) and bias.tensor.shape[-2:] != (num_queries, num_keys):
        raise MaskError(
            f"a dense bias of shape {tuple(bias.tensor.shape)} for {num_queries} queries and {num_keys} keys",
            allowed=f"[..., {num_queries}, {num_keys}], of the whole sequences",
        )
    learned = learned_of(bias)
    device = learned[0].device if learned else None
    queries, keys = (torch.arange(min(size, most), device=device) for size, most in ((num_queries, 2), (num_keys, 3)))
    with torch.enable_grad():
        values = bias(queries, keys)
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.dim() != 3:
        raise MaskError(f"a bias that returns {_described(values)}", allowed="floating values [H or 1, S, T]")
    if values.size(0) not in (1, num_heads) or values.shape[1:] != (len(queries), len(keys)):
        raise MaskError(
            f"a bias of shape {tuple(values.shape)} for {len(queries)} queries and {len(keys)} keys",
            allowed=f"[{num_heads} or 1, {len(queries)}, {len(keys)}]",
        )
    unknown = [leaf for leaf in _leaves(values) if not any(leaf is weight for weight in learned)]
    if unknown:
        raise MaskError(
            f"a bias of a tensor {tuple(unknown[0].shape)} that needs a gradient and is no parameter of it",
            allowed="an nn.Module that holds what it learns as parameters",
        )


def _described(values: object) -> str:
    return f"{values.dtype} {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__


def _leaves(values: Tensor) -> list[Tensor]:
    """Tensors that the gradient of `values` would reach."""
    found, nodes = [], [values.grad_fn] if values.grad_fn else []
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        following = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= following
        nodes += following
    return found


def learned_of(bias: Bias | None) -> tuple[nn.Parameter, ...]:
    """Parameters of a bias that need a gradient."""
    return tuple(w for w in bias.parameters() if w.requires_grad) if isinstance(bias, nn.Module) else ()


@dataclass(frozen=True, eq=False)
class Alibi:
    """Attention with linear biases (Press et al., 2022): minus slope times distance.

    Args:
        slopes: One a head.
    """

    slopes: tuple[float, ...]

    @classmethod
    def of(cls, num_heads: int) -> Alibi:
        """The paper's slopes: 2 ** (-8 i / H) where H is a power of two, and its rule for other numbers."""
        if num_heads < 1:
            raise MaskError(f"slopes for {num_heads} heads", allowed="at least 1")
        whole = 2 ** int(math.log2(num_heads))
        slopes = [2 ** (-8 * head / whole) for head in range(1, whole + 1)]
        slopes += [2 ** (-8 * head / (2 * whole)) for head in range(1, 2 * whole + 1, 2)][: num_heads - whole]
        return cls(tuple(slopes))

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[H, S, T]."""
        distance = (queries[:, None] - keys).abs()
        return -torch.tensor(self.slopes, dtype=torch.float64, device=keys.device)[:, None, None] * distance


class RelativeBias(nn.Module):
    """The learned bias of T5 (Raffel et al., 2020): one value a head and bucket of distances.

    Near distances have a bucket each, farther ones share buckets that grow with the logarithm.

    Args:
        num_heads: H.
        num_buckets: Buckets in all.
        max_distance: From there on, all distances share the last bucket.
        is_bidirectional: Whether half of the buckets are for keys behind the query.
    """

    def __init__(
        self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, *, is_bidirectional: bool = True
    ) -> None:
        super().__init__()
        exact = num_buckets // (4 if is_bidirectional else 2)
        if num_heads < 1 or exact < 1 or max_distance <= exact:
            raise MaskError(
                f"a relative bias of {num_heads} heads and {num_buckets} buckets up to a distance of {max_distance}",
                allowed=f"at least 1 head and {4 if is_bidirectional else 2} buckets, and a distance above {exact}",
            )
        self.num_buckets, self.max_distance, self.is_bidirectional = num_buckets, max_distance, is_bidirectional
        self.table = nn.Embedding(num_buckets, num_heads)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[H, S, T]."""
        found: Tensor = self.table(self.buckets(keys - queries[:, None])).permute(2, 0, 1)  # [S, T, H] -> [H, S, T]
        return found

    def buckets(self, offsets: Tensor) -> Tensor:
        """Bucket of each offset, key minus query: int64 of any shape."""
        number = self.num_buckets
        first = torch.zeros_like(offsets)
        distance = -offsets.clamp(max=0)
        if self.is_bidirectional:
            number //= 2
            first, distance = (offsets > 0) * number, offsets.abs()
        exact = number // 2
        scale = (number - exact) / math.log(self.max_distance / exact)
        # float32, as where this bias comes from: a rounding at a bucket's edge must fall the same way
        far = exact + ((distance.clamp(min=1).float() / exact).log() * scale).long()
        return first + distance.where(distance < exact, far.clamp(max=number - 1))


@dataclass(frozen=True, eq=False)
class DenseBias:
    """A bias given as a whole tensor, without gradient.

    Args:
        tensor: [L_query, L_key] or [H or 1, L_query, L_key]; -inf hides a pair.
    """

    tensor: Tensor

    def __post_init__(self) -> None:
        if not self.tensor.is_floating_point() or self.tensor.dim() not in (2, 3):
            raise MaskError(
                f"a dense bias of {self.tensor.dtype} with shape {tuple(self.tensor.shape)}",
                allowed="floating values [L_query, L_key] or [H, L_query, L_key]",
            )

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[H or 1, S, T]."""
        found = self.tensor[..., queries.to(self.tensor.device)[:, None], keys.to(self.tensor.device)]
        return found.to(queries.device).view(-1, *found.shape[-2:])
