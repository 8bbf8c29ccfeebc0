# SPDX-License-Identifier: Apache-2.0
"""Processes get their share of a core by quotas of the kernel; nothing stays; ranks ask for it."""

import os
import re
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from wavemare.bench.cluster.limits import (
    ADDRESS,
    CONTROL_GROUPS,
    Throttle,
    ask,
    quota_files,
    serving,
)
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


try:
    with Throttle():
        OBSTACLE = None
except LaunchError as error:
    OBSTACLE = str(error)


@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
def test_nothing_stays_after_an_error_and_after_a_process_that_has_ended():
    def groups():
        own = f"wavemare-{os.getpid()}-*"
        return [*CONTROL_GROUPS.glob(own), *CONTROL_GROUPS.glob(f"*/{own}")]

    def fail():
        with Throttle() as throttle:
            with started() as process:
                throttle.limit(process.pid, 0.5)
                for group in groups():
                    own = group / str(process.pid)
                    assert (own / "cgroup.procs").read_text().split() == [str(process.pid)]
                    for name, text in quota_files(throttle.way, 0.5).items():
                        assert (own / name).read_text().strip() == text
            assert groups()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
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
    with Throttle(tmp_path) as throttle:
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


def test_folders_without_quotas_are_refused(tmp_path):
    (tmp_path / "cpu").mkdir()  # an ordinary folder, in which groups have no quota
    with pytest.raises(LaunchError, match="Run as root"):
        Throttle(tmp_path)
    assert list(tmp_path.rglob("*")) == [tmp_path / "cpu"]


def test_ranks_get_what_they_ask_for(monkeypatch):
    asked = []
    with serving(lambda pid, share: asked.append((pid, share))) as address:
        monkeypatch.setenv(ADDRESS, address)
        for share in (0.5, None):
            ask(share)
    assert asked == [(os.getpid(), 0.5), (os.getpid(), None)]
    assert not Path(address).exists()


def test_a_request_that_fails_is_an_error_of_the_rank(monkeypatch):
    with serving(lambda pid, value: 1 / 0) as address:
        monkeypatch.setenv(ADDRESS, address)
        with pytest.raises(LaunchError, match="has not done it"):
            ask(0.5)
    with pytest.raises(LaunchError, match="has not done it"):
        ask(0.5)
