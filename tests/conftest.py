# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: starting real ranks, and catching what a test leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings

# No example has a time limit: other programs may have the cores.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

PROGRAMS = Path(__file__).parent / "multiproc" / "programs"


@dataclass(frozen=True)
class Finished:
    """What a group of ranks left: exit codes and outputs by rank, and their JSON results."""

    codes: list[int]
    outputs: list[str]
    folder: Path

    def result(self, rank: int) -> Any:
        return json.loads((self.folder / f"rank_{rank}.json").read_text())

    def check(self) -> Finished:
        report = "\n".join(
            f"--- rank {rank}: exit code {code}\n{output[-4000:]}"
            for rank, (code, output) in enumerate(zip(self.codes, self.outputs, strict=True))
        )
        assert not any(self.codes), report
        return self


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


class RankServer:
    """Starts programs as forks of ``multiproc/rank_server.py``."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS.parent / "rank_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=rank_environment(0, 1, 0),
        )

    def ask(self, **request: Any) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Rank:
        program, *arguments = command
        pid = self.ask(
            program=program, arguments=arguments, log=str(log), environment=dict(environment)
        )
        return Rank(self, pid)

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(60)


@dataclass
class Rank:
    """A process that a server started."""

    server: RankServer
    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.server.ask(poll=self.pid)
        return self.returncode


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    server.close()


@pytest.fixture
def launch(tmp_path: Path, rank_server: RankServer) -> Callable[..., Finished]:
    """Run a file of ``tests/multiproc/programs`` as several ranks.

    A program gets a folder as its first argument and leaves ``rank_N.json`` there.
    """

    def run(
        program: str | Path,
        *arguments: object,
        ranks: int = 2,
        timeout: float = 150,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> Finished:
        folder = folder or tmp_path
        port = free_port()
        command = [str(PROGRAMS / program), str(folder), *map(str, arguments)]
        logs = [folder / f"rank_{rank}.log" for rank in range(ranks)]
        processes = [
            rank_server.start(
                command, log, {**rank_environment(rank, ranks, port), **(environment or {})}
            )
            for rank, log in enumerate(logs)
        ]
        _wait(processes, timeout)
        outputs = [log.read_text(errors="replace") for log in logs]
        return Finished([process.returncode for process in processes], outputs, folder)

    return run


@pytest.fixture(scope="module")
def _launched() -> dict[tuple[object, ...], Finished]:
    return {}


@pytest.fixture
def launch_once(
    launch: Callable[..., Finished], _launched: dict[tuple[object, ...], Finished]
) -> Callable[..., list[Any]]:
    """Run a program once for all tests of a file; return the results by rank."""

    def run(*command: object, ranks: int = 2, timeout: float = 150) -> list[Any]:
        key = (*command, ranks)
        if key not in _launched:
            _launched[key] = launch(*command, ranks=ranks, timeout=timeout)
        finished = _launched[key].check()
        return [finished.result(rank) for rank in range(ranks)]

    return run


@pytest.fixture
def launch_cases(launch_once: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Run all cases that need as many ranks as one of them does; return its results by rank."""

    def run(
        program: str, cases: Mapping[int, Mapping[str, Any]], name: str, timeout: float = 280
    ) -> list[Any]:
        ranks = next(ranks for ranks, named in cases.items() if name in named)
        results = launch_once(program, json.dumps(cases[ranks]), ranks=ranks, timeout=timeout)
        return [result[name] for result in results]

    return run


def _wait(processes: Sequence[Rank], timeout: float) -> None:
    """Wait for all; if one fails or time runs out, end the others soon."""
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + 15)
        if time.monotonic() > deadline:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def no_leaked_environment() -> Iterator[None]:
    """A test must leave the environment as it was."""
    # Set by torch and DeepSpeed when they are imported.
    ignored = {"PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR"}
    before = {k: v for k, v in os.environ.items() if k not in ignored}
    yield
    after = {k: v for k, v in os.environ.items() if k not in ignored}
    leaked = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
    assert not leaked, f"environment variables changed: {sorted(leaked)}"


# Of libraries and of pytest's own helpers: they live as long as the process.
_LASTING_THREADS = ("ThreadPoolExecutor", "asyncio_", "tqdm", "execnet", "pytest_timeout", "Tqdm")
# Our own server of ranks, and what multiprocessing starts once in a process.
_LASTING_PROCESSES = ("rank_server", "multiprocessing.resource_tracker")


@pytest.fixture(autouse=True)
def no_leaked_threads_or_processes() -> Iterator[None]:
    """A test must end the threads and processes that it starts."""
    threads, children = set(threading.enumerate()), _children()
    yield
    deadline = time.monotonic() + 5  # some end a moment after what they served
    while (left := _left(threads, children)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"still running: {left}"


def _children() -> set[int]:
    """Return the numbers of this process's children, by way of the threads that started them."""
    numbers = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            numbers.update(map(int, file.read_text().split()))
    return numbers


def _left(threads: set[threading.Thread], children: set[int]) -> list[str]:
    found = [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if thread not in threads and not thread.name.startswith(_LASTING_THREADS)
    ]
    for number in _children() - children:
        with contextlib.suppress(psutil.Error):
            child = psutil.Process(number)
            words = " ".join(child.cmdline())
            lasts = any(name in words for name in _LASTING_PROCESSES)
            if child.status() != psutil.STATUS_ZOMBIE and not lasts:
                found.append(f"process {number} {words[:120]}")
    return found
