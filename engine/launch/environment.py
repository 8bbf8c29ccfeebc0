# SPDX-License-Identifier: Apache-2.0
"""The rank of this process, from the variables of whichever launcher started it.

DeepSpeed and torch read ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and
``MASTER_PORT``, which ``deepspeed`` and ``torchrun`` set. ``mpirun`` and ``srun`` set variables of
their own and no address; `torch_variables` derives what is missing.
"""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from wavemare.errors import LaunchError

TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The variables that DeepSpeed and torch need."""

# Rank, size, local rank, local size. Slurm comes last: a process that mpirun started inside a Slurm
# job has Slurm's variables as well, but those of mpirun's daemon.
_LAUNCHERS = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Not SLURM_NTASKS, which a batch script has as well, though it is one process.
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
}
_BY_MPI = frozenset({"Open MPI", "MPICH"})
"""Launchers whose ranks have MPI, by which they agree on an address."""
RANK_VARIABLES = ("RANK", *(names[0] for names in _LAUNCHERS.values()), "PMIX_RANK")
"""Variables that may hold the rank, in order of preference."""

SIZE_VARIABLES = ("WORLD_SIZE", *(names[1] for names in _LAUNCHERS.values()))
"""Variables that may hold the number of ranks, in order of preference."""

# torchrun's names; `wavemare train --max-restarts` uses them, too.
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
JOB_STARTED = "WAVEMARE_JOB_STARTED"
"""When ``wavemare train --max-restarts`` has started (Unix time)."""
RESTARTED = "WAVEMARE_RESTARTED"
"""Of a process that was started again: when a rank died, and when this one started (Unix times)."""
LIGHTHOUSE, REPLICA = "TORCHFT_LIGHTHOUSE", "WAVEMARE_REPLICA"
"""Of replicas that come and go: the address of the lighthouse, and the number of this one."""

_SWITCHES = ("WAVEMARE_COMPILED_OPS", "WAVEMARE_VERBOSE")
_RANGES = {
    "RANK": (0, None),
    "LOCAL_RANK": (0, None),
    "WORLD_SIZE": (1, None),
    "LOCAL_WORLD_SIZE": (1, None),
    "MASTER_PORT": (1, 65535),
}
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Below Linux's default range of ephemeral ports, which other processes take at random.
_PORTS = range(20_000, 30_000)
_PORT_TRIES = 50
_NUMBER = re.compile("[0-9]{1,9}")
_ANY_OTHER_HOST = "192.0.2.1"


@dataclass(frozen=True)
class LauncherRank:
    """The rank that ``mpirun`` or ``srun`` gave to a process.

    Attributes:
        launcher: ``Open MPI``, ``MPICH`` (or an MPI derived from it) or ``Slurm``.
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Rank among those of this host; None if unknown.
        local_world_size: Number of ranks on this host; None if unknown.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None

    @property
    def by_mpi(self) -> bool:
        """Whether an ``mpirun`` started the process."""
        return self.launcher in _BY_MPI


def launcher_rank(environment: Mapping[str, str]) -> LauncherRank | None:
    """Return the rank that ``mpirun`` or ``srun`` gave to a process; None if neither started it."""
    for launcher, names in _LAUNCHERS.items():
        if launcher == "MPICH" and "PMI2_SUN_PATH" in environment:
            continue  # srun --mpi=pmi2 sets MPICH's variables, too
        rank, size, local_rank, local_size = (_number(environment.get(name)) for name in names)
        if rank is not None and size is not None:
            return LauncherRank(launcher, rank, size, local_rank, local_size)
    return None


def check_environment(environment: Mapping[str, str]) -> None:
    """Check torch's variables and our switches, before torch fails on them without naming any.

    Raises:
        LaunchError: A value is invalid, or a rank is not below the number of ranks.
    """
    remedy = "Unset it, and start the script by a launcher"
    for name in _SWITCHES:
        if environment.get(name, "0") not in ("0", "1"):
            raise LaunchError(name, environment[name], "it is neither 0 nor 1", "Set 0 or 1")
    if environment.get("MASTER_ADDR") == "":
        raise LaunchError("MASTER_ADDR", "", "it is empty", "Name the host of rank 0, or unset it")
    for name, (least, most) in _RANGES.items():
        number = _number(environment.get(name, str(least)))
        if number is None or number < least or (most is not None and number > most):
            range_ = f"of {least} or more" if most is None else f"from {least} to {most}"
            raise LaunchError(name, environment[name], f"it is no whole number {range_}", remedy)
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if {rank, size} <= environment.keys() and int(environment[rank]) >= int(environment[size]):
            reason = f"{size} is {environment[size]}, and ranks count from 0"
            raise LaunchError(rank, environment[rank], reason, remedy)


