"""What the library calls: an attention function and a mask function, registered under the name `lss`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from inspect import Signature, getclosurevars, signature
from itertools import takewhile
from operator import and_, or_
from typing import Any

from torch import Tensor, nn

from lss.adapters.rules import WholePadding
from lss.attention import Route
from lss.bias import Bias
from lss.compiled import eager
from lss.dropout import Site
from lss.errors import MaskError, ModelError
from lss.masks import Causal, Full, Mask, Window

NAME = "lss"
_PLACE = "lss_place"
# Arguments of the interface that change the result and are not understood.
_CHANGING = ("softcap", "position_bias", "head_mask", "cu_seq_lens_q", "output_attentions")


@dataclass
class Place:
    """What an attention module of a parallelized model knows.

    Args:
        route: To the keys of all segments.
        site: Place of the dropout of its weights.
        bias: Added to its scores.
        crosses: Whether the present call's keys are an encoder's.
        signature: Of the module's forward.
    """

    route: Route
    site: Site
    bias: Bias | None
    crosses: bool = False
    signature: Signature | None = None

    def tell(self, module: nn.Module) -> None:
        """Leave it on the module, which also tells before each call whose keys it is given."""
        self.signature = signature(module.forward)
        setattr(module, _PLACE, self)
        module.register_forward_pre_hook(_look, with_kwargs=True)


class _RelativeBias(nn.Module):
    """The bias of T5 and its kin, by the functions of the module that learns it, which other layers share."""

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.table, self.owner = owner.relative_attention_bias, [owner]  # in a list: it is no part of this one

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[H, S, T]."""
        (owner,) = self.owner
        buckets = owner._relative_position_bucket(
            keys - queries[:, None],
            bidirectional=not owner.is_decoder,
            num_buckets=owner.relative_attention_num_buckets,
            max_distance=owner.relative_attention_max_distance,
        )
        found: Tensor = self.table(buckets).permute(2, 0, 1)
        return found


def relative_bias(modules: dict[str, nn.Module], name: str) -> Bias | None:
    """That of the first layer of the same kind in the same stack; cross-attention of T5 has none."""
    layer = modules[name]
    if not hasattr(layer, "compute_bias") or "EncDec" in name:
        return None
    same = [other for key, other in modules.items() if _stack(key) == _stack(name)]
    owner = next((other for other in same if getattr(other, "has_relative_attention_bias", False)), None)
    return None if owner is None else _RelativeBias(layer if hasattr(layer, "relative_attention_bias") else owner)


def _stack(name: str) -> list[str]:
    """A name without its numbers and what follows them."""
    return list(takewhile(lambda part: not part.isdigit(), name.split(".")))


def _look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Whether keys are an encoder's; and a bias that is known by its rule is not made whole."""
    place: Place = vars(module)[_PLACE]
    assert place.signature is not None
    bound = place.signature.bind(*args, **kwargs).arguments
    bound |= bound.get("kwargs", {})
    place.crosses = any(bound.get(name) is not None for name in ("key_value_states", "encoder_hidden_states"))
    if "position_bias" in place.signature.parameters and bound.get("position_bias") is None:
        kwargs = {**kwargs, "position_bias": next(module.parameters()).new_zeros(())}
    return args, kwargs


@eager
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The library's attention function: [B, H, S, D] and [B, K, S, D] of this rank to [B, S, H, D].

    Args:
        module: The attention module.
        query: [B, H, S, D].
        key: [B, K, S, D].
        value: [B, K, S, D].
        attention_mask: What `mask` made; None where the model makes none, and says all by the other arguments.
        scaling: Factor of the scores.
        dropout: Rate on the attention weights, 0 in evaluation.
        is_causal: Whether a token sees no later one; None for what the module says.
        sliding_window: Tokens that a token sees, itself among them; None for all.
        s_aux: Sinks, [H].
        others: Further arguments of the interface: refused where they would change the result.
    """
    place = _place(module)
    route, site = place.route, place.site
    changing = [name for name in _CHANGING if _asks(others.get(name)) and not hasattr(module, "compute_bias")]
    if changing:
        raise ModelError(f"{route.name} asks for {changing[0]}", allowed="attention without it")
    found = attention_mask
    if found is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        found = Causal() if causal else Full()
        if sliding_window is not None:
            found = found & Window(sliding_window - 1, 0 if causal else sliding_window - 1)
    site.rate = dropout
    attended = route.attend(
        query,
        key,
        value,
        found,
        scale=scaling,
        bias=place.bias,
        sinks=s_aux,
        dropout=site if site.dropped_levels else None,
        of_source=place.crosses,
    )
    return attended.transpose(1, 2), None


def mask(*, mask_function: Callable[..., Any], attention_mask: Tensor | None = None, **others: Any) -> Mask:
    """The library's mask function: its rule of indices as a mask of global positions."""
    found = _rule(mask_function)
    if attention_mask is None or (attention_mask.dim() == 2 and attention_mask.all()):
        return found  # many models make a mask of ones where they are given none
    if attention_mask.dim() != 2:
        raise MaskError(f"an attention_mask of shape {tuple(attention_mask.shape)}", allowed="padding, [B, L]")
    padding = WholePadding.of(attention_mask)
    return padding if found == Full() else found & padding


def _rule(function: Callable[..., Any]) -> Mask:
    """A rule of masking_utils; packed documents are left to the segment, whose positions jump for another reason."""
    name = function.__qualname__.partition(".")[0]
    held: dict[str, Any] = dict(getclosurevars(function).nonlocals)
    match name:
        case "causal_mask_function":
            return Causal()
        case "bidirectional_mask_function" | "packed_sequence_mask_function":
            return Full()
        case "sliding_window_overlay":
            return Window(held["sliding_window"] - 1, None)
        case "sliding_window_bidirectional_overlay":
            return Window(held["sliding_window"], held["sliding_window"])
        case "remap_positions_for_packed_sequence":
            return _rule(held["mask_function"])
        case "and_masks" | "or_masks":
            return reduce(and_ if name == "and_masks" else or_, map(_rule, held["mask_functions"]))
    raise MaskError(
        f"the model masks by the rule {function.__qualname__}",
        allowed="causal, bidirectional and sliding windows",
        remedy="say documents and padding to lss.shard",
    )


def _asks(value: object) -> bool:
    return value is not None and value is not False


def _place(module: nn.Module) -> Place:
    if _PLACE not in vars(module):
        raise ModelError(
            f"a {type(module).__name__} with attn_implementation={NAME!r} that was not parallelized",
            remedy="model = lss.parallelize(model, mesh)",
        )
    found: Place = vars(module)[_PLACE]
    return found
