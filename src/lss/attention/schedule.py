"""How one call of attention is computed: the kernel, the blocks, what is gathered and when."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from lss.attention.attend import Call
from lss.attention.blocks import Work
from lss.attention.kernels import MATH, STORED, KernelName, Needs, choose, why
from lss.attention.plan import Limits, Plan, plan
from lss.attention.sources import GATHERS, Gather, Source
from lss.bias import Bias, learned_of, require_bias
from lss.collectives import Axis
from lss.dropout import Site
from lss.errors import LayoutError, MaskError, ModelError
from lss.layout import Layout
from lss.masks import Mask, require_mask

# How keys and values come to the ranks that need them, for any model.
Strategy = Literal["lss", "ring", "lightseq", "ulysses"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Biases are worked out for blocks of at most so many queries and keys.
_BIASED = 512
# Bytes a second between ranks, and operations a second of one rank; orders of magnitude, for `auto` alone.
_RATES = {"cpu": (1e9, 1e11), "cuda": (1e11, 3e14)}


@dataclass(frozen=True)
class Schedule:
    """What a user chooses of how attention is computed.

    Args:
        gather: What is gathered: the layer's input (`x`), keys and values packed (`kv`) or apart (`separate`), or
            whatever takes fewest seconds (`auto`).
        kernel: What computes a block; `auto` takes the fastest that can.
        keep: Whether what was gathered is kept for backward; else it is gathered again.
        chunks: Pieces in which it is gathered, the next on its way while one is computed. With more than one, none is
            kept.
        strategy: `lss` gathers; to compare, `ring` passes keys and values on from rank to rank, `lightseq` does so in
            an order that evens out causal masks, and `ulysses` exchanges tokens for heads. Those keep none.
    """

    gather: Gather = "auto"
    kernel: KernelName = "auto"
    keep: bool = True
    chunks: int = 1
    strategy: Strategy = "lss"

    def __post_init__(self) -> None:
        if self.gather not in GATHERS:
            raise ModelError(f"gather={self.gather!r}", allowed=", ".join(GATHERS))
        if self.chunks < 1:
            raise ModelError(f"chunks={self.chunks}", allowed="at least 1")
        if self.strategy not in STRATEGIES:
            raise ModelError(f"strategy={self.strategy!r}", allowed=", ".join(STRATEGIES))
        if self.strategy != "lss" and (self.gather == "x" or self.chunks > 1):
            raise ModelError(
                f"strategy={self.strategy!r} with gather={self.gather!r} and chunks={self.chunks}",
                allowed="keys and values in one piece: gather auto, kv or separate, and chunks 1",
            )
        if self.strategy in ("ring", "lightseq") and self.kernel == STORED:
            raise ModelError(
                f"strategy={self.strategy!r} with kernel={STORED!r}", allowed="kernels that compute block by block"
            )

    @property
    def keeps(self) -> bool:
        """Whether gathered tensors outlive the forward."""
        return self.keep and self.chunks == 1 and self.strategy == "lss"

    @property
    def passes(self) -> bool:
        """Whether keys and values come rank by rank."""
        return self.strategy in ("ring", "lightseq")


@dataclass(frozen=True)
class Scene:
    """Who sees whom in one call, and how scores are made.

    Args:
        mask: Of pairs.
        queries: The layout of the queries.
        keys: The layout of the keys.
        scale: Factor of the scores; None for 1 / sqrt(D).
        bias: Added to the scores.
        dropout: Place of the dropout of attention weights.
    """

    mask: Mask
    queries: Layout
    keys: Layout
    scale: float | None = None
    bias: Bias | None = None
    dropout: Site | None = None


def prepare(
    schedule: Schedule,
    scene: Scene,
    tensors: tuple[Tensor, Tensor, Tensor],
    source: Source,
    axis: Axis,
    name: str,
) -> Call:
    """The call of `attend` for these queries, keys and values.

    Args:
        schedule: What the user chose.
        scene: Who sees whom.
        tensors: Query [B, H, S, D], key and value [B, K, S, D].
        source: What is gathered.
        axis: The sequence axis.
        name: Of the layer, for messages and the ledger.

    Raises:
        MaskError: The mask or the bias does not fit the tensors.
        KernelError: The kernel that was asked for cannot do it.
    """
    num_sequences = tensors[0].size(0)
    needs = _needs(scene, tensors, axis)
    if schedule.kernel == STORED:
        work = Work(MATH, MATH, scene.mask, scene.scale, scene.bias, scene.dropout)
        return Call(work, Plan((), ()), source, scene.queries, scene.keys, axis, name, True, needs, is_stored=True)

    kernel = choose(schedule.kernel, needs)
    limits = _limits(kernel.limits, scene)

    def planned(rank: int) -> Plan:
        chunks = None if schedule.passes else schedule.chunks
        return plan(scene.mask, num_sequences, scene.queries, scene.keys, rank, limits, chunks)

    masked = replace(needs, masks=True)
    if schedule.kernel != "auto" and kernel.refuses(masked):  # on all ranks or on none
        masked = replace(needs, masks=any(planned(rank).has_partial for rank in range(axis.size)))
    else:
        masked = replace(needs, masks=planned(axis.rank).has_partial)
    work = Work(kernel, choose(schedule.kernel, masked), scene.mask, scene.scale, scene.bias, scene.dropout)
    return Call(
        work,
        planned(axis.rank),
        source,
        scene.queries,
        scene.keys,
        axis,
        name,
        schedule.keeps,
        masked,
        is_passed=schedule.passes,
        plan_of=planned,
    )


def describe(call: Call) -> str:
    """What was chosen, in a line."""
    if call.is_stored:
        return "all scores stored" + (f", gather {call.source.name}" if call.axis.size > 1 else "")
    kernel, number = why(call.work.kernel, replace(call.needs, masks=False)), len(call.plan.blocks)
    if call.work.partial is not call.work.kernel:
        kernel += f", where a mask cuts through a block {why(call.work.partial, call.needs)}"
    if call.axis.size == 1:
        return f"kernel {kernel}, {number} blocks"
    if call.is_passed:
        return f"kernel {kernel}, {number} blocks on this rank, keys and values passed from rank to rank"
    kept = "kept" if call.keep else f"gathered again in backward, in {len(call.plan.chunks)} chunks"
    return f"kernel {kernel}, {number} blocks on this rank, gather {call.source.name}, {kept}"


def fewest_seconds(x: Tensor, key: Tensor, value: Tensor, axis: Axis) -> Gather:
    """`x` or `kv`, by bytes sent and by the projections that `x` repeats, two products forward and two backward.

    Args:
        x: [B, S, E].
        key: [B, K, S, D].
        value: [B, K, S, D].
        axis: The sequence axis, of N ranks.
    """
    bandwidth, rate = _RATES.get(axis.device_type or x.device.type, _RATES["cuda"])
    tokens = x.size(0) * x.size(1) * (axis.size - 1)
    width, key_value_width = x.size(-1), key.size(1) * (key.size(-1) + value.size(-1))
    sent = 2 * tokens * x.element_size() / bandwidth
    seconds_of_x = sent * width + 4 * 2 * tokens * width * key_value_width / rate
    return "x" if seconds_of_x < sent * key_value_width else "kv"


def _needs(scene: Scene, tensors: tuple[Tensor, Tensor, Tensor], axis: Axis) -> Needs:
    query, _, value = tensors
    return Needs(
        axis.device_type or query.device.type,
        query.dtype,
        biases=scene.bias is not None,
        learns_bias=bool(learned_of(scene.bias)),
        drops_weights=scene.dropout is not None,
        head_width=query.size(-1),
        value_width=value.size(-1),
    )


def _limits(limits: Limits, scene: Scene) -> Limits:
    """Blocks whose bias or dropout is worked out apart are smaller, and have their keys in order."""
    if scene.bias is None and scene.dropout is None:
        return limits
    queries, keys = (min(limit or _BIASED, _BIASED) for limit in (limits.queries, limits.keys))
    return replace(limits, queries=queries, keys=keys, joined=False)


def check(scene: Scene, tensors: tuple[Tensor, Tensor, Tensor], name: str) -> None:
    """Raise MaskError or LayoutError unless mask and bias fit the tensors, and these each other."""
    query = tensors[0]
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or query.dtype not in _DTYPES:
        raise LayoutError(
            f"{name} has queries, keys and values of {[str(tensor.dtype) for tensor in tensors]}",
            allowed=f"one of {', '.join(map(str, _DTYPES))}",
        )
    require_mask(scene.mask)
    scene.mask.check(query.size(0), scene.queries.length, scene.keys.length)
    if scene.mask.num_heads not in (0, query.size(1)):
        raise MaskError(
            f"{name} has a mask for {scene.mask.num_heads} of {query.size(1)} heads",
            allowed=f"{query.size(1)}, or one for all",
        )
    if scene.bias is not None:
        require_bias(scene.bias, query.size(1), scene.queries.length, scene.keys.length)
