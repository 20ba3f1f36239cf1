"""From degrees and the launcher's environment to a DeviceMesh with the axes `data` and `sequence`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lss.errors import MeshError

DATA, SEQUENCE = "data", "sequence"
# How long ranks wait for each other at the start; on a cluster they may be launched some time apart.
MEETING_SECONDS = 300


@dataclass(frozen=True)
class World:
    """What a launcher tells a process about itself and its peers.

    Args:
        launcher: Who started the ranks: `torchrun`, `openmpi`, `slurm`, `mpich`, `lss` or `none`.
        rank: This process, from 0.
        size: Processes of the run.
        local_rank: This process on its host, from 0.
        local_size: Processes on this host.
        init_method: Where the ranks meet: a URL that `torch.distributed.init_process_group` takes; empty for a
            world of one.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    init_method: str


def detect_world(environment: Mapping[str, str]) -> World:
    """Read the environment that torchrun, Open MPI, SLURM (`srun`) or MPICH gives to a rank.

    torchrun comes first, as it may run inside the others; `mpirun` before SLURM, whose variables it inherits.

    Raises:
        MeshError: A launcher is recognised and its environment is incomplete.
    """
    for launcher, (mark, rank, size, local_rank, local_size) in _VARIABLES.items():
        if mark in environment:
            read = _Reader(launcher, environment)
            world_size, local = read.integer(size), read.integer(local_rank)
            if world_size == 1 and launcher != "torchrun":
                break  # an interactive shell of a cluster: nobody started ranks
            own = read.integer(rank)
            if own >= world_size:
                raise MeshError(
                    f"{launcher}: {rank} is {own} in a world of {world_size}", allowed="ranks below its size"
                )
            num_local = read.tasks_on_this_node(local_size, world_size)
            return World(launcher, own, world_size, local, num_local, read.meeting_point(world_size, num_local))
    return World("none", 0, 1, 0, 1, "")


