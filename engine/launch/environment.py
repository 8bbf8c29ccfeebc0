# SPDX-License-Identifier: Apache-2.0
"""The place of this process in a job, from the variables of whichever launcher started it.

DeepSpeed and torch read ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and
``MASTER_PORT``, which ``deepspeed`` and ``torchrun`` set. ``mpirun`` and ``srun`` have names of
their own, and tell nobody where the ranks are to meet.
"""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavemare.errors import LaunchError

__all__ = [
    "RANK_VARIABLES",
    "SIZE_VARIABLES",
    "TORCH_VARIABLES",
    "Place",
    "check_environment",
    "check_mpi",
    "first_host",
    "free_port",
    "launcher_variables",
    "meet",
    "mpi_place",
    "own_address",
    "place_of",
    "ports_apart",
    "reserved_port",
]

_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 10_000
_FEWEST_PORTS = 1_000
"""Among fewer, jobs that start at once would choose the same one too often."""
_PORT_TRIES = 50

TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What DeepSpeed and torch need."""

# Rank, size, rank on the host, ranks on the host. A process that mpirun started inside a Slurm job
# has Slurm's variables as well, but those of the daemon that started it: Slurm's come last.
_FAMILIES = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # SLURM_NTASKS would also be set in a batch script, of which there is one process only.
    "Slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
}
RANK_VARIABLES = ("RANK", *(names[0] for names in _FAMILIES.values()), "PMIX_RANK")
"""In which a launcher may tell the rank, the first that is set being the right one."""

SIZE_VARIABLES = ("WORLD_SIZE", *(names[1] for names in _FAMILIES.values()))
"""In which a launcher may tell the number of ranks."""

_SWITCHES = ("WAVEMARE_COMPILED_OPS", "WAVEMARE_VERBOSE")
# Of torchrun and of DeepSpeed's part for one host.
_NESTED = {"TORCHELASTIC_RUN_ID", "CROSS_RANK"}
_LAST_PORT = 65535
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Below the ports that the kernel gives to outgoing connections.
_FIRST_PORT, _PORTS = 20000, 10000
_DIGITS = re.compile("[0-9]{1,9}")
# Nothing is sent there; the kernel only tells which of its own addresses it would use.
_SOMEWHERE = ("192.0.2.1", 9)


@dataclass(frozen=True)
class Place:
    """A process among those of its job.

    Attributes:
        launcher: ``Open MPI``, ``MPICH`` (and its kin) or ``Slurm``.
        rank: Among all.
        world_size: Number of all.
        local_rank: Among those on this host; None if the launcher does not tell.
        local_world_size: Number of those on this host; None if the launcher does not tell.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None


def place_of(environment: Mapping[str, str]) -> Place | None:
    """Return the place that ``mpirun`` or ``srun`` gave to a process; None if neither started it.

    Args:
        environment: The process's variables.
    """
    for launcher, names in _FAMILIES.items():
        rank, size, local_rank, local_size = (_number(environment.get(name)) for name in names)
        if rank is not None and size is not None:
            return Place(launcher, rank, size, local_rank, local_size)
    return None


def mpi_place(environment: Mapping[str, str]) -> Place | None:
    """Return this process's place among those of an ``mpirun``; None if none started it."""
    place = place_of(environment)
    return place if place is not None and place.launcher != "Slurm" else None


