# SPDX-License-Identifier: Apache-2.0
"""Processes get their share of a core: by quotas of the kernel, or by signals; nothing stays."""

import os
import re
import signal
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from wavemare.bench.share_requests import ask_for_share, shares_on_demand
from wavemare.bench.throttle import CONTROL_GROUPS, Throttle, open_throttle, pace, quota_files
from wavemare.errors import LaunchError


@contextmanager
def started():
    """A process that waits."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("late_s", [0.0, 0.03], ids=["on time", "late"])
def test_a_late_pacer_keeps_the_share(late_s):
    now, ran, since = 0.0, 0.0, 0.0
    signals = []

    class Late(threading.Event):
        def wait(self, timeout=None):
            nonlocal now
            assert timeout is not None
            now += timeout + late_s * (1 + len(signals) % 3)
            return now > 60.0

    def send(_, number):
        nonlocal ran, since
        signals.append(number)
        if number == signal.SIGSTOP:
            ran += now - since
        since = now

    pace(1, 0.25, Late(), clock=lambda: now, send=send)
    assert signals[:4] == [signal.SIGSTOP, signal.SIGCONT] * 2
    assert ran / now == pytest.approx(0.25, rel=0.02)


def test_nothing_stays_after_an_error_and_after_a_process_that_has_ended():
    def groups():
        own = f"wavemare-{os.getpid()}-*"
        return [*CONTROL_GROUPS.glob(own), *CONTROL_GROUPS.glob(f"*/{own}")]

    def fail(how):
        with open_throttle() as throttle:
            with started() as process:
                throttle.limit(process.pid, 0.5)
                for group in groups():
                    own = group / str(process.pid)
                    assert (own / "cgroup.procs").read_text().split() == [str(process.pid)]
                    for name, text in quota_files(throttle.way, 0.5).items():
                        assert (own / name).read_text().strip() == text
            assert bool(groups()) == (throttle.way != "pacing")
            how()

    with pytest.raises(ZeroDivisionError):
        fail(lambda: 1 / 0)
    with pytest.raises(SystemExit):
        fail(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert groups() == []


def test_quotas_are_written_as_the_kernel_reads_them():
    assert quota_files("cgroup v1", 0.45) == {
        "cpu.cfs_period_us": "10000",
        "cpu.cfs_quota_us": "4500",
    }
    assert quota_files("cgroup v2", 0.45) == {"cpu.max": "4500 10000"}
    # 1 ms is the least quota that the kernel takes.
    assert quota_files("cgroup v2", 0.05) == {"cpu.max": "1000 20000"}
    assert quota_files("cgroup v1", None) == {"cpu.cfs_quota_us": "-1"}
    assert quota_files("cgroup v2", None) == {"cpu.max": "max 10000"}


def test_groups_of_version_2_get_the_controller(tmp_path, monkeypatch):
    """A folder behaves as control groups do: new folders have files, and need not keep them."""
    files = ("cgroup.procs", "cgroup.subtree_control", "cpu.weight", "cpu.max")
    mkdir, rmdir, write = Path.mkdir, Path.rmdir, Path.write_text
    written = []

    def make(path):
        mkdir(path)
        for name in files:
            write(path / name, "")

    def remove(path):
        for name in files:
            (path / name).unlink()
        rmdir(path)

    def note(path, text):
        name = re.sub(r"wavemare-[^/]+", "HOME", str(path.relative_to(tmp_path)))
        written.append((name, text))
        return write(path, text)

    (tmp_path / "cgroup.controllers").touch()
    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "rmdir", remove)
    monkeypatch.setattr(Path, "write_text", note)
    with open_throttle(tmp_path) as throttle:
        assert throttle.way == "cgroup v2"
        throttle.limit(17, 0.25)
    assert [each for each in written if "trial" not in each[0]] == [
        ("cgroup.subtree_control", "+cpu"),
        ("HOME/cgroup.subtree_control", "+cpu"),
        ("HOME/cpu.weight", "10000"),
        ("HOME/17/cpu.max", "2500 10000"),
        ("HOME/17/cgroup.procs", "17"),
        ("cgroup.procs", "17"),
    ]
    assert not list(tmp_path.glob("wavemare-*"))


def test_signals_are_the_way_where_there_are_no_groups(tmp_path):
    (tmp_path / "cpu").mkdir()  # an ordinary folder, in which groups have no quota
    with open_throttle(tmp_path) as throttle:
        assert throttle.way == "pacing"
        threads = threading.active_count()
        with started() as process:
            throttle.limit(process.pid, 0.5)
            assert threading.active_count() == threads + 1
        throttle.limit(os.getpid(), None)
    assert threading.active_count() == threads
    assert list(tmp_path.rglob("*")) == [tmp_path / "cpu"]


class Noted(Throttle):
    """Limits nothing."""

    way = "noted"

    def __init__(self):
        self.asked = []

    def limit(self, pid, share):
        self.asked.append((pid, share))

    def close(self):
        return None


@pytest.mark.parametrize(
    ("pids", "known"), [(None, os.getpid()), ({3: 99}, 99)], ids=["own", "told"]
)
def test_ranks_get_the_share_that_they_ask_for(pids, known):
    throttle = Noted()
    with shares_on_demand(throttle, None if pids is None else lambda: pids) as folder:
        ask_for_share(folder, 3, 0.5)
        ask_for_share(folder, 3, None)
    assert throttle.asked == [(known, 0.5), (known, None)]
    assert not folder.exists()


def test_a_rank_that_nobody_answers_says_so(tmp_path):
    with pytest.raises(LaunchError, match="nobody has limited this rank"):
        ask_for_share(tmp_path, 0, 0.5, timeout_s=0.05)
