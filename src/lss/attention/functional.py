"""`lss.attention`: the functional form, on local tensors."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lss.attention.kernels import KernelName
from lss.attention.run import run
from lss.attention.schedule import Scene, Schedule, Strategy
from lss.attention.sources import Gather
from lss.bias import Bias
from lss.collectives import Axis
from lss.compiled import eager
from lss.dtypes import in_autocast
from lss.errors import LayoutError
from lss.layout import Layout
from lss.ledger import Ledger
from lss.masks import Full, Mask
from lss.mesh import SEQUENCE


@eager
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    mesh: DeviceMesh | None = None,
    layout: Layout | None = None,
    key_layout: Layout | None = None,
    bias: Bias | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    gather: Gather = "kv",
    kernel: KernelName = "auto",
    keep: bool = True,
    chunks: int = 1,
    strategy: Strategy = "lss",
    ledger: Ledger | None = None,
    name: str = "attention",
) -> Tensor:
    """What `torch.nn.functional.scaled_dot_product_attention` of whole sequences gives, at this rank's queries.

    One all-gather forward and one reduce-scatter backward, two each with `gather="separate"`, `chunks` times as many
    in chunks; backward gathers again where `keep` is False or `chunks` more than 1.

    Args:
        query: [B, H, S, D], the queries of this rank's segment.
        key: [B, K, T, D], the keys of this rank's segment; H is a multiple of K.
        value: [B, K, T, D or another width].
        mask: Who sees whom, by global positions; None for everybody.
        mesh: A mesh with an axis `sequence`; None for one rank alone.
        layout: Which tokens the queries are; None for N segments of S tokens in a row.
        key_layout: Which tokens the keys are, where they come from another sequence; None for `layout`.
        bias: Added to the scores, a function of global positions; see `lss.bias`.
        sinks: [H], a score a head that every query sees besides, without a value.
        scale: Factor of the scores; None for 1 / sqrt(D).
        gather: `kv` or `separate`.
        kernel: What computes; `auto` takes the fastest that can; `stored` keeps all scores for backward.
        keep: Whether gathered keys and values are kept for backward; else they are gathered again.
        chunks: Pieces in which they are gathered, so that memory falls to theirs; none is kept.
        strategy: `lss`; or to compare `ring`, `lightseq` or `ulysses`, which send otherwise and give the same.
        ledger: Counts the collectives.
        name: What the ledger and messages call this.

    Returns:
        [B, H, S, D], in the dtype of `query`, or of autocast; zeros for queries that see no key, and in empty slots.

    Raises:
        LayoutError: Shapes do not fit each other or the layout.
        MaskError: The mask or bias does not fit.
        KernelError: The kernel that was asked for cannot do it.

    Example:
        >>> import torch, lss
        >>> q, k, v = torch.randn(3, 1, 4, 10, 8)
        >>> lss.attention(q, k, v, mask=lss.masks.Causal() & lss.masks.Window(3)).shape
        torch.Size([1, 4, 10, 8])
    """
    axis = Axis.of(mesh, SEQUENCE, ledger or Ledger())
    query, key, value = map(in_autocast, (query, key, value))
    _check_shapes(query, key, value)
    mask = Full() if mask is None else mask
    queries = layout or Layout.contiguous(query.size(-2) * axis.size, axis.size)
    keys = key_layout or (queries if layout or query.size(-2) == key.size(-2) else None)
    keys = keys or Layout.contiguous(key.size(-2) * axis.size, axis.size)
    _check_layouts(query, key, queries, keys, axis, gather)
    scene = Scene(mask, queries, keys, scale, bias)
    schedule = Schedule(gather, kernel, keep, chunks, strategy)
    return run(schedule, scene, (query, key, value), axis, name, sinks=sinks)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    fits = all(len(shape) == 4 and min(shape[1:]) for shape in shapes) and shapes[1][:3] == shapes[2][:3]
    if not fits or shapes[0][0] != shapes[1][0] or shapes[0][1] % shapes[1][1] or shapes[0][3] != shapes[1][3]:
        raise LayoutError(
            f"query, key and value of shapes {shapes}",
            allowed="[B, H, S, D], [B, K, T, D] and [B, K, T, any width], H a multiple of K",
        )


def _check_layouts(query: Tensor, key: Tensor, queries: Layout, keys: Layout, axis: Axis, gather: Gather) -> None:
    for what, tensor, layout in (("query", query, queries), ("key", key, keys)):
        if (tensor.size(2), axis.size) != (layout.segment_length, layout.num_ranks):
            raise LayoutError(
                f"a {what} of {tensor.size(2)} slots over {axis.size} ranks, in a layout of {layout.segment_length} "
                f"slots over {layout.num_ranks}",
                allowed="the slots of this rank's segment",
                remedy="cut tensors by layout.shard(whole, rank, dim=2, fill=0), and give that layout",
            )
    if gather not in ("kv", "separate"):
        raise LayoutError(f"gather={gather!r}", allowed="kv or separate: there is no layer whose input could travel")
