# SPDX-License-Identifier: Apache-2.0
"""Processes get their share of a core by quotas of the kernel; nothing stays; ranks ask for it."""

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.cluster.limits import (
    ADDRESS,
    CONTROL_GROUPS,
    Throttle,
    ask,
    quota_files,
    serving,
)
from support.refusals import refuses
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


def test_folders_without_quotas_are_refused(tmp_path):
    (tmp_path / "cpu").mkdir()  # an ordinary folder, in which groups have no quota
    with refuses(LaunchError, "control groups", str(tmp_path)):
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
        with refuses(LaunchError, "request", 0.5):
            ask(0.5)
    with refuses(LaunchError, "request", 0.5):
        ask(0.5)
