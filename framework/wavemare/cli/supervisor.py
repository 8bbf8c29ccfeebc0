# SPDX-License-Identifier: Apache-2.0
"""A process of ``mpirun`` that starts one rank, watches it, and agrees with others what follows.

An MPI process cannot leave its job and join it again, but it can outlive what it has started. So
the processes of ``mpirun`` train nothing: each starts a rank as its child, which knows nothing of
MPI. If a rank dies, all supervisors end theirs and start them again. If a supervisor dies (its host
has gone), and Open MPI's ULFM is on, the others shrink their communicator and go on as fewer ranks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from wavemare.cli import launch
from wavemare.cli.restart import IN_VAIN, repeat
from wavemare.cli.warded import Ending, WardedRank
from wavemare.comm.mpi_library import outside_job
from wavemare.engine.launch.environment import Place, check_mpi, meet
from wavemare.errors import LaunchError

__all__ = ["Supervisor", "supervise", "verdict"]

_POLL_S = 0.1
_KILLED = 137
# How mpirun --with-ft ulfm tells Open MPI's library.
_ULFM_VARIABLE = "OMPI_MCA_mpi_ft_enable"
_NO_ULFM = (
    "wavemare: ranks that die are started again; the loss of a host ends the job, as this MPI goes "
    "on without a process only if it is Open MPI and mpirun gets --with-ft ulfm\n"
)


def supervise(place: Place, command: Sequence[str], max_restarts: int, grace_s: float = 5.0) -> int:
    """Run a command as a rank to its end; all processes of ``mpirun`` call this together.

    Args:
        place: From `wavemare.engine.launch.environment.mpi_place`.
        command: Starts a rank.
        max_restarts: How often to start the ranks again after some have died.
        grace_s: Seconds that the other ranks may still run after one has failed.

    Returns:
        The exit code, the same in all processes; see `verdict`.

    Raises:
        LaunchError: mpi4py is missing, or uses another MPI.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = f"the processes of mpirun cannot agree ({str(error).splitlines()[0]})"
        remedy = "Install MPI: pip install 'wavemare[mpi]'"
        raise LaunchError("mpi4py", None, reason, remedy) from None
    check_mpi(MPI.COMM_WORLD, place)
    supervisor = Supervisor(command, MPI.COMM_WORLD, os.environ, grace_s)
    if max_restarts and not supervisor.outlives_others and place.rank == 0:
        sys.stderr.write(_NO_ULFM)
    return repeat(supervisor.run, max_restarts, supervisor.places)


class Supervisor:
    """Makes attempts to run a rank, together with the other processes of a communicator.

    Args:
        command: Starts the rank.
        world: All processes, as mpi4py's communicator.
        environment: This process's variables.
        grace_s: As for `supervise`.

    Attributes:
        outlives_others: Whether the death of another process leaves this one (ULFM).
    """

    def __init__(
        self, command: Sequence[str], world: Any, environment: Mapping[str, str], grace_s: float
    ) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._command = command
        self._environment = environment
        self._grace_s = grace_s
        self._comm = world.Dup()
        self._hosts: list[str] = []
        self.outlives_others = environment.get(_ULFM_VARIABLE) == "1"

    def run(self, signals: list[int]) -> int:
        """Make an attempt, and return its `verdict`, on which all processes agree.

        Args:
            signals: Gets those that any of the processes received meanwhile.
        """
        endings: list[Ending] = []
        try:
            endings = self._attempt()
        except self._mpi.Exception:
            if not self.outlives_others:
                raise
            self._comm.Revoke()  # so that those who wait for others come here as well
        if self.outlives_others and not self._all_completed(bool(endings)):
            self._go_on_without_lost()
            return _KILLED
        signals += [ending.signal for ending in endings if ending.signal]
        self._tell(endings)
        return verdict(endings)

    def places(self) -> str | None:
        """Say how many ranks the next attempt has, in one of the processes."""
        return f" as {self._comm.size} ranks" if self._comm.rank == 0 else None

    def _attempt(self) -> list[Ending]:
        """Run the rank to its end, and return how all of them ended, by their numbers."""
        address, port, self._hosts = meet(self._environment, self._comm)
        here, own = self._comm.rank, self._hosts[self._comm.rank]
        variables = {
            "RANK": here,
            "WORLD_SIZE": self._comm.size,
            "LOCAL_RANK": self._hosts[:here].count(own),
            "LOCAL_WORLD_SIZE": self._hosts.count(own),
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
        }
        environment = {**outside_job(os.environ), **launch.extra_environment()}
        environment |= {name: str(value) for name, value in variables.items()}
        with launch.noted_signals() as received, WardedRank(self._command, environment) as rank:
            return self._follow(rank, received)

    def _follow(self, rank: WardedRank, received: list[int]) -> list[Ending]:
        """Wait until all ranks have ended; once one has failed, the others have a moment."""
        here, size = self._comm.rank, self._comm.size
        endings: dict[int, Ending] = {}
        requests: list[Any] = []
        failed_at: float | None = None
        while len(endings) < size:
            rank.heed(received)
            ending = None if here in endings else rank.poll()
            if ending is not None:
                endings[here] = ending
                requests = [self._comm.isend(ending, peer) for peer in range(size) if peer != here]
            self._receive(endings)
            if failed_at is None and any(ending.code for ending in endings.values()):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() > failed_at + self._grace_s:
                rank.give_up()
            time.sleep(_POLL_S)
        self._mpi.Request.waitall(requests)
        return [endings[number] for number in range(size)]

    def _receive(self, endings: dict[int, Ending]) -> None:
        status = self._mpi.Status()
        while self._comm.iprobe(status=status):
            source = status.Get_source()
            endings[source] = self._comm.recv(source=source)

    def _all_completed(self, completed: bool) -> bool:
        """Whether nobody was lost in this attempt, which all that are left answer alike."""
        try:
            return bool(self._comm.Agree(int(completed)))
        except self._mpi.Exception:  # somebody was lost meanwhile: all get this then
            return False

    def _go_on_without_lost(self) -> None:
        before = self._comm.Get_group()
        self._comm = self._comm.Shrink()
        self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        left = self._comm.Get_group().Translate_ranks(group=before)
        if self._comm.rank == 0:
            lost = [str(number) for number in range(before.size) if number not in left]
            sys.stderr.write(f"wavemare: lost with its supervisor: rank {', '.join(lost)}\n")

    def _tell(self, endings: Sequence[Ending]) -> None:
        """Say which ranks have failed, in one of the processes."""
        told = [
            f"rank {number} ({self._hosts[number]}) ended with {ending.code}"
            for number, ending in enumerate(endings)
            if ending.code and not ending.given_up
        ]
        if told and self._comm.rank == 0:
            sys.stderr.write(f"wavemare: {', '.join(told)}\n")


def verdict(endings: Sequence[Ending]) -> int:
    """Return the exit code of ranks that ended in these ways.

    0 if all have ended with 0; else that of a rank that was killed, which is nobody else's
    consequence; else of one that has found a mistake; else of the first that failed.
    """
    codes = [ending.code for ending in endings if ending.code and not ending.given_up]
    return min(codes, key=_consequence, default=0)


def _consequence(code: int) -> int:
    if code > 128:  # noqa: PLR2004 - a signal
        return 0
    return 1 if code in IN_VAIN else 2
