"""What was found in a model, for people."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lss.adapters import transformers
from lss.adapters.found import attention_modules
from lss.attention import attention_layers, mask_of
from lss.batch import Cut
from lss.context import context_of, is_parallelized
from lss.dropout import PositionDropout
from lss.gradients import cut_parameters, parts_of_ranks, replicated_parameters
from lss.models.positions import LearnedPositions
from lss.positions import ShardedPositions
from lss.refusals import default_cut, refusals


def explain(model: nn.Module, *, cut: Cut | None = None) -> str:
    """What `parallelize` finds in a model, or has found: attention, positions, parameters, dropout, what is refused.

    Args:
        model: A plain model, of which it says what would be refused; or a parallelized one, of which it says, after a
            call, how attention is computed, what is gathered, and where its code made positions.
        cut: As in `parallelize`, which a parallelized model knows.

    Example:
        >>> import lss
        >>> from lss.models import GPT, GPTConfig
        >>> print(lss.explain(GPT(GPTConfig(width=32, layers=1, heads=2))))  # doctest: +ELLIPSIS
        GPT, 1 attention layer, tokens cut by lss.shard
        attention
          blocks.0.attention: Causal(offset=0)
        ...
        refused
          nothing
    """
    layers = attention_modules(model)
    cut = context_of(model).cut if is_parallelized(model) else cut or default_cut(model)
    found = [] if is_parallelized(model) else list(refusals(model, cut=cut))
    parts = {
        "attention": [f"{name}: {_attention(model, name, layer)}" for name, layer in layers.items()],
        "tokens apart from attention": list(_tried(model)),
        "positions": list(_positions(model, cut)),
        "parameters": list(_parameters(model)),
        "dropout": list(_dropout(model)),
        "refused": [str(refusal).replace("\n", " ") for refusal in found] or ["nothing"],
    }
    title = f"{type(model).__name__}, {len(layers)} attention layer{'s' if len(layers) != 1 else ''}, tokens cut "
    title += "by lss.shard" if cut == "tokens" else "between the first layer and the last"
    lines = (f"{name}\n" + "\n".join(f"  {line}" for line in said) for name, said in parts.items() if said)
    return "\n".join((title, *lines))


def _attention(model: nn.Module, name: str, layer: nn.Module) -> str:
    """Its mask, and how it is computed."""
    mask = mask_of(layer) if "" in attention_layers(layer) else None
    said = [str(mask)] if mask is not None else ["masked as it is called"]
    if is_parallelized(model):
        said.append(context_of(model).choices.get(name, "not called yet"))
    return ", ".join(said)


def _tried(model: nn.Module) -> Iterator[str]:
    """Whether they stay alone."""
    if is_parallelized(model):
        for way, said in context_of(model).findings.tried.items():
            yield f"in {way}: {said}"


def _positions(model: nn.Module, cut: Cut) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, ShardedPositions):
            yield f"{name}: {module.extra_repr()}, those of this rank's segment"
        elif isinstance(module, LearnedPositions):
            yield f"{name}: {module.num_embeddings} rows, to be cut over the ranks"
    if is_parallelized(model):
        yield from (f"{where}: {how}" for where, how in context_of(model).findings.positions.items())
    if cut == "layers":
        yield "of whole sequences, as the model makes them"
    elif transformers.takes_positions(model):
        yield "position_ids: global, from the segment; a learned table stays whole on every rank"


def _parameters(model: nn.Module) -> Iterator[str]:
    is_ready = is_parallelized(model)
    tables = list(_of(model, LearnedPositions))
    known = {id(weight) for weight in tables}
    others = [weight for weight in model.parameters() if id(weight) not in known]
    for name, weights in {
        "averaged over all ranks": replicated_parameters(model) if is_ready else others,
        "cut over all ranks by fully_shard": cut_parameters(model),
        "averaged over the data groups": parts_of_ranks(model) if is_ready else tables,
        "frozen": [weight for weight in model.parameters() if not weight.requires_grad],
    }.items():
        if weights:
            yield f"{name}: {sum(weight.numel() for weight in weights):,} numbers in {len(weights)} tensors"


def _of(model: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Parameter]:
    return (weight for module in model.modules() if isinstance(module, kind) for weight in module.parameters())


def _dropout(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout | PositionDropout) and module.p:
            yield f"{name}: rate {module.p}, keyed by position"
        if isinstance(module, nn.MultiheadAttention) and module.dropout:
            yield f"{name}: rate {module.dropout} of attention weights, keyed by position"
