"""What is to be planned, and one rank's step of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from lss.batch import shard
from lss.config import Config
from lss.context import SequenceContext, context_of
from lss.errors import ConfigError, LssError
from lss.fake import fake_shards, fake_tensors, fake_world
from lss.layout import Layout
from lss.mesh import DATA, SEQUENCE
from lss.models import GPT
from lss.plan.links import Group
from lss.plan.trace import Recorder, RecordingLedger, Trace
from lss.target import call, shift_labels
from lss.train.model import prepare, stacks_of
from lss.train.optim import make_optimizer
from lss.train.update import update


@dataclass(frozen=True)
class Setup:
    """A run that is to be planned.

    Args:
        target: `module:function`, which returns the model and its batch; empty for the configuration's model.
        config: How it is run.
        device_type: Where: `cuda` or `cpu`.
        foreach: As of `make_optimizer`; by default as `lss train` does on that device.
        keeps_gradients: Whether gradients, and the messages in which they are sent, stay in memory between steps, as
            torch's `zero_grad` and DistributedDataParallel used to keep them.
        depth: Layers to which each stack of them is cut; None for all.
        at: The rank whose step it is, of the first sequence group; None for the busiest.
    """

    target: str
    config: Config
    device_type: Literal["cuda", "cpu"]
    foreach: bool | None = None
    keeps_gradients: bool = False
    depth: int | None = None
    at: int | None = None

    @property
    def num_ranks(self) -> int:
        """Of the world."""
        return self.config.parallel.sequence * self.config.parallel.data

    @property
    def rank(self) -> int:
        """The busiest rank of the first sequence group: the one whose tokens see most, under a causal mask."""
        if self.at is not None:
            return self.at
        return max(range(self.layout.num_ranks), key=lambda rank: sum(map(sum, self.layout.spans[rank])))

    @property
    def rank_of_one_piece(self) -> int:
        """The rank whose tokens lie most in a row: it computes the largest blocks where all tokens see all."""
        return max(range(self.layout.num_ranks), key=lambda rank: max(map(len, self.layout.pieces(rank)), default=0))

    @cached_property
    def layout(self) -> Layout:
        """Of the sequences over the ranks."""
        return Layout.named(self.config.attention.layout, self.config.data.length, self.config.parallel.sequence)

    def group(self, axis: str, ranks_per_node: int) -> Group:
        """The ranks of an axis, as they lie on nodes; `all` are those of the world."""
        sequence, data = self.config.parallel.sequence, self.config.parallel.data
        size, stride = {"sequence": (sequence, 1), "data": (data, sequence), "all": (self.num_ranks, 1)}[axis]
        return Group.of(size, stride, self.num_ranks, ranks_per_node)

    def load(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """The plain model, and a micro-batch of whole sequences, none of them padded."""
        length, size = self.config.data.length, -(-self.config.train.batch // self.config.train.accumulation)
        if not self.target:
            tokens = torch.zeros(size, length, dtype=torch.int64)
            gpt = self.config.gpt()
            return GPT(replace(gpt, layers=self.depth or gpt.layers)), {"tokens": tokens, "labels": tokens}
        model, batch = call(self.target, length=length, batch=size)
        labels = batch.get("labels")
        shape = tuple(labels.shape[:2]) if isinstance(labels, Tensor) else ()
        if shape != (size, length):
            raise ConfigError(
                f"{self.target} returned labels of {list(shape)}, for a batch of {size} x {length} tokens",
                allowed="labels [batch, length]",
                remedy="have the function take `length` and `batch`, or give --length and --batch as it makes them",
            )
        return model, {name: part for name, part in batch.items() if name not in _TAKEN_IN}


# Padding and positions of documents, which are values: a plan takes sequences without padding.
_TAKEN_IN = ("attention_mask", "position_ids")


def trace_step(setup: Setup) -> Trace:
    """One rank's step on tensors without values, in a world that does not exist.

    It is planned as a later step of a run: the states of the optimizer, which the first step makes, are there.

    Raises:
        LssError: The run would be refused, or the target fails.
    """
    parallel = setup.config.parallel
    with fake_world(setup.rank, setup.num_ranks):
        mesh = init_device_mesh(setup.device_type, (parallel.data, parallel.sequence), mesh_dim_names=(DATA, SEQUENCE))
        holders = _holders(setup)
        cutting = fake_shards() if parallel.shard_parameters else nullcontext()
        with fake_tensors(), cutting, explained(setup):
            return _traced(setup, mesh, holders)


def _holders(setup: Setup) -> DeviceMesh:
    """Where parameters are cut: those without values are on the CPU."""
    parallel = setup.config.parallel
    if parallel.strategy == "megatron-tp":
        return init_device_mesh("cpu", (parallel.data, parallel.sequence), mesh_dim_names=(DATA, SEQUENCE))
    return init_device_mesh("cpu", (setup.num_ranks,))


def _traced(setup: Setup, mesh: DeviceMesh, holders: DeviceMesh) -> Trace:
    train = setup.config.train
    with _numbers_of(torch.float64 if train.precision == "fp64" else torch.get_default_dtype()):
        plain, whole = setup.load()  # tensors without values cannot be converted in a module
    _cut_stacks(plain, setup.depth)
    shift = shift_labels(setup.target, plain)
    model = prepare(plain, mesh, setup.config, holders)
    foreach = setup.device_type == "cuda" if setup.foreach is None else setup.foreach
    optimizer, _ = make_optimizer(model, train, foreach=foreach)
    if setup.keeps_gradients:
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
    layout = setup.config.attention.layout
    batches = [shard(whole, mesh, shift_labels=shift, layout=layout) for _ in range(train.accumulation)]
    return _record(model, optimizer, batches, setup)


@contextmanager
def _numbers_of(dtype: torch.dtype) -> Iterator[None]:
    """Tensors that are made within it are of a dtype, unless another is asked for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def explained(setup: Setup) -> Iterator[None]:
    """Say of whatever a target's code raises within it what a plan cannot do.

    Raises:
        LssError: In the place of any other error.
    """
    try:
        yield
    except Exception as error:
        what = setup.target or "the model"
        known = _known(what, error.__cause__ if isinstance(error, LssError) else error)
        if known is not None:
            raise known from error
        if isinstance(error, LssError):
            raise
        raise ConfigError(
            f"the step of {what} failed on tensors without values: {type(error).__name__}: {str(error).strip()}",
            allowed="a model that lss.parallelize takes, and a batch of its arguments",
            remedy="see that lss verify takes it",
        ) from error


