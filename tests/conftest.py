# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: starting real ranks, and catching what a test leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import hashlib
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import settings

from wavemare.engine.launch.environment import free_port

# No example has a time limit: other programs may have the cores.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

LIMIT_S = 600.0
"""How long a program may run: a net below hangs, far from what any takes on a busy machine."""
FAILED_S = 200.0
"""How long the other ranks may go on after one has failed."""
STACKS_S = 2.0
"""How long ranks that are ended have to write their stacks."""

PROGRAMS = Path(__file__).parent / "multiproc" / "programs"
_ROOT = str(Path(__file__).parents[1])
# Programs that tests start in other folders find the benchmarks, which no installation has.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
ACCELERATOR = os.environ.get("TEST_ACCELERATOR", "cpu")
"""Where the ranks that tests start compute: ``cpu``, or ``cuda`` as ``make test-gpu`` has it."""

_PR_SET_CHILD_SUBREAPER = 36
# Where launchers start processes, their orphans end when they like.
_LOOSE = tuple(Path(__file__).parent / name for name in ("multiproc", "mpi", "e2e", "gpu"))
# Models there have process groups until that of the module is destroyed.
_GROUPS = Path(__file__).parent / "unit" / "models"
# It lives as long as this process: it must be there before the first test looks around.
resource_tracker.ensure_running()


@dataclass(frozen=True)
class Finished:
    """What a group of ranks left: exit codes and outputs by rank, and their JSON results.

    Attributes:
        codes: Exit codes by rank.
        outputs: What each has printed.
        folder: Where the results are.
        ended_by_harness: The ranks that did not end alone, but by our own SIGKILL.
    """

    codes: list[int]
    outputs: list[str]
    folder: Path
    ended_by_harness: frozenset[int] = frozenset()

    def result(self, rank):
        return json.loads((self.folder / f"rank_{rank}.json").read_text())

    def check(self):
        report = "\n".join(
            f"--- rank {rank}: exit code {code}"
            f"{' (ended by the harness)' if rank in self.ended_by_harness else ''}"
            f"\n{output[-4000:]}"
            for rank, (code, output) in enumerate(zip(self.codes, self.outputs, strict=True))
        )
        assert not any(self.codes), report
        return self


