# SPDX-License-Identifier: Apache-2.0
"""A job that is told to end may save a checkpoint, and is ended in time."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from wavemare.cli.launch import end_job

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
# A rank with a helper process, which takes some seconds to "save" after SIGTERM.
RANK = """
import os, signal, subprocess, sys, time
folder, rank = sys.argv[1:]
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(f"{folder}/up{rank}", "w").write(str(helper.pid))
while not stop:
    time.sleep(0.01)
time.sleep(%(seconds)s)
helper_lived = helper.poll() is None
helper.kill()
open(f"{folder}/saved{rank}", "w").write(str(helper_lived))
sys.exit(%(code)s)
"""


@pytest.fixture
def start(tmp_path, wait_for):
    """Start a launcher in a session of its own, and wait until its ranks are up."""
    launchers = []

    def run(*, seconds=0.5, code=0):
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
        wait_for(lambda: len([up for up in tmp_path.glob("up*") if up.read_text()]) == 2)
        return launcher

    yield run
    for launcher in launchers:
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == launcher.pid:
                    process.kill()
            except (OSError, psutil.NoSuchProcess):
                pass
        launcher.wait()


def processes_of(launcher):
    """Return the runner, the starter, and two ranks with a helper each."""
    main = psutil.Process(launcher.pid)
    found = [main, *main.children(recursive=True)]
    assert len(found) == 6
    return found


def have_ended(processes):
    """Whether no process is left; a zombie may wait for its parent."""
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            continue
    return True


def saved(folder):
    return [file.read_text() for file in sorted(folder.glob("saved*"))]


@pytest.mark.parametrize("code", [0, 3])
def test_ranks_save_and_leave(start, tmp_path, code):
    launcher = start(code=code)
    processes = processes_of(launcher)
    assert end_job(launcher, [signal.SIGTERM]) == code
    assert saved(tmp_path) == ["True", "True"]  # their helpers were left to them
    assert have_ended(processes)


@pytest.mark.parametrize(
    ("received", "limit_s"),
    [([signal.SIGTERM], 0.5), ([signal.SIGTERM, signal.SIGINT], 600.0)],
    ids=["too slow", "a second signal"],
)
def test_slow_ranks_are_ended(start, tmp_path, wait_for, received, limit_s):
    launcher = start(seconds=600)
    processes = processes_of(launcher)
    assert end_job(launcher, received, limit_s) == -signal.SIGTERM
    assert saved(tmp_path) == []
    wait_for(lambda: have_ended(processes))


def test_ranks_save_although_every_process_was_signalled(start, tmp_path):
    launcher = start()
    processes = processes_of(launcher)
    for process in processes[:2]:
        process.terminate()
    launcher.wait()  # it had no handler; the ranks are orphans now
    assert end_job(launcher, [signal.SIGTERM]) == -signal.SIGTERM
    assert len(saved(tmp_path)) == 2
    assert have_ended(processes)


def test_a_job_that_has_ended_keeps_its_code(start, wait_for):
    launcher = start(seconds=0, code=4)
    processes = processes_of(launcher)
    for process in processes[2:4]:
        process.terminate()
    launcher.wait()
    wait_for(lambda: have_ended(processes))  # the ranks' helpers may take a moment longer
    assert end_job(launcher, [signal.SIGTERM]) == 4