def _known(what: str, error: BaseException | None) -> ConfigError | None:
    """What is not possible on tensors without values; None for anything else."""
    if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return ConfigError(
            f"{what} reads values of tensors, which have none in a plan: {error}",
            allowed="a model whose step has the same shapes whatever the values are",
            remedy="leave out what looks at values (`.item()`, `if tensor`, `nonzero`), for the plan",
        )
    if "Couldn't swap" in str(error):
        return ConfigError(
            f"{what} is converted, which tensors without values cannot be",
            allowed="a model as it is made",
            remedy="--precision, or torch.set_default_dtype before it is made, instead of `.to(dtype)` and the like",
        )
    if "FlexAttention" in str(error):
        return ConfigError(
            f"{what} takes the kernel flex, which cannot be planned", allowed="--kernel efficient, math or stored"
        )
    return None


def container_of(model: nn.Module, stack: list[str]) -> nn.ModuleList | None:
    """The list that holds a stack; None where it is none."""
    container = model.get_submodule(stack[0].rpartition(".")[0])
    return container if isinstance(container, nn.ModuleList) else None


def _cut_stacks(model: nn.Module, depth: int | None) -> None:
    """Leave so many layers of each stack."""
    for stack in stacks_of(model):
        container = container_of(model, stack)
        if depth is not None and container is not None:
            del container[depth:]


def _record(model: nn.Module, optimizer: Optimizer, batches: list[dict[str, Any]], setup: Setup) -> Trace:
    recorder = Recorder()
    _observe(context_of(model), RecordingLedger(recorder))
    stack = next(iter(stacks_of(model)), [])
    recorder.mark([model.get_submodule(name) for name in stack])
    recorder.hold((*model.parameters(), *model.buffers()), "parameters")
    kept = [torch.empty_like(weight) for weight in model.parameters() if weight.grad is not None]
    recorder.hold(kept, "gradients")
    recorder.hold((weight.grad for weight in model.parameters() if weight.grad is not None), "gradients")
    recorder.hold((part for batch in batches for part in batch.values() if isinstance(part, Tensor)), "workspace")

    def enter(*_: Any) -> None:
        recorder.is_optimizing = True
        gradients = (weight.grad for weight in model.parameters() if weight.grad is not None)
        recorder.hold(gradients, "gradients")

    optimizer.register_step_pre_hook(enter)
    model.train()
    with recorder.recording():
        update(model, optimizer, batches, setup.config.train)
        states = (state for states in optimizer.state.values() for state in states.values())
        recorder.hold((state for state in states if isinstance(state, Tensor)), "optimizer", always=True)
    return recorder.trace


def _observe(context: SequenceContext, ledger: RecordingLedger) -> None:
    context.ledger = ledger
    context.sequence, context.data = (replace(axis, ledger=ledger) for axis in (context.sequence, context.data))
