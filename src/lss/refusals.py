"""What is refused before the first step: modules that mix tokens or draw masks in ways that are not understood."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import batchnorm, conv, padding, pooling

from lss.attention import mask_of
from lss.context import is_parallelized
from lss.errors import ModelError
from lss.models.positions import LearnedPositions

# Modules that may mix tokens, or draw masks that know no position, and that are not understood.
_REFUSED: tuple[type[nn.Module], ...] = (
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.EmbeddingBag,
    nn.Unfold,
    nn.Fold,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.Upsample,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.RReLU,
    conv._ConvNd,
    batchnorm._NormBase,
    padding._CircularPadNd,
    padding._ConstantPadNd,
    padding._ReflectionPadNd,
    padding._ReplicationPadNd,
    pooling._MaxPoolNd,
    pooling._AvgPoolNd,
    pooling._AdaptiveAvgPoolNd,
    pooling._AdaptiveMaxPoolNd,
    pooling._LPPoolNd,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
)
_OVER_A_DIM = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU)
# What an attention layer must have, see lss.AttentionLayer.
PROJECTIONS = ("project_query", "project_key_value", "project_output")


def refuse_what_cannot_be_honoured(model: nn.Module, layers: dict[str, nn.Module], *, is_adapted: bool) -> None:
    """Raise ModelError for anything in the model that would be computed wrongly, by its name.

    Args:
        model: A plain model.
        layers: Its attention layers.
        is_adapted: Whether an adapter knows its attention, so that it needs no such layer.
    """
    if is_parallelized(model):
        raise ModelError("a model that is parallelized already", remedy="parallelize it once")
    if not layers and not is_adapted:
        raise ModelError(
            f"no attention layer was found in {type(model).__name__}",
            allowed="modules with the methods " + ", ".join(PROJECTIONS),
            remedy="give its attention modules the interface of lss.AttentionLayer",
        )
    for name, layer in layers.items():
        if mask_of(layer) is None:
            raise ModelError(
                f"{name} does not say who sees whom",
                allowed="an attribute is_causal, True or False, or mask, an lss.masks.Mask",
                remedy="see lss.AttentionLayer",
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            _check_table(name, module)
        if getattr(module, "dim", None) == 1 and isinstance(module, _OVER_A_DIM):
            raise ModelError(f"{name} is a {type(module).__name__} over dim 1, the tokens", allowed="dim=-1")
        for kind in (nn.Dropout, LearnedPositions):
            hooked = bool(module._forward_hooks or module._forward_pre_hooks)
            if isinstance(module, kind) and (type(module) is not kind or hooked):
                raise ModelError(
                    f"{name} is a {type(module).__name__}{' with hooks' if hooked else ''}",
                    allowed=f"a plain {kind.__name__}, as it is replaced by one that knows positions",
                )
        if isinstance(module, _REFUSED):
            raise ModelError(
                f"{name or 'the model'} is a {type(module).__name__}, which may mix tokens outside attention or draws "
                "masks that know no position",
                allowed="attention as in lss.AttentionLayer, nn.Dropout, and modules that work on each token alone",
            )


def _check_table(name: str, table: nn.Embedding) -> None:
    """Gradients of a table are summed over ranks as they are: an option that looks at a rank's own tokens is wrong."""
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(table, option):
            raise ModelError(
                f"{name} has {option}={getattr(table, option)}", allowed="an embedding without this option"
            )
