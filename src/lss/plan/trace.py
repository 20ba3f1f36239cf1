"""One rank's step, operator by operator: what it computes, sends, and holds in memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lss.flops import formulas
from lss.frames import in_backward
from lss.fully_sharded import own_part
from lss.ledger import Entry, Ledger
from lss.trial import tensors_in

Work = Literal["product", "batched", "attention", "pass"]


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of an operator.

    Args:
        name: Torch's, such as `addmm`.
        work: `product` of two matrices, of `batched` ones, `attention`, or a `pass` over memory.
        flops: Operations; 0 for passes.
        moved: Bytes read and written.
        dtype: Of its first tensor.
    """

    name: str
    work: Work
    flops: int
    moved: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Start:
    """A collective is started.

    Args:
        entry: As of the ledger.
        num_bytes: That this rank sends, in the ring form.
    """

    entry: Entry
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The earliest collective of an entry that is on its way is awaited."""

    entry: Entry


Event = Operator | Start | Wait


@dataclass(slots=True)
class Allocation:
    """A piece of memory.

    Args:
        size: Bytes.
        born: When it was taken, on the clock of `Trace`.
        kind: What it holds, where that is known at once.
        in_forward: Whether it was made outside of backward and of the optimizer.
        died: When it was freed; None if it outlives the step.
    """

    size: int
    born: int
    kind: str
    in_forward: bool
    died: int | None = None


@dataclass
class Trace:
    """A step.

    Args:
        events: In order.
        allocations: All memory that was held at some time.
        clock: Ticks at every allocation and every time that memory is freed.
        backwards: When each backward began, and when it was over.
        last_over: When, in each, the last layer was.
        first_begun: When, in each, the first layer's began.
    """

    events: list[Event] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    clock: int = 0
    backwards: list[tuple[int, int]] = field(default_factory=list)
    last_over: list[int] = field(default_factory=list)
    first_begun: list[int] = field(default_factory=list)

    @property
    def flops(self) -> int:
        """Operations of the rank."""
        return sum(event.flops for event in self.events if isinstance(event, Operator))


# Operators that touch no memory, though torch does not call them views.
_STILL = frozenset(
    ("_unsafe_view", "_local_scalar_dense", "detach", "empty", "empty_like", "empty_strided", "new_empty", "full")
)


class Recorder(TorchDispatchMode):
    """Writes down what happens within it: the only place that looks below torch's operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.is_optimizing = False
        self._is_backward = False
        self._is_aside = False
        self._known: dict[int, tuple[Any, Allocation]] = {}  # by the identity of a storage: a weak reference to it
        self._num_unclaimed = 0
        self._pending: dict[int, Entry] = {}  # by the storage that a collective writes

    def mark(self, layers: Sequence[nn.Module]) -> None:
        """Have backward tell when it leaves the last of some layers, and when it comes to the first.

        Args:
            layers: In the order in which they are called.
        """

        def watch(marks: list[int], module: nn.Module, args: Any, outputs: Any) -> None:
            made = next((part for part in tensors_in(outputs) if part.requires_grad), None)
            if made is not None and not in_backward():
                made.register_hook(lambda _: marks.append(self.trace.clock))

        if len(layers) > 1:
            layers[-2].register_forward_hook(partial(watch, self.trace.last_over))
            layers[0].register_forward_hook(partial(watch, self.trace.first_begun))

    def hold(self, tensors: Iterable[Tensor], kind: str, *, always: bool = False) -> None:
        """Say what some tensors hold, whether they are known yet or not; and `always`, that they were there before."""
        for tensor in tensors:
            allocation = self._know(tensor, kind)
            allocation.kind = kind
            allocation.born = 0 if always else allocation.born

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record; memory that is taken and freed under its tensors, as `fully_shard` does, is followed too.

        What DTensor runs on whole shapes, to learn the shape of a result once a process, is not of the step.
        """
        from torch.distributed.tensor._sharding_prop import ShardingPropagator  # noqa: PLC0415  (takes long to import)

        resize, learn = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            self._forget(id(storage))
            found = resize(storage, size)
            self._know_storage(storage, "gathered")
            return found

        def learned(*args: Any) -> Any:
            self._is_aside = True
            try:
                return learn(*args)
            finally:
                self._is_aside = False

        with (
            patch.object(torch.UntypedStorage, "resize_", resized),
            patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", learned),
            self,
        ):
            yield

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if self._is_aside or function.namespace == "prim":  # prim: questions about a tensor
            return function(*args, **(kwargs or {}))
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its parts come here one by one
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self._note_backward()
        given, made = list(tensors_in((args, kwargs))), list(tensors_in(result))
        if function.namespace == "c10d":
            self._note_collective(function, given)
        elif not function.is_view and not (self.is_optimizing and function._opname == "zeros_like"):
            self._await_what_is_used(given)
            self.trace.events.append(_operator(function, args, kwargs, given, made, result))
        for tensor in made:
            self._know(tensor, "")
        return result

    def start(self, entry: Entry, num_bytes: int) -> None:
        """Note a collective of the ledger, whose messages were seen just now."""
        del self.trace.events[len(self.trace.events) - self._num_unclaimed :]
        self._num_unclaimed = 0
        self._pending.clear()
        self.trace.events.append(Start(entry, num_bytes))

    def wait(self, entry: Entry) -> None:
        """Note that one of the ledger is awaited."""
        self.trace.events.append(Wait(entry))

    def _note_backward(self) -> None:
        backwards, now = self.trace.backwards, self.trace.clock
        if in_backward() and self._is_backward:
            backwards[-1] = backwards[-1][0], now
        elif in_backward():
            backwards.append((now, now))
        self._is_backward = in_backward()

    def _note_collective(self, function: Any, given: list[Tensor]) -> None:
        """A message: of a collective that the ledger will tell of, or one of `fully_shard`'s or DDP's."""
        name = function._opname.strip("_").replace("allgather_base", "all_gather")
        operation = name.replace("reduce_scatter_base", "reduce_scatter").replace("allreduce", "all_reduce")
        if operation == "all_gather":
            self._know(given[0], "gathered").kind = "gathered"
        entry = Entry("all", operation, "step", "parameters")
        smallest, largest = (bound(t.numel() * t.element_size() for t in given) for bound in (min, max))
        num_bytes = 2 * largest if operation == "all_reduce" else largest - smallest
        self.trace.events.append(Start(entry, num_bytes))
        self._num_unclaimed += 1
        self._pending[id(given[0].untyped_storage())] = entry

    def _await_what_is_used(self, given: list[Tensor]) -> None:
        self._num_unclaimed = 0
        if self._pending:
            for tensor in given:
                entry = self._pending.pop(id(tensor.untyped_storage()), None)
                if entry is not None:
                    self.wait(entry)

    def _know(self, tensor: Tensor, kind: str) -> Allocation:
        local = own_part(tensor)
        return self._know_storage(local.untyped_storage(), kind)

    def _know_storage(self, storage: torch.UntypedStorage, kind: str) -> Allocation:
        key = id(storage)
        if key not in self._known:
            self.trace.clock += 1
            in_forward = not (self.is_optimizing or in_backward())
            made = Allocation(storage.nbytes(), self.trace.clock, kind, in_forward)
            self.trace.allocations.append(made)
            self._known[key] = weakref.ref(storage, lambda _: self._forget(key)), made
        return self._known[key][1]

    def _forget(self, key: int) -> None:
        _, allocation = self._known.pop(key, (None, None))
        if allocation is not None:
            self.trace.clock += 1
            allocation.died = self.trace.clock


class RecordingLedger(Ledger):
    """A ledger that has every collective noted in order.

    Args:
        recorder: Where.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def record(self, entry: Entry, num_bytes: int) -> None:
        """Note that it is started, and count it."""
        self.recorder.start(entry, num_bytes)
        super().record(entry, num_bytes)

    @contextmanager
    def waiting(self, entry: Entry) -> Iterator[None]:
        """Note that it is awaited."""
        yield
        self.recorder.wait(entry)


def _operator(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor], made: list[Tensor], result: Any
) -> Operator:
    packet = function._overloadpacket
    formula = formulas().get(packet)
    moved = sum(tensor.numel() * tensor.element_size() for tensor in (*given, *made))
    name, dtype = function._opname, next((tensor.dtype for tensor in (*made, *given)), torch.float32)
    if formula is None:
        return Operator(name, "pass", 0, 0 if name in _STILL else moved, dtype)
    flops = int(formula(*args, **kwargs, out_val=result))
    if "attention" not in name:
        return Operator(name, "batched" if name in ("bmm", "baddbmm") else "product", flops, moved, dtype)
    is_causal = any(
        argument.name == "is_causal" and value
        for argument, value in zip(function._schema.arguments, args, strict=False)
    )
    return Operator(name, "attention", flops // 2 if is_causal else flops, moved, dtype)
