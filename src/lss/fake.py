"""A world of ranks that do not exist, and tensors without values: what `lss plan` runs a step on.

The only file that touches torch's fake process group and fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def has_values() -> bool:
    """Whether tensors that are made now hold values; in a plan they have shapes only."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Be one of so many ranks; collectives return at once, and what they give is not defined."""
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
