"""Launchers' environments, as their manuals describe them."""

import pytest

from lss.errors import MeshError
from lss.mesh import check_degrees, detect_world, first_host

SLURM = {
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_JOB_ID": "41234",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {
    "RANK": "6",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1234",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, ("torchrun", 6, 8, 2, 4, "tcp://node0:1234")),
        (SLURM, ("slurm", 5, 7, 1, 2, "tcp://gpu07:29734")),
        (SLURM | {"MASTER_ADDR": "ib0", "MASTER_PORT": "5"}, ("slurm", 5, 7, 1, 2, "tcp://ib0:5")),
        (OPEN_MPI, ("openmpi", 3, 4, 3, 4, "tcp://127.0.0.1:29500")),
        (OPEN_MPI | SLURM, ("openmpi", 3, 4, 3, 4, "tcp://127.0.0.1:29734")),
        (MPICH, ("mpich", 1, 2, 1, 2, "tcp://127.0.0.1:29500")),
        (TORCHRUN | SLURM, ("torchrun", 6, 8, 2, 4, "tcp://node0:1234")),
        ({}, ("none", 0, 1, 0, 1, "")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, ("none", 0, 1, 0, 1, "")),  # a batch script, not a task of it
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, ("none", 0, 1, 0, 1, "")),  # an interactive shell
    ],
)
def test_reads_each_launcher(environment, expected):
    world = detect_world(environment)
    found = (world.launcher, world.rank, world.size, world.local_rank, world.local_size, world.init_method)
    assert found == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "MASTER_ADDR"),
        ({name: value for name, value in TORCHRUN.items() if name != "MASTER_ADDR"}, "MASTER_ADDR"),
        ({"RANK": "0"}, "WORLD_SIZE"),
        (TORCHRUN | {"LOCAL_RANK": "two"}, "LOCAL_RANK is 'two'"),
        (TORCHRUN | {"RANK": "²"}, "RANK is '²'"),
        (TORCHRUN | {"RANK": "8"}, "RANK is 8 in a world of 8"),
        (TORCHRUN | {"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc'"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT is '99999'"),
    ],
)
def test_an_incomplete_environment_is_named(environment, message):
    with pytest.raises(MeshError, match=message):
        detect_world(environment)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("gpu[07-09,12],cpu1", "gpu07"), ("a", "a"), ("n1,n2", "n1"), ("r[3]s", "r3s"), ("", "")],
)
def test_first_host_of_a_node_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize(("sequence", "data", "size"), [(0, 1, None), (1, -1, None), (2, 2, 3), (1, 1, 4)])
def test_degrees_must_fit(sequence, data, size):
    with pytest.raises(MeshError, match="allowed"):
        check_degrees(sequence, data, size)
