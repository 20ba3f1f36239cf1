"""A world of ranks that do not exist, and tensors without values: what `lss plan` runs a step on.

The only file that touches torch's fake process group and fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from lss.errors import MeshError


def has_values() -> bool:
    """Whether tensors that are made now hold values; in a plan they have shapes only."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Be one of so many ranks; collectives return at once, and what they give is not defined.

    Raises:
        MeshError: This process is one of a run.
    """
    if dist.is_initialized():
        raise MeshError("a plan in a process of a run", allowed="a process by itself, without torchrun")
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 (registers its backend)

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors that are made within it have no values and take no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 (brings the compiler)

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


@contextmanager
def fake_shards() -> Iterator[None]:
    """Within it `fully_shard` makes this rank's part of a parameter alone, not those of all ranks, one by one."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param  # noqa: PLC0415 (takes long to import)

    with patch.object(_fsdp_param, "_chunk_with_empty", _Chunks):
        yield


class _Chunks(Sequence[Tensor]):
    """What `torch.chunk` gives, filled up with empty tensors; each is made when it is asked for."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self.tensor, self.number, self.dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: Any) -> Any:
        length = self.tensor.size(self.dim)
        size = -(-length // self.number)
        start = min(length, index * size)
        part = self.tensor.narrow(self.dim, start, min(size, length - start))
        return part if part.size(self.dim) else self.tensor.new_empty(0)