def check_environment(environment: Mapping[str, str]) -> None:
    """Check what launchers, and the user in their place, say of a process, and our own switches.

    Args:
        environment: The process's variables.

    Raises:
        LaunchError: One is not what it should be, or two contradict each other. torch would fail
            with a traceback, or wait for ranks that there are not.
    """
    for name in _SWITCHES:
        if environment.get(name, "0") not in ("0", "1"):
            raise LaunchError(name, environment[name], "it is neither 0 nor 1", "Give one of them")
    if environment.get("MASTER_ADDR") == "":
        raise LaunchError("MASTER_ADDR", "", "it is empty", "Name the host of rank 0, or unset it")
    ranges = {name: (0, None) for name in ("RANK", "LOCAL_RANK")}
    ranges |= {name: (1, None) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    for name, (least, most) in (ranges | {"MASTER_PORT": (1, _LAST_PORT)}).items():
        _check_number(environment, name, least, most)
    _check_below(environment, "RANK", "WORLD_SIZE")
    _check_below(environment, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if not all(name in environment for name in TORCH_VARIABLES):
        for rank, size, *_ in _FAMILIES.values():
            if rank in environment and size in environment:
                _check_number(environment, rank, 0)
                _check_number(environment, size, 1)
                _check_below(environment, rank, size)
    _check_agreement(environment)


def _check_number(
    environment: Mapping[str, str], name: str, least: int, most: int | None = None
) -> None:
    text = environment.get(name)
    if text is None:
        return
    number = _number(text)
    if number is None or number < least or (most is not None and number > most):
        range_ = f"of {least} or more" if most is None else f"from {least} to {most}"
        reason = f"it is no whole number {range_}"
        raise LaunchError(name, text, reason, "Unset it, and start the script by a launcher")


def _check_below(environment: Mapping[str, str], rank: str, size: str) -> None:
    if rank in environment and size in environment:
        place, total = int(environment[rank]), int(environment[size])
        if place >= total:
            reason = f"{size} is {total}, and ranks count from 0"
            raise LaunchError(rank, place, reason, "Unset both, and start the script by a launcher")


def _check_agreement(environment: Mapping[str, str]) -> None:
    """Check that ``mpirun`` and torch's variables speak of the same number of processes."""
    place = place_of(environment)
    # A launcher of torch's variables may itself have been started by mpirun, once on each host.
    if place is None or place.launcher == "Slurm" or environment.keys() & _NESTED:
        return
    size = environment.get("WORLD_SIZE")
    if size is not None and int(size) != place.world_size:
        reason = f"mpirun ({place.launcher}) has started {place.world_size} processes"
        remedy = f"Unset {', '.join(TORCH_VARIABLES)}, which mpirun's own variables replace"
        raise LaunchError("WORLD_SIZE", int(size), reason, remedy)


def launcher_variables(
    environment: Mapping[str, str], place: Place, port: int | None = None
) -> dict[str, str]:
    """Return torch's variables that a process lacks, in agreement with all others of its job.

    Under an MPI launcher without ``MASTER_ADDR`` and ``MASTER_PORT`` this initializes MPI, and all
    processes have to call it.

    Args:
        environment: The process's variables; what it has of torch's is kept.
        place: From `place_of`.
        port: Where rank 0 listens; None to choose one.

    Raises:
        LaunchError: The processes cannot find each other.
    """
    address: str | None = None
    free: int | None = None
    local_rank = place.local_rank
    known = "MASTER_ADDR" in environment and "MASTER_PORT" in environment
    if known and local_rank is not None:
        pass  # nothing to agree upon
    elif place.launcher == "Slurm":
        address, free = _meet_by_slurm(environment, place)
    else:
        address, free, local_rank = _meet_by_mpi(environment, place)
    found = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "MASTER_ADDR": address,
        "MASTER_PORT": port or free,
    }
    return {
        name: str(value)
        for name, value in found.items()
        if value is not None and name not in environment
    }


def first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it.

    Args:
        nodes: Such as ``rack1-[08-11,15],gpu2``, which starts with ``rack1-08``.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0] if first else "")


def own_address(environment: Mapping[str, str]) -> str:
    """Return this host's IPv4 address that other hosts are likely to reach.

    That of the interface which the user names for gloo or NCCL, else of the host's name, else of
    the interface of the default route.

    Raises:
        LaunchError: There is no such address.
    """
    import psutil

    interfaces = psutil.net_if_addrs()
    for variable in _INTERFACES:
        for entry in interfaces.get(environment.get(variable, "").lstrip("="), []):
            if entry.family == socket.AF_INET:
                return str(entry.address)
    for find in (_address_of_name, _address_of_route):
        try:
            address = find()
        except OSError:
            continue
        if not address.startswith("127."):
            return address
    reason = "no address of this host can be found that other hosts could reach"
    remedy = "Set MASTER_ADDR to the address of rank 0's host, or GLOO_SOCKET_IFNAME"
    raise LaunchError("MASTER_ADDR", None, reason, remedy)


