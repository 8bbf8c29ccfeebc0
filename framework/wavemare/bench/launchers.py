# SPDX-License-Identifier: Apache-2.0
"""Two ways to start a program on the hosts of a laboratory: rank by rank, and by ``mpirun``."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wavemare.bench.namespaces import KINDS, Namespaces
from wavemare.bench.ranks import Host, RankGroup
from wavemare.comm.mpi_library import describe_mpi

__all__ = ["Job", "start_by_mpirun", "start_each"]

_INTERFACE = "eth0"
_LAUNCHER_LOG = "launcher.log"
_mpi = functools.cache(describe_mpi)  # it starts processes
# A rank that inherited them would join the job of which this process is a rank.
_JOB_PREFIXES = ("PMI", "OMPI_COMM_", "OMPI_UNIVERSE_", "PRTE_", "HYDI_", "MPI_LOCAL")
_JOB_NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "HOSTNAME")
# Both ways end here, in a shell that becomes the rank. The counter names are those of the
# launchers: none, MPICH's and Open MPI's.
_BECOME_RANK = """
RANK=${RANK:-${PMI_RANK:-$OMPI_COMM_WORLD_RANK}}
export RANK LOCAL_RANK=$((RANK % LOCAL_WORLD_SIZE))
cd "$1"
echo $$ >"$2/rank_$RANK.pid"
exec >"$3/rank_$RANK.log" 2>&1
shift 3
exec "$@"
"""
# The parent of a rank outside its host. ``nsenter`` itself would stop with a rank that is stopped,
# and not go on with it.
_WAIT = '"$@"; exit $?'
# Started by mpirun in the place of ssh: options, a host, and words for a shell there.
_AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
exec nsenter --target "$(cat "{folder}/$host.pid")" {kinds} -- sh -c "$*"
"""
# Given only where the user has not chosen. Measured on four hosts of 1 Gbit/s, MPICH's dense
# allreduce of 100 MB takes 1.33 s over libfabric and 1.75 s over UCX, its default (the link: 1.25).
_TUNING = {
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp",
}
_NETWORK_SETTINGS = {
    "GLOO_SOCKET_IFNAME": _INTERFACE,
    "TP_SOCKET_IFNAME": _INTERFACE,
    "NCCL_SOCKET_IFNAME": _INTERFACE,
    # MPICH's two ways to the network, UCX and libfabric.
    "UCX_NET_DEVICES": _INTERFACE,
    "FI_TCP_IFACE": _INTERFACE,
    "FI_SOCKETS_IFACE": _INTERFACE,
    "OMPI_MCA_btl_tcp_if_include": _INTERFACE,
    "OMPI_MCA_pml": "ob1",
    # Its daemons' folders are named after their process numbers, which are alike on all hosts.
    "PRTE_MCA_prte_tmpdir_base": "/dev/shm",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to run, and where.

    Attributes:
        command: The program and its arguments.
        hosts: They get the ranks, one host after the other.
        head: The namespaces in which the hosts' are nested.
        ranks_per_host: Number of processes on each host.
        environment: Variables added to those of this process.
        folder: An empty one, for the job's own files.
        logs: Folder of outputs; None to print them.
        port: Of the ranks' meeting point on the first host.
    """

    command: Sequence[str]
    hosts: Sequence[Host]
    head: Namespaces
    ranks_per_host: int
    environment: Mapping[str, str]
    folder: Path
    logs: Path | None
    port: int

    @property
    def ranks(self) -> int:
        """Number of processes on all hosts."""
        return len(self.hosts) * self.ranks_per_host


def start_each(job: Job) -> RankGroup:
    """Start each rank by itself, as ``torchrun`` does."""
    outputs = _log_folder(job)
    variables = _environment(job)
    processes = []
    for rank in range(job.ranks):
        host = job.hosts[rank // job.ranks_per_host]
        enter = host.namespaces.enter("--no-fork", *KINDS)
        words = [*enter, "sh", "-c", _WAIT, "sh", *_rank_words(job, outputs)]
        processes.append(_start(words, {**variables, "RANK": str(rank)}, outputs / _LAUNCHER_LOG))
    return _group(job, processes, outputs)


def start_by_mpirun(job: Job) -> RankGroup:
    """Start all ranks by the ``mpirun`` of this environment, run beside the switch.

    It reaches the hosts by a script in the place of ``ssh``.

    Raises:
        LaunchError: There is no ``mpirun`` that belongs to the MPI of mpi4py.
    """
    mpi = _mpi()
    program = mpi.mpirun()
    agent = job.folder / "agent"
    agent.write_text(_AGENT.format(folder=job.folder, kinds=" ".join(KINDS)))
    agent.chmod(0o755)
    for host in job.hosts:
        (job.folder / f"{host.name}.pid").write_text(str(host.namespaces.pid))
    options = _open_mpi_options if mpi.launcher_flavour == "Open MPI" else _mpich_options
    outputs = _log_folder(job)
    words = [*job.head.enter(), program, "-n", str(job.ranks), *options(job, agent)]
    words += _rank_words(job, outputs)
    return _group(job, [_start(words, _environment(job), outputs / _LAUNCHER_LOG)], outputs)


def _mpich_options(job: Job, agent: Path) -> list[str]:
    return ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", _places(job)]


def _open_mpi_options(job: Job, agent: Path) -> list[str]:
    return [
        *("--prtemca", "plm_ssh_agent", str(agent), "--host", _places(job)),
        # A host believes that all cores are its own: bound ranks would share the first ones.
        *("--map-by", f"ppr:{job.ranks_per_host}:node:OVERSUBSCRIBE", "--bind-to", "none"),
    ]


def _places(job: Job) -> str:
    return ",".join(f"{host.name}:{job.ranks_per_host}" for host in job.hosts)


def _rank_words(job: Job, outputs: Path) -> list[str]:
    places = [os.getcwd(), str(job.folder), str(outputs)]
    return ["sh", "-ec", _BECOME_RANK, "rank", *places, *job.command]


def _environment(job: Job) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _JOB_NAMES and not name.startswith(_JOB_PREFIXES)
    }
    own = {
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks_per_host),
        "MASTER_ADDR": job.hosts[0].address,
        "MASTER_PORT": str(job.port),
    }
    return {**_TUNING, **inherited, **_NETWORK_SETTINGS, **own, **job.environment}


def _log_folder(job: Job) -> Path:
    chosen = (job.logs or job.folder).absolute()
    chosen.mkdir(parents=True, exist_ok=True)
    for old in (_LAUNCHER_LOG, *(f"rank_{rank}.log" for rank in range(job.ranks))):
        (chosen / old).unlink(missing_ok=True)
    return chosen


def _start(
    words: Sequence[str], variables: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            words,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # The ranks leave the terminal's Ctrl-C to this process, which then ends them.
            start_new_session=True,
        )


def _group(job: Job, processes: Sequence[subprocess.Popen[bytes]], outputs: Path) -> RankGroup:
    return RankGroup(
        processes,
        hosts=job.hosts,
        folder=job.folder,
        logs=outputs,
        ranks=job.ranks,
        echo=job.logs is None,
    )