def torch_variables(
    environment: Mapping[str, str], given: LauncherRank, port: int | None = None
) -> dict[str, str]:
    """Return torch's variables that a process lacks, the same address and port on all ranks.

    Under an MPI launcher without ``MASTER_ADDR`` and ``MASTER_PORT`` this initializes MPI, and all
    processes have to call it.

    Args:
        environment: The variables of the process; it keeps those of torch that it has.
        given: From `launcher_rank`.
        port: The port of rank 0; None to choose one.

    Raises:
        LaunchError: The processes cannot find each other.
    """
    address: str | None = None
    chosen: int | None = None
    local_rank = given.local_rank
    if {"MASTER_ADDR", "MASTER_PORT"} <= environment.keys() and local_rank is not None:
        pass  # nothing to agree upon
    elif given.by_mpi:
        address, chosen, local_rank = _agree_by_mpi(environment, given)
    elif given.launcher == "Slurm":
        address, chosen = _derive_from_slurm(environment, given)
    found = {
        "RANK": given.rank,
        "WORLD_SIZE": given.world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": given.local_world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port or chosen,
    }
    return {
        name: str(value)
        for name, value in found.items()
        if value is not None and name not in environment
    }


def first_host(nodes: str) -> str:
    """Return the first host of a node list of Slurm.

    Args:
        nodes: For example ``rack1-[08-11,15],gpu2``, whose first host is ``rack1-08``.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else "")


def host_address(environment: Mapping[str, str]) -> str:
    """Return this host's IPv4 address that other hosts are likely to reach.

    It belongs to the interface in ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME``, else to the
    host's name, else to the default route.

    Raises:
        LaunchError: There is no such address.
    """
    import psutil

    interfaces = psutil.net_if_addrs()
    for variable in _INTERFACES:
        for entry in interfaces.get(environment.get(variable, "").lstrip("="), []):
            if entry.family == socket.AF_INET:
                return str(entry.address)
    for find in (lambda: socket.gethostbyname(socket.gethostname()), address_of_route):
        with suppress(OSError):
            address = find()
            if not address.startswith("127."):
                return address
    reason = "this host has no address that other hosts could reach"
    remedy = "Set MASTER_ADDR to the address of rank 0's host, or GLOO_SOCKET_IFNAME"
    raise LaunchError("MASTER_ADDR", None, reason, remedy)


def free_port() -> int:
    """Return a TCP port on which nobody listens, below the range of ephemeral ports."""
    for port in random.SystemRandom().sample(_PORTS, _PORT_TRIES):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise LaunchError("MASTER_PORT", None, "no free port was found", "Set MASTER_PORT")


def _derive_from_slurm(environment: Mapping[str, str], given: LauncherRank) -> tuple[str, int]:
    """Return an address and a port that every process of a job step derives alike."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if not nodes and given.world_size > 1:
        reason = "Slurm does not say which hosts the job step has"
        raise LaunchError("SLURM_STEP_NODELIST", None, reason, "Start the script by srun")
    job, step = (_number(environment.get(f"SLURM_{name}_ID")) or 0 for name in ("JOB", "STEP"))
    one_host = environment.get("SLURM_STEP_NUM_NODES") == "1" or given.world_size == 1
    address = "127.0.0.1" if one_host else first_host(nodes)
    return address, _PORTS[(job * 7 + step) % len(_PORTS)]


def _agree_by_mpi(environment: Mapping[str, str], given: LauncherRank) -> tuple[str, int, int]:
    """Return address and port of rank 0, and the local rank of this process."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = f"the ranks cannot agree on an address ({str(error).splitlines()[0]})"
        remedy = "Set MASTER_ADDR and MASTER_PORT, or install MPI: pip install 'wavemare[mpi]'"
        raise LaunchError("mpi4py", None, reason, remedy) from None
    world = MPI.COMM_WORLD
    if world.Get_size() != given.world_size:
        reason = (
            f"mpirun ({given.launcher}) has started {given.world_size} processes, but mpi4py "
            f"({MPI.get_vendor()[0]}) sees {world.Get_size()}"
        )
        remedy = "Use the mpirun of mpi4py's MPI; 'wavemare doctor' names the two"
        raise LaunchError("mpirun", given.launcher, reason, remedy)
    hosts: list[str] = world.allgather(MPI.Get_processor_name())
    meeting = None
    if given.rank == 0:
        one_host = len(set(hosts)) == 1
        meeting = "127.0.0.1" if one_host else host_address(environment), free_port()
    address, port = world.bcast(meeting)
    return address, port, hosts[: given.rank].count(hosts[given.rank])


def address_of_route() -> str:
    """Return the local address of the default route.

    Nothing is sent: the kernel only chooses the address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((_ANY_OTHER_HOST, 9))
        return str(probe.getsockname()[0])


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None
