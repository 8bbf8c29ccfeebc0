# SPDX-License-Identifier: Apache-2.0
"""A job that is told to end: the ranks may save, and what does not end in time is ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from wavemare.cli import ending

# Stands for "deepspeed": it starts the part for this host, and takes over its exit code.
RUNNER = """
import subprocess, sys
code = subprocess.Popen([sys.executable, "-u", "-m", "deepspeed.launcher.launch", *sys.argv[1:]])
code.wait()
sys.exit(max(code.returncode, 0))
"""
# Stands for that part: as DeepSpeed's it ends its ranks when it is told to, and reports a failure.
STARTER = """
import signal, subprocess, sys, time
folder, program = sys.argv[1:]
ranks = [subprocess.Popen([sys.executable, "-c", program, folder, str(r)]) for r in range(2)]

def end(*_):
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.wait()
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
while any(rank.poll() is None for rank in ranks):
    time.sleep(0.02)
sys.exit(max(rank.returncode for rank in ranks))
"""
# A rank that starts a helper of its own and leaves by SIGTERM a second later, having "saved".
RANK = """
import os, signal, subprocess, sys, time
folder, rank = sys.argv[1:]
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(f"{folder}/up{rank}", "w").write(str(helper.pid))
while not stop:
    time.sleep(0.01)
time.sleep(%(seconds)s)
helper_lived = helper.poll() is None
helper.kill()
open(f"{folder}/saved{rank}", "w").write(str(helper_lived))
sys.exit(%(code)s)
"""


@dataclass
class Job:
    """A launcher in a session of its own, and where its ranks leave files."""

    launcher: "subprocess.Popen[bytes]"
    folder: Path

    def saved(self) -> list[str]:
        return [file.read_text() for file in sorted(self.folder.glob("saved*"))]

    def processes(self) -> list[psutil.Process]:
        main = psutil.Process(self.launcher.pid)
        return [main, *main.children(recursive=True)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    launchers: list[subprocess.Popen[bytes]] = []

    def run(*, seconds: float = 1, code: int = 0) -> Job:
        package = tmp_path / "path" / "deepspeed" / "launcher"
        package.mkdir(parents=True)
        for file in (package.parent / "__init__.py", package / "__init__.py"):
            file.touch()
        (package / "launch.py").write_text(STARTER)
        rank = RANK % {"seconds": seconds, "code": code}
        launcher = subprocess.Popen(
            [sys.executable, "-c", RUNNER, str(tmp_path), rank],
            env={**os.environ, "PYTHONPATH": str(tmp_path / "path")},
            start_new_session=True,
        )
        launchers.append(launcher)
        deadline = time.monotonic() + 60
        while len([up for up in tmp_path.glob("up*") if up.read_text()]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return Job(launcher, tmp_path)

    yield run
    for launcher in launchers:
        for process in psutil.process_iter():
            if ending._session(process.pid) == launcher.pid:
                process.kill()
        launcher.wait()


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if ending._lives(process)]


def test_ranks_save_and_leave(start: Callable[..., Job]) -> None:
    job = start()
    processes = job.processes()
    assert len(processes) == 6  # runner, starter, and two ranks with a helper each
    assert ending.end_job(job.launcher, [signal.SIGTERM]) == 0
    assert job.saved() == ["True", "True"]  # their helpers were left to them
    assert not living(processes)


def test_a_failure_of_the_ranks_is_the_result(start: Callable[..., Job]) -> None:
    assert ending.end_job(start(code=3).launcher, [signal.SIGTERM]) == 3


def test_too_slow_ranks_are_ended(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "_SECONDS_TO_STOP", 0.5)
    job = start(seconds=60)
    processes = job.processes()
    assert ending.end_job(job.launcher, [signal.SIGTERM]) == -signal.SIGTERM
    assert job.saved() == []
    time.sleep(0.2)
    assert not living(processes)


def test_a_second_signal_means_at_once(start: Callable[..., Job]) -> None:
    job = start(seconds=60)
    started = time.monotonic()
    received = [signal.SIGTERM, signal.SIGINT]
    assert ending.end_job(job.launcher, received) == -signal.SIGTERM
    assert time.monotonic() - started < 10
    assert job.saved() == []


def test_ranks_save_although_every_process_was_signalled(start: Callable[..., Job]) -> None:
    job = start()
    processes = job.processes()
    for process in processes[:2]:
        process.terminate()
    job.launcher.wait()  # it had no handler; the ranks are orphans now
    started = time.monotonic()
    assert ending.end_job(job.launcher, [signal.SIGTERM]) == -signal.SIGTERM
    assert time.monotonic() - started < 30
    assert len(job.saved()) == 2
    assert not living(processes)


def test_a_job_that_has_ended_keeps_its_code(start: Callable[..., Job]) -> None:
    job = start(seconds=0, code=4)
    for process in job.processes()[2:4]:
        process.terminate()
    job.launcher.wait()
    assert ending.end_job(job.launcher, [signal.SIGTERM]) == 4
