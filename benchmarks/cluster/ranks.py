# SPDX-License-Identifier: Apache-2.0
"""Start a program on emulated hosts, rank by rank or by ``mpirun``; watch and end its ranks."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.cluster.namespaces import KINDS, Namespaces
from wavemare.comm.mpi_library import MPI_JOB_PREFIXES, describe_mpi

TIMEOUT_CODE = 124
"""Exit code of a program that was killed after its time limit, as of ``timeout``."""

_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.02

_INTERFACE = "eth0"
_LAUNCHER_LOG = "launcher.log"
_mpi = functools.cache(describe_mpi)  # it starts processes
# Beside those of MPI: a rank that inherited these would join the job of this process.
_JOB_NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "HOSTNAME")
# A shell that becomes the rank. MPICH and Open MPI have rank variables of their own.
_BECOME_RANK = """
RANK=${RANK:-${PMI_RANK:-$OMPI_COMM_WORLD_RANK}}
export RANK LOCAL_RANK=$((RANK % LOCAL_WORLD_SIZE))
cd "$1"
exec >"$2/rank_$RANK.log" 2>&1
shift 2
exec "$@"
"""
# The parent of a rank outside its host. ``nsenter`` itself stops with a rank that is stopped, and
# does not continue with it.
_WAIT = '"$@"; exit $?'
# mpirun starts it in place of ssh, with options, a host, and words for a shell there.
_AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
exec nsenter --target "$(cat "{folder}/$host.pid")" {kinds} -- sh -c "$*"
"""
# The user's choice goes before. Measured on four hosts of 1 Gbit/s, MPICH's dense allreduce of
# 100 MB takes 1.33 s over libfabric and 1.75 s over UCX, its default (the link: 1.25).
_TUNING = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
_SETTINGS = {
    "GLOO_SOCKET_IFNAME": _INTERFACE,
    "TP_SOCKET_IFNAME": _INTERFACE,
    "NCCL_SOCKET_IFNAME": _INTERFACE,
    # MPICH's two ways to the network, UCX and libfabric.
    "UCX_NET_DEVICES": _INTERFACE,
    "FI_TCP_IFACE": _INTERFACE,
    "FI_SOCKETS_IFACE": _INTERFACE,
    "OMPI_MCA_btl_tcp_if_include": _INTERFACE,
    "OMPI_MCA_pml": "ob1",
    # Its daemons' folders are named after process numbers, which are alike on all hosts.
    "PRTE_MCA_prte_tmpdir_base": "/dev/shm",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


@dataclass(frozen=True)
class Host:
    """An emulated host."""

    name: str
    address: str
    namespaces: Namespaces


def start_ranks(
    command: Sequence[str],
    hosts: Sequence[Host],
    *,
    head: Namespaces,
    folder: Path,
    port: int,
    ranks_per_host: int = 1,
    environment: Mapping[str, str] | None = None,
    launcher: Literal["torch", "mpirun"] = "torch",
    logs: str | Path | None = None,
) -> RankGroup:
    """Start a program on hosts, in the current folder.

    With either launcher, ranks have the environment of this process, the variables of ``torchrun``
    (``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ...) and the variables that keep gloo and MPI on the
    links. Ranks are counted host by host.

    Args:
        command: The program and its arguments.
        hosts: They get the ranks, host by host.
        head: The namespaces in which the hosts' are nested.
        folder: An empty one, for files of the start.
        port: Of the first host, where the ranks meet.
        ranks_per_host: Number of processes on each host.
        environment: Variables to add or replace.
        launcher: ``torch`` for one by one, or ``mpirun`` of the MPI that mpi4py loads here.
        logs: A folder for ``rank_0.log``, ...; if None, the output is printed, with the rank before
            each line.

    Raises:
        LaunchError: There is no ``mpirun`` that belongs to the MPI of mpi4py.
    """
    ranks = len(hosts) * ranks_per_host
    outputs = _log_folder(Path(logs or folder), ranks)
    program = ["sh", "-ec", _BECOME_RANK, "rank", os.getcwd(), str(outputs), *command]
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _JOB_NAMES and not name.startswith(MPI_JOB_PREFIXES)
    }
    own = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(port),
    }
    variables = {**_TUNING, **inherited, **_SETTINGS, **own, **(environment or {})}
    if launcher == "mpirun":
        words = [*head.enter(), *_mpirun(hosts, ranks_per_host, folder), *program]
        processes = [_start(words, variables, outputs)]
    else:
        enter = [host.namespaces.enter("--no-fork", *KINDS) for host in hosts]
        processes = [
            _start(
                [*enter[rank // ranks_per_host], "sh", "-c", _WAIT, "sh", *program],
                {**variables, "RANK": str(rank)},
                outputs,
            )
            for rank in range(ranks)
        ]
    return RankGroup(processes, hosts=hosts, logs=outputs, ranks=ranks, echo=logs is None)


def _mpirun(hosts: Sequence[Host], ranks_per_host: int, folder: Path) -> list[str]:
    """Return the words of this environment's ``mpirun``, which runs beside the switch."""
    mpi = _mpi()
    program = mpi.mpirun()
    agent = folder / "agent"
    agent.write_text(_AGENT.format(folder=folder, kinds=" ".join(KINDS)))
    agent.chmod(0o755)
    for host in hosts:
        (folder / f"{host.name}.pid").write_text(str(host.namespaces.pid))
    slots = ",".join(f"{host.name}:{ranks_per_host}" for host in hosts)
    if mpi.launcher_flavour == "Open MPI":
        options = ["--prtemca", "plm_ssh_agent", str(agent), "--host", slots]
        # Each host sees all cores as its own: bound ranks would share the first ones.
        mapping = f"ppr:{ranks_per_host}:node:OVERSUBSCRIBE"
        options += ["--map-by", mapping, "--bind-to", "none"]
    else:
        options = ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", slots]
    return [program, "-n", str(len(hosts) * ranks_per_host), *options]


def _log_folder(folder: Path, ranks: int) -> Path:
    chosen = folder.absolute()
    chosen.mkdir(parents=True, exist_ok=True)
    for old in (_LAUNCHER_LOG, *(f"rank_{rank}.log" for rank in range(ranks))):
        (chosen / old).unlink(missing_ok=True)
    return chosen


def _start(
    words: Sequence[str], variables: Mapping[str, str], outputs: Path
) -> subprocess.Popen[bytes]:
    with (outputs / _LAUNCHER_LOG).open("ab") as output:
        return subprocess.Popen(
            words,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # This process handles Ctrl-C, and then ends the ranks.
            start_new_session=True,
        )


class RankGroup:
    """A program that runs on the hosts.

    Args:
        processes: Children of this process: each rank's parent, or a launcher.
        hosts: The hosts of the ranks.
        logs: Folder of ``rank_N.log``, the ranks' outputs, and ``launcher.log``.
        ranks: Number of ranks.
        echo: Whether outputs are printed.
    """

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        *,
        hosts: Sequence[Host],
        logs: Path,
        ranks: int,
        echo: bool,
    ) -> None:
        self._processes = processes
        self._hosts = hosts
        names = ["launcher", *(f"rank_{rank}" for rank in range(ranks))]
        self._tails = [_Tail(logs / f"{name}.log", name) for name in names] if echo else []

    def wait(self, timeout_s: float, grace_s: float = _GRACE_SECONDS) -> int:
        """Wait for the program's end, and leave none of its processes on the hosts.

        Args:
            timeout_s: Seconds after which all of its processes are killed.
            grace_s: Seconds for the other ranks to end after one has failed.

        Returns:
            0 if all ranks returned 0; the code of the first failure (128 + n for signal n);
            `TIMEOUT_CODE` after the time limit.
        """
        deadline = time.monotonic() + timeout_s
        code = 0
        try:
            while any(process.poll() is None for process in self._processes):
                self._echo()
                if not code and (code := self._failure()):
                    deadline = min(deadline, time.monotonic() + grace_s)
                if time.monotonic() > deadline:
                    return code or TIMEOUT_CODE
                time.sleep(_POLL_SECONDS)
            return code or self._failure()
        finally:
            self.kill()
            self._echo(to_end=True)

    def kill(self) -> None:
        """Kill all processes of the program."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for host in self._hosts:
            host.namespaces.kill_members()
        for process in self._processes:
            process.wait()

    def _failure(self) -> int:
        codes = [process.poll() or 0 for process in self._processes]
        return next((code if code > 0 else 128 - code for code in codes if code), 0)

    def _echo(self, to_end: bool = False) -> None:
        for tail in self._tails:
            tail.print_new(to_end)


class _Tail:
    """Prints the new lines of a file, with a name before each."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name.removeprefix("rank_")
        self._offset = 0

    def print_new(self, to_end: bool) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = len(data) if to_end else data.rfind(b"\n") + 1
        self._offset += whole
        for line in data[:whole].decode(errors="replace").splitlines():
            print(f"[{self._name}] {line}", flush=True)
