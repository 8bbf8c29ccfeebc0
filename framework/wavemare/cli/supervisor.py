# SPDX-License-Identifier: Apache-2.0
"""The supervisor of a job: it starts processes, passes on signals, and starts them again.

The processes are the ranks of this host. For several hosts, and for options of DeepSpeed's
launcher, there is one process: that launcher, which starts the ranks.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType

import psutil

from wavemare.engine.launch.environment import RESTARTED
from wavemare.errors import WavemareError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SECONDS_TO_END = 10.0
_SECONDS_TO_FOLLOW = 30.0
"""For ranks that hear of the failure of another one, and may save what they have."""
_SECONDS_TO_STOP = 120.0
"""For the current step, up to three more, and a checkpoint."""
_SECONDS_TO_FINISH = 60.0
"""For replicas that go on after one has ended well: all of them make the last step together."""
_POLL_S = 0.05
_LAUNCHER = "deepspeed.launcher.launch"


@dataclass(frozen=True)
class Command:
    """A process of a job.

    Attributes:
        words: The program and its options.
        variables: Added to the environment.
        is_launcher: Whether it is DeepSpeed's launcher; else it is a rank.
    """

    words: Sequence[str]
    variables: Mapping[str, str]
    is_launcher: bool = False


def supervise(
    commands: Callable[[int], Sequence[Command]],
    max_restarts: int = 0,
    seconds_to_stop: float = _SECONDS_TO_STOP,
) -> int:
    """Run a job to its end.

    The first process that fails ends the others. On SIGTERM the ranks save a checkpoint and leave.
    Ctrl-C, SIGHUP and a second signal of any kind end all processes soon.

    Args:
        commands: Returns the processes of an attempt, which are counted from 0.
        max_restarts: How often a job that has failed starts again; one with a typed error does not.
        seconds_to_stop: Limit for saving a checkpoint on SIGTERM.

    Returns:
        The exit code: 0 if all processes have ended with 0; 128 + n if signal n ended the job.
    """
    with _noted_signals() as received:
        died_at = None
        for attempt in range(max_restarts + 1):
            job = _Attempt(commands(attempt), received, died_at)
            code = job.run(seconds_to_stop)
            died_at = job.ended_at
            if received or code in (0, WavemareError.exit_code) or attempt == max_restarts:
                break
            sys.stderr.write(
                f"wavemare: the ranks ended with {code}; restart {attempt + 1} of {max_restarts}\n"
            )
    if code == 128 + signal.SIGKILL and not received:
        killed = ", ".join(map(str, job.killed))
        sys.stderr.write(
            f"error: a rank was killed (signal 9){f': rank {killed}' * bool(killed)}. Most often "
            "the kernel does it because memory ran out: try a smaller micro-batch, and look at "
            "'dmesg | tail'\n"
        )
    return code


def supervise_replicas(
    server: Command,
    commands: Callable[[int], Sequence[Command]],
    count: int,
    max_restarts: int,
    seconds_to_finish: float = _SECONDS_TO_FINISH,
) -> int:
    """Run replicas that come and go, each of which starts again by itself, to their end.

    When one has ended with 0, no other starts again, and those that go on get SIGTERM after a
    minute: one that has come too late would begin anew. Signals go to all, as in `supervise`.

    Args:
        server: A process that the replicas need. It starts again, too, and ends with them.
        commands: Returns the processes of a replica, which are counted from 0.
        count: Number of replicas.
        max_restarts: How often a replica that has failed starts again; one with a typed error does
            not.
        seconds_to_finish: From the end of the first replica to SIGTERM.

    Returns:
        The exit code: 0 if a replica has ended with 0 and none with a typed error.
    """
    over: list[int] = []
    with _noted_signals() as received:
        needed = _Restarted("the server", lambda: [server], max_restarts, over)
        replicas = [
            _Restarted(f"replica {n}", partial(commands, n), max_restarts, received)
            for n in range(count)
        ]
        for each in (needed, *replicas):
            each.start()
        finished_at = math.inf
        while any(replica.is_alive() for replica in replicas):
            time.sleep(_POLL_S)
            if finished_at == math.inf and any(replica.code == 0 for replica in replicas):
                finished_at = time.monotonic()
                for replica in replicas:
                    replica.starts_again = False
            if time.monotonic() - finished_at > seconds_to_finish and not received:
                received.append(signal.SIGTERM)
    over.append(signal.SIGKILL)
    needed.join()
    codes = [replica.code for replica in replicas]
    done = 0 in codes and WavemareError.exit_code not in codes
    return 0 if done else exit_code(codes)


class _Restarted(threading.Thread):
    """Starts processes again until they have ended in good order.

    Args:
        what: They are, in words.
        commands: Returns the processes of an attempt.
        max_restarts: How often they start again after a failure that is no typed error.
        received: The signals that end them, as they come.

    Attributes:
        code: The exit code of the last attempt; None before it has ended.
        starts_again: Whether they may start again.
    """

    def __init__(
        self,
        what: str,
        commands: Callable[[], Sequence[Command]],
        max_restarts: int,
        received: Sequence[int],
    ) -> None:
        super().__init__(name=f"wavemare {what}", daemon=True)
        self._what, self._commands, self._received = what, commands, received
        self._max_restarts = max_restarts
        self.code: int | None = None
        self.starts_again = True

    def run(self) -> None:
        """Start them, and start them again."""
        died_at = None
        for restart in range(1, self._max_restarts + 2):
            attempt = _Attempt(self._commands(), self._received, died_at)
            code = attempt.run(_SECONDS_TO_STOP)
            died_at = attempt.ended_at
            over = self._received or code in (0, WavemareError.exit_code) or not self.starts_again
            if over or restart > self._max_restarts:
                break
            sys.stderr.write(
                f"wavemare: {self._what} ended with {code}; "
                f"restart {restart} of {self._max_restarts}\n"
            )
        self.code = code


def exit_code(codes: Iterable[int | None]) -> int:
    """Return the exit code of a job: of a signal, else of a typed error, else another one.

    SIGTERM counts last, as the supervisor sends it to ranks that have not failed.

    Args:
        codes: Of processes; negative for signals, as `subprocess` gives them; None if one runs.
    """

    def priority(code: int) -> int:
        if code == 128 + signal.SIGTERM:
            return 3
        return 0 if code > 128 else 1 if code == WavemareError.exit_code else 2  # noqa: PLR2004

    return min((128 - c if c < 0 else c for c in codes if c), key=priority, default=0)


def launcher_code(code: int) -> int:
    """Return what DeepSpeed's launcher has seen of a rank: the negative number of its signal.

    It exits with that number, which arrives as 256 - n. 255 stays: it is more often the code of ssh
    or ``sys.exit(-1)`` than SIGHUP.
    """
    return code - 256 if 256 - 64 < code < 255 else code  # noqa: PLR2004


class _Attempt:
    """The processes of a job, each in its own session: Ctrl-C of a terminal does not reach them.

    Args:
        commands: Of the processes.
        received: The signals that this process gets, as they come.
        died_at: When the attempt before has ended (Unix time), for ranks that tell how long a
            restart takes; None if there was none.

    Attributes:
        killed: The ranks that signal 9 has ended first, as far as they are known.
        ended_at: When the first process has ended (Unix time).
    """

    def __init__(
        self, commands: Sequence[Command], received: Sequence[int], died_at: float | None = None
    ) -> None:
        self.killed: list[int] = []
        self.ended_at = math.nan
        told = {} if died_at is None else {RESTARTED: f"{died_at} {time.time()}"}
        self._received = received
        self._by_launcher = any(command.is_launcher for command in commands)
        self._started: list[subprocess.Popen[bytes]] = []
        try:
            for command in commands:
                environment = {**os.environ, **told, **command.variables}
                self._started.append(
                    subprocess.Popen(command.words, env=environment, start_new_session=True)
                )
        except OSError:
            self._kill(self._family())
            raise

    def run(self, seconds_to_stop: float) -> int:
        """Wait for the end of the processes, or bring it about; return the exit code."""
        while None in (codes := self._codes()) and not any(codes) and not self._received:
            time.sleep(_POLL_S)
        self.ended_at = time.time()
        if self._received:
            return self._stop(seconds_to_stop)
        if any(codes):
            self._end_others()
        if self._received:  # meanwhile
            return 128 + self._received[0]
        if not self._by_launcher:
            self.killed = [n for n, code in enumerate(codes) if code == -signal.SIGKILL]
        return exit_code(codes)

    def _codes(self) -> list[int | None]:
        """Return the code of each process; None if it runs."""
        codes = [process.poll() for process in self._started]
        return [launcher_code(c) if c and self._by_launcher else c for c in codes]

    def _end_others(self) -> None:
        """End the ranks that go on after one has failed, and what failed ranks have left."""
        family = self._family()
        for process in self._started:
            process.terminate()
        self._await([p for p in family if p.pid in self._pids], _SECONDS_TO_FOLLOW, signals=0)
        self._kill([*family, *self._family()])

    def _stop(self, seconds_to_stop: float) -> int:
        """End the job because of a signal: if it is SIGTERM, ranks have time for a checkpoint."""
        number, family = self._received[0], self._family()
        ranks = self._ranks(family) if number == signal.SIGTERM else []
        for process in ranks or family:
            # DeepSpeed's launcher prints a traceback on SIGINT. With several hosts its handler of
            # SIGTERM ends the remote processes.
            is_launcher = self._by_launcher and process.pid in self._pids
            _send(process, signal.SIGTERM if is_launcher else number)
        # What a rank has started, and leaves, is not waited for.
        waited = [p for p in family if not ranks or p in ranks or p.pid in self._pids]
        alive = self._await(waited, seconds_to_stop if ranks else _SECONDS_TO_END, signals=1)
        self._kill([*family, *self._family()])
        return exit_code(self._codes()) if not alive and (ranks or not family) else 128 + number

    @property
    def _pids(self) -> set[int]:
        return {process.pid for process in self._started}

    def _family(self) -> list[psutil.Process]:
        """Return the processes, their descendants, and orphans of their sessions that live."""
        pids = {p.pid for p in self._started if p.poll() is None}
        for pid in [*pids]:
            with suppress(psutil.NoSuchProcess):
                pids |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
        # A scheduler that signals every process ends DeepSpeed's launcher, and leaves its ranks.
        return [
            process
            for process in psutil.process_iter()
            if (process.pid in pids or _session(process.pid) in self._pids) and _is_alive(process)
        ]

    def _ranks(self, family: Sequence[psutil.Process]) -> list[psutil.Process]:
        """Return the ranks of this host."""
        if not self._by_launcher:
            return [process for process in family if process.pid in self._pids]
        # "python -u -m deepspeed.launcher.launch"; pdsh has these words too, further on.
        told = [process.as_dict(["pid", "ppid", "cmdline"]) for process in family]
        starters = {one["pid"] for one in told if _LAUNCHER in (one["cmdline"] or ())[1:4]}
        return [p for p, one in zip(family, told, strict=True) if one["ppid"] in starters]

    def _await(
        self, processes: Sequence[psutil.Process], seconds: float, *, signals: int
    ) -> list[psutil.Process]:
        """Wait for the end of processes; return those that live after a time, or more signals."""
        deadline = time.monotonic() + seconds
        while alive := [process for process in processes if _is_alive(process)]:
            if len(self._received) > signals or time.monotonic() > deadline:
                break
            self._codes()  # psutil's own wait would take the codes
            time.sleep(_POLL_S)
        return alive

    def _kill(self, processes: Sequence[psutil.Process]) -> None:
        for process in processes:
            _send(process, signal.SIGKILL)
        for started in self._started:
            started.wait()


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Yield a list that receives the signals that ask this process to end."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_alive(process: psutil.Process) -> bool:
    try:
        # An orphan may stay a zombie until its container ends.
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _send(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):  # it has just ended
        process.send_signal(number)