def rank_environment(rank, ranks, port, accelerator=ACCELERATOR):
    # NCCL refuses two ranks of one host on one GPU: with too few GPUs there are several hosts.
    local = min(ranks, max(1, torch.cuda.device_count())) if accelerator == "cuda" else ranks
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % local),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(local),
        "NCCL_HOSTID": str(rank // local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "DS_ACCELERATOR": accelerator,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


class RankServer:
    """Starts programs in processes of ``multiproc/rank_server.py``."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS.parent / "rank_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=rank_environment(0, 1, 0),
        )
        _LASTING_PROCESSES.add(self.process.pid)

    def ask(self, **request):
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, command, log, environment, *, folder=None, own=False):
        program, *arguments = command
        pid = self.ask(
            program=program,
            arguments=arguments,
            log=str(log),
            environment=dict(environment),
            folder=folder and str(folder),
            own=own,
        )
        return Rank(self, pid)

    def close(self):
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(200)
        assert self.process.stdout
        self.process.stdout.close()
        _LASTING_PROCESSES.discard(self.process.pid)


@dataclass
class Rank:
    """A process that a server started."""

    server: RankServer
    pid: int
    returncode: int | None = None

    def poll(self):
        if self.returncode is None:
            self.returncode = self.server.ask(poll=self.pid)
        return self.returncode

    def print_stacks(self):
        """Have it write the stacks of its threads into its log."""
        os.kill(self.pid, signal.SIGRTMIN)

    def kill(self):
        """End it and the processes that it started."""
        with contextlib.suppress(psutil.Error):
            for descendant in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    descendant.kill()
        os.killpg(self.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def rank_server():
    server = RankServer()
    yield server
    server.close()


@pytest.fixture
def launch(request, tmp_path, rank_server):
    """Run a file of ``tests/multiproc/programs`` as several ranks, in forks of one process.

    A program gets a folder as its first argument and leaves ``rank_N.json`` there. With ``own`` it
    has processes of its own, which end as interpreters do.
    """

    def run(
        program,
        *arguments,
        ranks=2,
        timeout=LIMIT_S,
        environment=None,
        folder=None,
        own=False,
        accelerator=ACCELERATOR,
    ):
        mark = request.node.get_closest_marker("timeout")
        limit = float(mark.args[0] if mark else request.config.getini("timeout"))
        assert timeout < limit, "the test would end before its ranks are said to be late"
        folder = folder or tmp_path
        command = [str(PROGRAMS / program), str(folder), *map(str, arguments)]
        logs = [folder / f"rank_{rank}.log" for rank in range(ranks)]
        port = free_port()
        processes = [
            rank_server.start(
                command,
                log,
                {**rank_environment(rank, ranks, port, accelerator), **(environment or {})},
                own=own,
            )
            for rank, log in enumerate(logs)
        ]
        ended = _wait(processes, timeout)
        outputs = [log.read_text(errors="replace") for log in logs]
        return Finished([process.returncode for process in processes], outputs, folder, ended)

    return run


@pytest.fixture
def fork(rank_server, tmp_path_factory):
    """Run a Python script in a fork, from a folder."""

    def run(*command, folder, timeout, environment):
        logs = tmp_path_factory.mktemp("fork")
        process = rank_server.start([*map(str, command)], logs / "log", environment, folder=folder)
        ended = _wait([process], timeout)
        assert process.returncode is not None
        return Finished(
            [process.returncode], [(logs / "log").read_text(errors="replace")], logs, ended
        )

    return run


@pytest.fixture
def launch_once(request, launch, tmp_path_factory):
    """Run a program once for all tests of a file, in whichever worker; return results by rank."""
    base = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        base = base.parent  # that of all workers

    def run(*command, ranks=2, timeout=LIMIT_S, own=False):
        key = repr((str(request.path), command, ranks))
        folder = base / f"launched-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        folder.mkdir(exist_ok=True)
        kept = folder / "finished.pickle"
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second worker waits for the results of the first
            if not kept.exists():
                finished = launch(*command, ranks=ranks, timeout=timeout, own=own, folder=folder)
                kept.write_bytes(pickle.dumps(finished))
        finished = pickle.loads(kept.read_bytes()).check()
        return [finished.result(rank) for rank in range(ranks)]

    return run


@pytest.fixture
def launch_cases(launch_once):
    """Run all cases that need as many ranks as one of them does; return its results by rank."""

    def run(program, cases, name, timeout=LIMIT_S):
        ranks = next(ranks for ranks, named in cases.items() if name in named)
        results = launch_once(program, json.dumps(cases[ranks]), ranks=ranks, timeout=timeout)
        return [result[name] for result in results]

    return run


@pytest.fixture
def disk(tmp_path):
    """Mount a file system of so many KiB in the test's folder."""
    mounted: list[Path] = []

    def mount(kib, name="disk"):
        folder = tmp_path / name
        folder.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"needs root, to mount a small file system: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def _wait(processes, timeout):
    """Wait for all; if one fails or time runs out, end the others soon, and return which.

    Those that are ended write their stacks first.
    """

    def wait_until(deadline):
        while running := [process for process in processes if process.poll() is None]:
            if len(running) < len(processes) and any(each.returncode for each in processes):
                deadline = min(deadline, time.monotonic() + FAILED_S)
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return running

    late = wait_until(time.monotonic() + timeout)
    for process in late:
        process.print_stacks()
    for process in late and wait_until(time.monotonic() + STACKS_S):
        process.kill()
    wait_until(math.inf)
    # One that ended by itself just before the signal has a code of its own.
    codes = [process.returncode for process in processes]
    return frozenset(r for r, each in enumerate(processes) if each in late and codes[r] == -9)


@pytest.fixture(autouse=True)
def no_leaked_environment():
    """A test must leave the environment as it was."""
    # Set by torch, DeepSpeed and scikit-learn when they are imported.
    ignored = {"PYTEST_CURRENT_TEST", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR"}
    ignored |= {"KMP_DUPLICATE_LIB_OK"}
    before = {k: v for k, v in os.environ.items() if k not in ignored}
    yield
    after = {k: v for k, v in os.environ.items() if k not in ignored}
    leaked = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
    assert not leaked, f"environment variables changed: {sorted(leaked)}"


# --- what the whole suite leaves behind ----------------------------------------------------------

_SESSION = "SESSION_OF_TESTS"
_LEFT = pytest.StashKey[list[str]]()
_EXTENSIONS = pytest.StashKey[str]()
_BEFORE = pytest.StashKey[set[Path]]()


def pytest_configure(config):
    # Shells let what they start in the background ignore Ctrl-C, and its children with it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        os.environ[_SESSION] = str(os.getpid())  # all processes that tests start inherit it
        config.stash[_BEFORE] = set(_named_resources())
        if not torch.cuda.is_available():
            # Nothing is compiled for a CPU: that takes minutes, and who is killed leaves a lock.
            config.stash[_EXTENSIONS] = tempfile.mkdtemp()
            os.environ["TORCH_EXTENSIONS_DIR"] = config.stash[_EXTENSIONS]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fail if processes, with their ports, shared memory or network namespaces are left."""
    if hasattr(session.config, "workerinput"):
        return
    before = session.config.stash[_BEFORE]
    begin = ended = time.monotonic()
    while True:
        running, files = _left_by_the_suite(before)
        now = time.monotonic()
        ended = now if running else ended
        # Of ranks that were killed nobody removes the files.
        deadline = begin + GRACE_S if running else ended + FILES_S
        if not (running or files) or now > deadline:
            break
        time.sleep(0.1)
    left = running + files
    if _EXTENSIONS in session.config.stash:
        left += [f"a build of {name}" for name in os.listdir(session.config.stash[_EXTENSIONS])]
        shutil.rmtree(session.config.stash[_EXTENSIONS])
    session.config.stash[_LEFT] = left
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    for line in config.stash.get(_LEFT, []):
        terminalreporter.write_line(f"left behind by the tests: {line}", red=True)


def _named_resources():
    for folder in Path("/dev/shm"), Path("/run/netns"):
        if folder.is_dir():
            yield from folder.iterdir()


def _left_by_the_suite(before):
    """Return the processes that run, and the files that nobody has open."""
    running, used = [], set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if _is_of_this_suite(process):
                ports = [c.laddr.port for c in process.net_connections() if c.status == "LISTEN"]
                running.append(f"process {process.pid} {process.cmdline()[:6]}, ports {ports}")
            else:
                used.update(
                    re.findall(r"/dev/shm/\S+", Path(f"/proc/{process.pid}/maps").read_text())
                )
    new = set(_named_resources()) - before
    # What a process of somebody else has open is somebody else's.
    return running, sorted(str(path) for path in new if str(path) not in used)


def _is_of_this_suite(process):
    own = psutil.Process()
    return (
        process.environ().get(_SESSION) == str(own.pid)
        and process.pid != own.pid
        and not any("resource_tracker" in word for word in process.cmdline())
        and process.status() != psutil.STATUS_ZOMBIE
    )


# --- what one test leaves behind -----------------------------------------------------------------

FILES_S = 5.0
"""How long those that clean up after a process may take when it has ended."""
GRACE_S = 200.0
"""How long threads and processes may outlive what they served, and orphans their parent."""


def _check_nothing_left(find, what):
    deadline = time.monotonic() + GRACE_S
    left = find()
    if left:
        gc.collect()  # only then: it takes long, and all is closed that nobody refers to
    while (left := left and find()) and time.monotonic() < deadline:
        time.sleep(0.02)
    if left:
        gc.collect()  # a thread that has ended meanwhile may have held them the first time
        left = find()
    assert not left, f"{what}: {left}"


# Of pytest's own helpers and of asyncio's loops: they live as long as the process.
_LASTING_THREADS = ("asyncio_", "tqdm", "execnet", "pytest_timeout", "Tqdm")
_LASTING_PROCESSES: set[int] = set()
"""Our own servers of ranks."""
# What others open once in a process, later: libffi's memory for callbacks, libuv's (torch's store).
_ONCE = {"libffi": re.compile(r"(/\S*/#\d+ \(deleted\))"), "libuv": re.compile(r"(pipe:\S+) \1")}
# What libraries open at any time. An event loop that is left open is seen by its sockets.
_LASTING_FILES = ("/dev/urandom", "/dev/shm/", "anon_inode:[eventpoll]", "anon_inode:[eventfd]")


@pytest.fixture(autouse=True)
def no_leaked_descriptors(request):
    """A test must close the files, sockets and pipes that it opens in this process."""
    before = _descriptors()
    yield
    # Where MPI is loaded, a failure ends the whole process: here that would be pytest's.
    assert _is_loose(request) or "mpi4py.MPI" not in sys.modules, "MPI is loaded"
    if _is_loose(request) or _GROUPS in request.path.parents:
        return
    request.node.funcargs.clear()  # pytest would hold the fixtures' values for a moment more
    _check_nothing_left(lambda: _opened(before), "still open")


def _is_loose(request):
    return any(folder in request.path.parents for folder in _LOOSE)


def _descriptors():
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own one is closed again
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
    return found


def _opened(before):
    found = {
        number: target
        for number, target in sorted(_descriptors() - before)
        if not target.startswith(_LASTING_FILES) and "/site-packages/" not in target
    }
    rest, known = " ".join(found.values()), []
    for library, pattern in _ONCE.items():
        rest, times = pattern.subn("", rest, count=1)
        known += [library] * times
    if known and not rest.strip():
        for library in known:
            del _ONCE[library]
        return []
    return [f"descriptor {number} {target}" for number, target in found.items()]


@pytest.fixture(autouse=True)
def no_leaked_threads_or_processes(request, no_leaked_descriptors):
    """A test must end the threads and processes that it starts; only then are files looked at."""
    # Orphans of what it starts become this process's children, and count as left behind.
    adopts = not _is_loose(request)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)
    threads, children = set(threading.enumerate()), _children()
    yield
    _check_nothing_left(lambda: _left(threads, children), "still running")


def _children():
    """Return the numbers of this process's children, by way of the threads that started them."""
    numbers = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            numbers.update(map(int, file.read_text().split()))
    return numbers


def _left(threads, children):
    found = [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if thread not in threads and not thread.name.startswith(_LASTING_THREADS)
    ]
    for number in _children() - children - _LASTING_PROCESSES:
        with contextlib.suppress(psutil.Error):
            child = psutil.Process(number)
            if child.status() == psutil.STATUS_ZOMBIE:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(number, os.WNOHANG)  # an orphan has nobody else to do so
            else:
                found.append(f"process {number} {' '.join(child.cmdline())[:120]}")
    return found
