"""What is refused before the first step: modules that mix tokens or draw masks in ways that are not understood."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules import batchnorm, conv, padding, pooling

from lss.adapters import peft, torch_nn, transformers
from lss.adapters.found import attention_modules
from lss.adapters.stacks import stacks
from lss.attention import PROJECTIONS, attention_layers, bias_of, mask_of
from lss.batch import Cut
from lss.bias import is_rule
from lss.context import is_parallelized
from lss.errors import ModelError
from lss.frames import is_within
from lss.fully_sharded import is_cut
from lss.models.positions import LearnedPositions

# Modules that may mix tokens, or draw masks that know no position, and that are not understood.
_REFUSED: tuple[type[nn.Module], ...] = (
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
_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
_OVER_A_DIM = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU)


def default_cut(model: nn.Module) -> Cut:
    """Where the tokens of a model are cut if nobody says."""
    return "layers" if transformers.takes_no_tokens(model) else "tokens"


def refusals(model: nn.Module, *, cut: Cut = "tokens", safe: Sequence[str] = ()) -> Iterator[ModelError]:
    """Everything in a plain model that would be computed wrongly, by its name.

    Args:
        model: The model.
        cut: Where its tokens are cut.
        safe: Names of modules that the user says keep tokens alone, and of buffers in which ranks may differ.
    """
    layers, is_pretrained = attention_layers(model), transformers.is_pretrained(model)
    names = dict(model.named_modules())
    if unknown := set(safe) - {*names, *dict(model.named_buffers())}:
        yield ModelError(
            f"safe={sorted(unknown)}, of which the model has none", allowed="names of its modules, buffers"
        )
    if is_parallelized(model):
        yield ModelError("a model that is parallelized already", remedy="parallelize it once")
    yield from _of_wrappers(model)
    attention = attention_modules(model)
    if not attention and not is_pretrained:
        yield ModelError(
            f"no attention was found in {type(model).__name__}",
            allowed="nn.MultiheadAttention, modules that call scaled_dot_product_attention, models of transformers, "
            "modules with the methods " + ", ".join(PROJECTIONS),
            remedy="have its attention call scaled_dot_product_attention",
        )
    if len({module.batch_first for module in names.values() if isinstance(module, nn.MultiheadAttention)}) > 1:
        yield ModelError("nn.MultiheadAttention with batch_first and without", allowed="one of them in a model")
    for name, layer in layers.items():
        yield from _of_layer(name, layer)
    whole = _whole(model, attention, cut)
    for name, module in names.items():
        if not is_within(name, safe):
            yield from _of_module(name, module, is_cut=name not in whole)
    if is_pretrained:
        yield from transformers.refusals(model, cut)
    yield from peft.refusals(model)


def _whole(model: nn.Module, attention: dict[str, nn.Module], cut: Cut) -> set[str]:
    """Names of the modules that are given whole sequences: those outside of stacks of layers."""
    cutting = stacks(model, attention)
    if cut == "tokens":
        cutting = [stack for stack in cutting if transformers.is_of_uncut_encoder(model, stack[0])]
    inside = tuple(f"{name}." for stack in cutting for name in stack)
    names = {name for name, _ in model.named_modules() if not f"{name}.".startswith(inside)} if cutting else set()
    return {name for name in names if cut == "layers" or transformers.is_of_uncut_encoder(model, name)}


def _of_wrappers(model: nn.Module) -> Iterator[ModelError]:
    wrappers = [type(module).__name__ for module in model.modules() if type(module).__name__ in _WRAPPERS]
    wrappers += ["fully_shard"] if any(map(is_cut, model.parameters())) else []
    if wrappers:
        yield ModelError(f"a model under {wrappers[0]}", remedy="lss.parallelize first, then what goes around it")


def _of_layer(name: str, layer: nn.Module) -> Iterator[ModelError]:
    bias = bias_of(layer)
    if bias is not None and not is_rule(bias):
        yield ModelError(
            f"{name} has a bias without a rule for positions: a {type(bias).__name__}",
            allowed="a function of the positions of queries and keys, such as those of lss.bias",
        )
    if mask_of(layer) is None:
        yield ModelError(
            f"{name} does not say who sees whom",
            allowed="an attribute is_causal, True or False, or mask, an lss.masks.Mask",
            remedy="see lss.AttentionLayer",
        )


def _of_module(name: str, module: nn.Module, *, is_cut: bool) -> Iterator[ModelError]:
    kind = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        yield from torch_nn.refusals(name, module)
    if isinstance(module, nn.Embedding):
        # gradients of a table are summed over ranks as they are: what looks at a rank's own tokens is wrong
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, option):
                given = f"{name} has {option}={getattr(module, option)}"
                yield ModelError(given, allowed="an embedding without this option")
    if is_cut and getattr(module, "dim", None) == 1 and isinstance(module, _OVER_A_DIM):
        yield ModelError(f"{name} is a {kind} over dim 1, the tokens", allowed="dim=-1")
    hooked = bool(module._forward_hooks or module._forward_pre_hooks)
    for replaced in (nn.Dropout, LearnedPositions):
        if isinstance(module, replaced) and (type(module) is not replaced or hooked):
            yield ModelError(
                f"{name} is a {kind}{' with hooks' if hooked else ''}",
                allowed=f"a plain {replaced.__name__}, as it is replaced by one that knows positions",
            )
    if is_cut and isinstance(module, _REFUSED):
        yield ModelError(
            f"{name or 'the model'} is a {kind}, which may mix tokens outside attention or draws masks that know no "
            "position",
            allowed="attention, nn.Dropout, and modules that work on each token alone",
            remedy=f"safe=[{name!r}] if it does; cut='layers' if it stands outside of the layers",
        )