# launcher: (proof that it started us, rank, world size, local rank, ranks on this host)
_VARIABLES = {
    "torchrun": ("RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # set for the tasks of a step only, never for the batch script itself
    "slurm": (
        "SLURM_STEP_NUM_TASKS",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
    ),
    "mpich": ("PMI_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@dataclass(frozen=True)
class _Reader:
    launcher: str
    environment: Mapping[str, str]

    def integer(self, name: str) -> int:
        text = self.environment.get(name, "")
        if not (text.isascii() and text.isdigit()):
            raise MeshError(
                f"{self.launcher} started this process, but {name} is {text!r}",
                allowed="a whole number",
                remedy=f"start the ranks with {self.launcher}'s own command, or unset its variables to run alone",
            )
        return int(text)

    def tasks_on_this_node(self, name: str, world_size: int) -> int:
        """A plain count, or SLURM's `2(x3),1`: two tasks on each of three nodes, then one."""
        if name not in self.environment:
            return world_size
        counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", self.environment[name])
        per_node = [int(count) for count, repeat in counts for _ in range(int(repeat or 1))]
        node = self.integer("SLURM_NODEID") if self.launcher == "slurm" else 0
        return per_node[node] if node < len(per_node) else world_size

    def meeting_point(self, world_size: int, local_size: int) -> str:
        """Where rank 0 listens: MASTER_ADDR and MASTER_PORT, or what can be told from the launcher."""
        if world_size == 1:
            return ""
        host = self.environment.get("MASTER_ADDR", "")
        if not host and self.launcher == "slurm":
            host = first_host(self.environment.get("SLURM_STEP_NODELIST", self.environment.get("SLURM_NODELIST", "")))
        if not host and self.launcher != "torchrun" and local_size == world_size:
            host = "127.0.0.1"
        if not host:
            raise MeshError(
                f"{self.launcher} started {world_size} ranks and MASTER_ADDR is not set",
                allowed="the name or address of rank 0's host in MASTER_ADDR",
                remedy="export MASTER_ADDR (and MASTER_PORT, if 29500 is taken) to all ranks",
            )
        # jobs that share a host must not meet at one port
        job = re.sub(r"\D", "", self.environment.get("SLURM_JOB_ID", "")) or "0"
        port = self.environment.get("MASTER_PORT", str(29500 + int(job) % 1000))
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise MeshError(f"MASTER_PORT is {port!r}", allowed="a port from 1 to 65535")
        return f"tcp://{host}:{port}"


def first_host(nodelist: str) -> str:
    """First host of a SLURM node list: `gpu[07-09,12],cpu1` gives `gpu07`."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodelist)
    return "".join(part or "" for part in match.groups()) if match else ""


def init_world(world: World | None = None, *, device: str = "auto", timeout_seconds: float = 1800.0) -> World:
    """Join the default process group: NCCL on CUDA, gloo on CPU. Does nothing where it exists already.

    Args:
        world: Who this process is; read from the environment by default.
        device: `cpu`, `cuda` or `auto` (CUDA where there is a GPU).
        timeout_seconds: How long a collective may wait for its slowest rank.

    Raises:
        MeshError: The device does not exist, or there are more ranks than GPUs on this host.
    """
    world = world or detect_world(os.environ)
    if dist.is_initialized():
        return world
    kind = device_type(device)
    if kind == "cuda":
        _claim_gpu(world)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
            store=_store(world),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise MeshError(
            f"rank {world.rank} of {world.size} could not meet the others at {world.init_method}: "
            f"{str(error).splitlines()[0]}",
            allowed=f"all ranks started within {MEETING_SECONDS} s, each rank once, and a free port on rank 0's host",
            remedy="look whether all ranks run, or set MASTER_ADDR and MASTER_PORT",
        ) from error
    return world


def _store(world: World) -> Any:
    """Where the ranks find each other; they wait a limited time for one that never comes."""
    if world.size == 1:
        return dist.HashStore()  # type: ignore[attr-defined]
    where = urlparse(world.init_method)
    if where.scheme == "file":
        return dist.FileStore(where.path, world.size)  # type: ignore[attr-defined]
    return dist.TCPStore(  # type: ignore[attr-defined]
        where.hostname or "", where.port or 0, world.size, world.rank == 0, timeout=timedelta(seconds=MEETING_SECONDS)
    )


def device_type(device: str) -> str:
    """`cpu` or `cuda` for `cpu`, `cuda` or `auto`."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise MeshError(
            f"device {device!r}" + (", and torch sees no GPU" if device == "cuda" else ""),
            allowed="auto, cpu, or cuda where torch.cuda.is_available()",
        )
    return device


def _claim_gpu(world: World) -> None:
    if world.local_rank >= torch.cuda.device_count():
        raise MeshError(
            f"local rank {world.local_rank} on a host with {torch.cuda.device_count()} GPUs",
            allowed="one rank a GPU",
            remedy="start fewer ranks on this host, or run on the CPU (--parallel.device cpu)",
        )
    torch.cuda.set_device(world.local_rank)


def init_mesh(
    sequence: int = 1,
    data: int = 1,
    *,
    device: str = "auto",
    world: World | None = None,
    timeout_seconds: float = 1800.0,
) -> DeviceMesh:
    """Make the mesh of `data` x `sequence` ranks; neighbouring ranks form a sequence group, so that it stays in a node.

    Starts the default process group if there is none, from the environment of torchrun, SLURM (`srun`) or MPI.
    Others call the `sequence` axis context parallel (`cp`).

    Args:
        sequence: N, ranks that hold one sequence together.
        data: M, sequence groups, each with other sequences.
        device: `cpu`, `cuda` or `auto` (CUDA where there is a GPU).
        world: Who this process is; read from the environment by default.
        timeout_seconds: How long a collective may wait for its slowest rank.

    Returns:
        A DeviceMesh of shape [M, N] with the axes `data` and `sequence`.

    Raises:
        MeshError: M * N is not the number of ranks, or the launcher's environment is incomplete.

    Example:
        >>> mesh = init_mesh(sequence=1, data=1, device="cpu")
        >>> mesh.mesh_dim_names
        ('data', 'sequence')
    """
    world = world or detect_world(os.environ)
    size = dist.get_world_size() if dist.is_initialized() else world.size
    check_degrees(sequence, data, size)
    init_world(world, device=device, timeout_seconds=timeout_seconds)
    return init_device_mesh(device_type(device), (data, sequence), mesh_dim_names=(DATA, SEQUENCE))


def check_degrees(sequence: int, data: int, world_size: int | None = None) -> None:
    """Raise MeshError unless both degrees are at least 1 and, where the world is known, fill it."""
    if sequence < 1 or data < 1:
        raise MeshError(f"sequence={sequence}, data={data}", allowed="whole numbers of at least 1")
    needed = sequence * data
    if world_size is not None and needed != world_size:
        raise MeshError(
            f"sequence={sequence} x data={data} needs {needed} ranks, but the world has {world_size}",
            allowed=f"degrees whose product is {world_size}",
            remedy=f"start {needed} ranks (torchrun --nproc-per-node {needed} ...), or change the degrees",
        )
