# SPDX-License-Identifier: Apache-2.0
"""The variables of each launcher become torch's; how processes are started."""

import os
import socket
import subprocess
import sys

import pytest

from support.refusals import refuses
from wavemare.engine.launch.environment import (
    LauncherRank,
    first_host,
    free_port,
    host_address,
    launcher_rank,
    torch_variables,
)
from wavemare.engine.launch.group import compiled_ops_enabled, ensure_launched
from wavemare.errors import LaunchError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
# As srun sets them for the last of four tasks on two nodes of job 1234, step 5.
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "5",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[03-04,09]",
    "SLURM_STEP_NODELIST": "gpu[04,09]",
}
MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (OPEN_MPI, LauncherRank("Open MPI", 3, 4, 1, 2)),
        (MPICH, LauncherRank("MPICH", 3, 4, 1, 2)),
        (SLURM, LauncherRank("Slurm", 3, 4, 1, None)),
        ({**MPICH, **SLURM, "SLURM_PROCID": "0"}, LauncherRank("MPICH", 3, 4, 1, 2)),
        ({**MPICH, **SLURM, "PMI2_SUN_PATH": "/s"}, LauncherRank("Slurm", 3, 4, 1, None)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, LauncherRank("MPICH", 0, 1, None, None)),
        ({"PMI_RANK": "0"}, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, None),
        # A batch script has these, and is one process.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"}, None),
        ({}, None),
    ],
)
def test_place(environment, place):
    assert launcher_rank(environment) == place


def test_slurm_needs_nobody_to_agree():
    place = launcher_rank(SLURM)
    found = torch_variables(SLURM, place)
    port = int(found.pop("MASTER_PORT"))
    assert found == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu04"}
    first = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert torch_variables(first, launcher_rank(first))["MASTER_PORT"] == str(port)
    assert 20000 <= port < 30000
    next_step = {**SLURM, "SLURM_STEP_ID": "6"}
    assert torch_variables(next_step, place)["MASTER_PORT"] != str(port)
    assert torch_variables(SLURM, place, port=777)["MASTER_PORT"] == "777"
    alone = {**SLURM, "SLURM_STEP_NUM_NODES": "1"}
    assert torch_variables(alone, place)["MASTER_ADDR"] == "127.0.0.1"


def test_slurm_without_nodes_is_refused():
    blind = {name: value for name, value in SLURM.items() if "NODELIST" not in name}
    with refuses(LaunchError, "SLURM_STEP_NODELIST", None):
        torch_variables(blind, launcher_rank(blind))


@pytest.mark.parametrize("environment", [OPEN_MPI, MPICH, SLURM])
def test_what_the_user_has_set_stays(environment):
    environment = {**environment, **MEETING}
    found = torch_variables(environment, launcher_rank(environment), port=777)
    sizes = {} if environment.keys() >= SLURM.keys() else {"LOCAL_WORLD_SIZE": "2"}
    assert found == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **sizes}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node0", "node0"),
        ("node0,node1", "node0"),
        ("gpu[04,09]", "gpu04"),
        ("gpu[3-4]", "gpu3"),
        ("a1-[08-11,15],b2", "a1-08"),
        ("r[0-1]n[2-3].site", "r0n2.site"),
        ("login,gpu[1-2]", "login"),
        ("", ""),
    ],
)
def test_first_host(nodes, host):
    assert first_host(nodes) == host


def test_host_address_is_that_of_the_named_interface():
    assert host_address({"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    assert host_address({"NCCL_SOCKET_IFNAME": "=lo"}) == "127.0.0.1"


class Route:
    """Stands for a socket, which the kernel gives the address of the default route."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def connect(self, address):
        pass

    def getsockname(self):
        return "10.1.2.3", 9


class NoRoute(Route):
    def connect(self, address):
        raise OSError("Network is unreachable")


@pytest.mark.parametrize(
    ("named", "route", "address"),
    [
        ("127.0.1.1", Route, "10.1.2.3"),
        ("10.9.9.9", Route, "10.9.9.9"),
        ("127.0.1.1", NoRoute, None),
    ],
)
def test_host_address_is_never_a_loopback_by_itself(monkeypatch, named, route, address):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: named)
    monkeypatch.setattr(socket, "socket", route)
    if address is None:
        with refuses(LaunchError, "MASTER_ADDR", None):
            host_address({})
    else:
        assert host_address({}) == address


def test_a_foreign_mpirun_is_named():
    """A process that says it is one of four, while MPI says that it is alone."""
    program = (
        "import os\n"
        "import mpi4py.MPI\n"
        "from wavemare.engine.launch.environment import torch_variables, launcher_rank\n"
        "torch_variables(os.environ, launcher_rank(os.environ))\n"
    )
    dropped = ("PMI", "OMPI_", "MPI_", "HYDI_", "MASTER_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    foreign = {name: value for name, value in OPEN_MPI.items() if name != "PMIX_RANK"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**clean, **foreign},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 1
    assert "has started 4 processes, but mpi4py" in done.stderr
    assert "sees 1" in done.stderr


def test_a_free_port_can_be_had():
    port = free_port()
    assert 20_000 <= port < 30_000
    with socket.create_server(("", port)):
        pass


TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


@pytest.fixture
def bare(monkeypatch):
    for name in (*TORCH, *(name for names in MPI for name in names)):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_no_launcher_is_refused_with_the_commands_that_work(bare):
    with refuses(LaunchError, "launcher", None) as caught:
        ensure_launched()
    for launcher in ("wavemare train", "deepspeed", "torchrun", "mpirun", "srun"):
        assert launcher in caught.value.remedy


@pytest.mark.parametrize("names", [TORCH, *MPI])
def test_each_launchers_variables_are_enough(bare, names):
    for name in names:
        bare.setenv(name, "0" if name.endswith(("RANK", "PROCID")) else "1")
    ensure_launched()


@pytest.mark.parametrize(("value", "enabled"), [(None, False), ("0", False), ("1", True)])
def test_compiled_parts_are_off_by_default(monkeypatch, value, enabled):
    monkeypatch.delenv("WAVEMARE_COMPILED_OPS", raising=False)
    if value is not None:
        monkeypatch.setenv("WAVEMARE_COMPILED_OPS", value)
    assert compiled_ops_enabled() is enabled