@contextmanager
def reserved_port(ports: Sequence[int] | None = None) -> Iterator[int]:
    """Yield a TCP port that others get only by asking for it, as a rank 0 that is started does.

    Where it can, it is none of those that the system gives to programs that ask for any, which are
    many while ranks start: it stays free, most probably, until rank 0 listens, also if not held.

    Args:
        ports: Those to choose from; None for `ports_apart`.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # rank 0's store sets it, too
        ports = ports_apart() if ports is None else ports
        for port in random.SystemRandom().choices(ports, k=_PORT_TRIES if ports else 0):
            # Who may share a port is told that one is free that others share.
            with suppress(OSError), socket.socket() as alone:
                alone.bind(("", port))
                alone.close()
                holder.bind(("", port))
                break
        else:
            holder.bind(("", 0))
        yield int(holder.getsockname()[1])


def ports_apart(range_file: Path = _EPHEMERAL_PORTS) -> Sequence[int]:
    """Return ports below those that Linux gives to who asks for any; none if they are too few.

    Those from 30,000 are Kubernetes', and two are what torch takes by itself.

    Args:
        range_file: Has the first and the last port that Linux gives to who asks for any.
    """
    first = 32768
    with suppress(OSError, ValueError):
        first = int(range_file.read_text(encoding="ascii").split()[0])
    ports = [port for port in range(_LOWEST_PORT, min(first, 30_000)) if port not in (29400, 29500)]
    return ports if len(ports) >= _FEWEST_PORTS else []


def free_port() -> int:
    """Return a TCP port on which nobody listens at the moment."""
    with reserved_port() as port:
        return port


def _meet_by_slurm(environment: Mapping[str, str], place: Place) -> tuple[str, int]:
    """Work out the meeting point that all processes of a job step come to by themselves."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if not nodes and place.world_size > 1:
        reason = "Slurm does not say which hosts the job step has"
        raise LaunchError("SLURM_STEP_NODELIST", None, reason, "Start the script by srun")
    job, step = (_number(environment.get(f"SLURM_{name}_ID")) or 0 for name in ("JOB", "STEP"))
    one_host = environment.get("SLURM_STEP_NUM_NODES") == "1" or place.world_size == 1
    address = "127.0.0.1" if one_host else first_host(nodes)
    return address, _FIRST_PORT + (job * 7 + step) % _PORTS


def _meet_by_mpi(environment: Mapping[str, str], place: Place) -> tuple[str, int, int]:
    """Agree over MPI; return address and port of rank 0, and this process's local rank."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = f"the ranks cannot ask each other where to meet ({str(error).splitlines()[0]})"
        remedy = "Set MASTER_ADDR and MASTER_PORT, or install MPI: pip install 'wavemare[mpi]'"
        raise LaunchError("mpi4py", None, reason, remedy) from None
    world = MPI.COMM_WORLD
    check_mpi(world, place)
    address, port, hosts = meet(environment, world)
    return address, port, hosts[: place.rank].count(hosts[place.rank])


def check_mpi(world: Any, place: Place) -> None:
    """Check that mpi4py's MPI is that of the ``mpirun`` which started this process.

    Args:
        world: mpi4py's communicator of all processes.
        place: From `place_of`.

    Raises:
        LaunchError: It is another one, to which this process is alone.
    """
    from mpi4py import MPI

    if world.Get_size() != place.world_size:
        reason = (
            f"mpirun ({place.launcher}) has started {place.world_size} processes, but mpi4py "
            f"({MPI.get_vendor()[0]}) sees {world.Get_size()}"
        )
        remedy = "Use the mpirun of mpi4py's MPI; 'wavemare doctor' names the two"
        raise LaunchError("mpirun", place.launcher, reason, remedy)


def meet(environment: Mapping[str, str], comm: Any) -> tuple[str, int, list[str]]:
    """Agree over MPI where ranks are to meet; all processes of a communicator call it.

    Args:
        environment: The process's variables.
        comm: mpi4py's.

    Returns:
        Address and free port of the first process, and the host of each.
    """
    from mpi4py import MPI

    hosts: list[str] = comm.allgather(MPI.Get_processor_name())
    point = None
    if comm.Get_rank() == 0:
        one_host = len(set(hosts)) == 1
        point = ("127.0.0.1" if one_host else own_address(environment), free_port())
    address, port = comm.bcast(point)
    return address, port, hosts


def _address_of_name() -> str:
    return socket.gethostbyname(socket.gethostname())


def _address_of_route() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_SOMEWHERE)
        return str(probe.getsockname()[0])


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and _DIGITS.fullmatch(text) else None
