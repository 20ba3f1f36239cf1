"""The only caller of torch.distributed's collectives: those of tensors are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lss.errors import LssError, MeshError, RankLostError
from lss.ledger import Entry, Ledger
from lss.mesh import DATA, SEQUENCE

T = TypeVar("T")
# Tensors, and the ranks of an axis that they go to or come from.
Messages = Sequence[tuple[Tensor, int]]


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of the mesh as this rank sees it. Over one rank every collective is the identity and is not counted.

    Args:
        name: `sequence` or `data`.
        size: Ranks.
        rank: This rank's index.
        ledger: Where collectives are counted.
        group: The process group; None for one rank.
        device_type: Where the ranks compute: `cpu`, `cuda`; empty without a mesh.
        ordered: Whether sums are taken in the order of the ranks, whatever the backend would do: the parts are sent as
            they are and added here.
    """

    name: str
    size: int
    rank: int
    ledger: Ledger
    group: dist.ProcessGroup | None = None
    device_type: str = ""
    ordered: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        """The same group, which cannot be copied, with a ledger of its own: for copies of a model."""
        return replace(self, ledger=deepcopy(self.ledger, memo))

    @classmethod
    def of(cls, mesh: DeviceMesh | None, name: str, ledger: Ledger, *, ordered: bool = False) -> Axis:
        """The axis `name` of a mesh; one that the mesh lacks, or without a mesh, has one rank.

        Raises:
            MeshError: The mesh has no named axes.
        """
        if mesh is None:
            return cls(name, 1, 0, ledger)
        if mesh.mesh_dim_names is None:
            raise MeshError("a DeviceMesh without axis names", remedy="make it with lss.init_mesh, or name its axes")
        if not {DATA, SEQUENCE} & set(mesh.mesh_dim_names):
            raise MeshError(
                f"a DeviceMesh with the axes {', '.join(mesh.mesh_dim_names)}",
                allowed=f"an axis {SEQUENCE!r}, {DATA!r}, or both, and any others",
            )
        kind = mesh.device_type
        if name not in mesh.mesh_dim_names:
            return cls(name, 1, 0, ledger, device_type=kind)
        return cls(name, mesh[name].size(), mesh.get_local_rank(name), ledger, mesh.get_group(name), kind, ordered)

    def all_gather(self, segment: Tensor, *, layer: str, phase: str) -> Tensor:
        """Concatenate the segments of all ranks along dim 0: [S, ...] to [N * S, ...]."""
        return self.start_all_gather(segment, layer=layer, phase=phase)()

    def start_all_gather(self, segment: Tensor, *, layer: str, phase: str) -> Callable[[], Tensor]:
        """As `all_gather`, which goes on in the background; what is returned waits for it and gives the whole."""
        if self.size == 1:
            return lambda: segment
        segment = segment.contiguous()
        whole = segment.new_empty((self.size * segment.size(0), *segment.shape[1:]))
        begin = partial(_all_gather, whole, segment, group=self.group, async_op=True)
        wait = self._start("all_gather", layer, phase, (self.size - 1) * _num_bytes(segment), begin, (whole, segment))
        return lambda: wait() or whole

    def reduce_scatter(self, whole: Tensor, *, layer: str, phase: str) -> Tensor:
        """Sum over the ranks and keep this rank's part of dim 0: [N * S, ...] to [S, ...].

        16-bit tensors are summed in float32, so that the error does not grow with N.
        """
        return self.start_reduce_scatter(whole, layer=layer, phase=phase)()

    def start_reduce_scatter(self, whole: Tensor, *, layer: str, phase: str) -> Callable[[], Tensor]:
        """As `reduce_scatter`, which goes on in the background; what is returned waits for it and gives the part."""
        if self.size == 1:
            return lambda: whole
        if self.ordered or self.device_type == "cpu":
            return self._start_exchange(whole, layer, phase)
        summand = (whole.float() if whole.element_size() < 4 else whole).contiguous()
        segment = summand.new_empty((whole.size(0) // self.size, *whole.shape[1:]))
        begin = partial(_reduce_scatter, segment, summand, group=self.group, async_op=True)
        num_bytes = (self.size - 1) * _num_bytes(segment)
        wait = self._start("reduce_scatter", layer, phase, num_bytes, begin, (segment, summand))
        return lambda: wait() or segment.to(whole.dtype)

    def all_reduce_(self, tensor: Tensor, *, layer: str, phase: str) -> Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1 and self.ordered:
            parts = self.all_gather(tensor.reshape(1, -1), layer=layer, phase=phase)
            tensor.copy_(_sum_in_order(parts).view_as(tensor))
        elif self.size > 1:
            num_bytes = 2 * (self.size - 1) * _num_bytes(tensor) // self.size
            begin = partial(dist.all_reduce, tensor, group=self.group, async_op=True)
            self._start("all_reduce", layer, phase, num_bytes, begin)()
        return tensor

    def broadcast_(self, tensor: Tensor, *, layer: str, phase: str) -> Tensor:
        """Overwrite with the tensor of the axis' first rank, in place."""
        if self.size > 1:
            begin = partial(dist.broadcast, tensor, group_src=0, group=self.group, async_op=True)
            self._start("broadcast", layer, phase, _num_bytes(tensor), begin)()
        return tensor

    def start_all_to_all(self, parts: Tensor, *, layer: str, phase: str) -> Callable[[], Tensor]:
        """Send part r of dim 0 to rank r, in the background; what is returned waits, and gives one part of each rank.

        Args:
            parts: [N, ...], as what comes back.
            layer: For the ledger.
            phase: For the ledger.
        """
        if self.size == 1:
            return lambda: parts
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        begin = partial(dist.all_to_all_single, received, parts, group=self.group, async_op=True)
        num_bytes = (self.size - 1) * _num_bytes(parts[0])
        wait = self._start("all_to_all", layer, phase, num_bytes, begin, (received, parts))
        return lambda: wait() or received

    def start_send(
        self, sent: Messages, received: Messages, *, layer: str, phase: str, far: bool = False
    ) -> Callable[[], None]:
        """Send tensors to ranks and receive others into theirs, all in the background; what is returned waits.

        Args:
            sent: Contiguous tensors, and whom they go to. The ledger counts them as one send.
            received: Tensors that are overwritten, and who sends them.
            layer: For the ledger.
            phase: For the ledger.
            far: Whether the other ranks are no neighbours, which the ledger calls a fetch.
        """
        operations = [
            dist.P2POp(operation, tensor, group=self.group, group_peer=rank)
            for operation, messages in ((dist.isend, sent), (dist.irecv, received))
            for tensor, rank in messages
        ]
        if not operations:
            return lambda: None
        num_bytes = sum(_num_bytes(tensor) for tensor, _ in sent)
        tensors = tuple(tensor for tensor, _ in (*sent, *received))
        name = "fetch" if far else "send"
        return self._start(name, layer, phase, num_bytes, partial(dist.batch_isend_irecv, operations), tensors)

    def _start_exchange(self, whole: Tensor, layer: str, phase: str) -> Callable[[], Tensor]:
        """A reduce-scatter by messages of as many bytes, added here in the order of the ranks; gloo's own is slower."""
        summands = whole.contiguous().unflatten(0, (self.size, -1))
        parts = [summands[self.rank] if r == self.rank else torch.empty_like(summands[r]) for r in range(self.size)]
        others = [r for r in range(self.size) if r != self.rank]

        def begin() -> list[Any]:
            sent = [dist.isend(summands[r], group=self.group, group_dst=r) for r in others]
            return sent + [dist.irecv(parts[r], group=self.group, group_src=r) for r in others]

        wait = self._start("reduce_scatter", layer, phase, _num_bytes(summands[0]) * len(others), begin)
        return lambda: wait() or _sum_in_order(parts).to(whole.dtype)

    def _start(
        self,
        operation: str,
        layer: str,
        phase: str,
        num_bytes: int,
        begin: Callable[[], Any],
        tensors: tuple[Tensor, ...] = (),
    ) -> Callable[[], None]:
        """Start a collective and count it; what is returned waits for it, and keeps its tensors until then."""
        entry = Entry(self.name, operation, phase, layer)
        with _named(str(entry)), self.ledger.starting(entry, num_bytes):
            begun = begin()

        def wait(kept: tuple[Tensor, ...] = tensors) -> None:
            with _named(str(entry)), self.ledger.waiting(entry):
                for handle in begun if isinstance(begun, list) else [begun]:
                    handle.wait()

        return wait


def agree(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `action` on every rank of a group, or of the world; if it fails on any, raise the first failure on all.

    Only errors of `lss` are exchanged. So no rank waits for one that has given up, and all end with one message.
    """
    result: T | None = None
    failure: LssError | None = None
    try:
        result = action()
    except LssError as caught:
        failure = caught
    failures: list[LssError | None] = [failure] * dist.get_world_size(group)
    if len(failures) > 1:
        with _named("agreement"):
            dist.all_gather_object(failures, failure, group)
    for rank, found in enumerate(failures):
        if found is not None:
            error = found if all(failures) else _of_rank(found, rank)
            error.on_all_ranks = True
            raise error
    return result  # type: ignore[return-value]


def agree_equal(what: str, value: str, remedy: str) -> None:
    """Raise MeshError on every rank unless `value` is the same on all of them."""
    values = [value] * dist.get_world_size()
    if len(values) > 1:
        with _named("agreement"):
            dist.all_gather_object(values, value)
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        shown = "; ".join(f"rank {rank}: {values[rank]}" for rank in (0, *different[:3]))
        error = MeshError(f"{what} differs between ranks ({shown})", allowed="the same on every rank", remedy=remedy)
        error.on_all_ranks = True
        raise error


def from_first_rank(value: T) -> T:
    """The value that rank 0 holds, on every rank."""
    values = [value]
    if dist.get_world_size() > 1:
        with _named("agreement"):
            dist.broadcast_object_list(values, src=0)
    return values[0]


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say which collective failed; running out of memory is no lost rank."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise RankLostError(
            f"rank {dist.get_rank()}: {what} failed: {str(error).splitlines()[0]}",
            allowed="all ranks alive and in the same step",
            remedy="look at the first rank that ended: its own message says why; and see that all ranks of a sequence "
            "group call the model, in evaluation too",
        ) from error


def _of_rank(error: LssError, rank: int) -> LssError:
    return type(error)(f"rank {rank}: {error.given}", allowed=error.allowed, remedy=error.remedy)


def _sum_in_order(parts: Sequence[Tensor] | Tensor) -> Tensor:
    """Sum of two or more, first to last, in float32 where they are narrower."""
    first = parts[0].float() if parts[0].element_size() < 4 else parts[0]
    total = first + parts[1]
    for part in parts[2:]:
        total += part
    return total


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# torch 2.13 renames both; 2.11 has the older names only
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
