# SPDX-License-Identifier: Apache-2.0
"""Processes get their share of a core: by quotas of the kernel, or by signals; nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from wavemare.bench.share_requests import ask_for_share, shares_on_demand
from wavemare.bench.throttle import CONTROL_GROUPS, Throttle, open_throttle, pace, quota_files
from wavemare.errors import LaunchError


@contextmanager
def started() -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("late_s", [0.0, 0.03], ids=["on time", "late"])
def test_a_late_pacer_keeps_the_share(late_s: float) -> None:
    now, ran, since = 0.0, 0.0, 0.0
    signals: list[int] = []

    class Late(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now
            assert timeout is not None
            now += timeout + late_s * (1 + len(signals) % 3)
            return now > 60.0

    def send(_: int, number: int) -> None:
        nonlocal ran, since
        signals.append(number)
        if number == signal.SIGSTOP:
            ran += now - since
        since = now

    pace(1, 0.25, Late(), clock=lambda: now, send=send)
    assert signals[:4] == [signal.SIGSTOP, signal.SIGCONT] * 2
    assert ran / now == pytest.approx(0.25, rel=0.02)


def test_nothing_stays_after_an_error_and_after_a_process_that_has_ended() -> None:
    def groups() -> list[Path]:
        own = f"wavemare-{os.getpid()}-*"
        return [*CONTROL_GROUPS.glob(own), *CONTROL_GROUPS.glob(f"*/{own}")]

    def fail(how: Callable[[], object]) -> None:
        with open_throttle() as throttle:
            with started() as process:
                throttle.limit(process.pid, 0.5)
            assert bool(groups()) == (throttle.way != "pacing")
            how()

    with pytest.raises(ZeroDivisionError):
        fail(lambda: 1 / 0)
    with pytest.raises(SystemExit):
        fail(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert groups() == []


def test_quotas_are_written_as_the_kernel_reads_them() -> None:
    assert quota_files("cgroup v1", 0.45) == {
        "cpu.cfs_period_us": "10000",
        "cpu.cfs_quota_us": "4500",
    }
    assert quota_files("cgroup v2", 0.45) == {"cpu.max": "4500 10000"}
    # 1 ms is the least quota that the kernel takes.
    assert quota_files("cgroup v2", 0.05) == {"cpu.max": "1000 20000"}
    assert quota_files("cgroup v1", None) == {"cpu.cfs_quota_us": "-1"}
    assert quota_files("cgroup v2", None) == {"cpu.max": "max 10000"}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, str]]]:
    """Make a folder that behaves as control groups do: new folders have files, and may keep them.

    Returns a function that begins this, and returns what is written below the folder.
    """
    mkdir, rmdir, write = Path.mkdir, Path.rmdir, Path.write_text

    def begin(mount: Path, *files: str) -> list[tuple[str, str]]:
        written: list[tuple[str, str]] = []
        mount.mkdir(parents=True)
        (mount / "cgroup.procs").touch()

        def make(path: Path) -> None:
            mkdir(path)
            for name in files if path.is_relative_to(mount) else ():
                write(path / name, "")

        def remove(path: Path) -> None:
            for name in files:
                (path / name).unlink(missing_ok=True)
            rmdir(path)

        def note(path: Path, text: str) -> int:
            written.append((os.path.relpath(path, mount), text))
            return write(path, text)

        monkeypatch.setattr(Path, "mkdir", make)
        monkeypatch.setattr(Path, "rmdir", remove)
        monkeypatch.setattr(Path, "write_text", note)
        return written

    return begin


def test_groups_of_version_1(tmp_path: Path, kernel: Callable[..., list[tuple[str, str]]]) -> None:
    written = kernel(
        tmp_path / "cpu", "cgroup.procs", "cpu.shares", "cpu.cfs_period_us", "cpu.cfs_quota_us"
    )
    with open_throttle(tmp_path) as throttle:
        assert throttle.way == "cgroup v1"
        assert ("cpu.shares", "262144") in [(Path(name).name, text) for name, text in written]
        written.clear()
        throttle.limit(17, 0.25)
        throttle.limit(17, 0.5)
    home = written[0][0].split("/")[0]
    assert written == [
        (f"{home}/17/cpu.cfs_period_us", "10000"),
        (f"{home}/17/cpu.cfs_quota_us", "2500"),
        (f"{home}/17/cgroup.procs", "17"),
        (f"{home}/17/cpu.cfs_period_us", "10000"),
        (f"{home}/17/cpu.cfs_quota_us", "5000"),
        ("cgroup.procs", "17"),
    ]
    assert [file.name for file in (tmp_path / "cpu").iterdir()] == ["cgroup.procs"]


def test_groups_of_version_2_get_the_controller(
    tmp_path: Path, kernel: Callable[..., list[tuple[str, str]]]
) -> None:
    mount = tmp_path / "groups"
    files = ("cgroup.procs", "cgroup.subtree_control", "cpu.weight", "cpu.max")
    written = kernel(mount, *files)
    (mount / "cgroup.controllers").touch()
    with open_throttle(mount) as throttle:
        assert throttle.way == "cgroup v2"
        throttle.limit(17, 0.25)
    home = written[1][0].split("/")[0]
    assert written[:3] == [
        ("cgroup.subtree_control", "+cpu"),
        (f"{home}/cgroup.subtree_control", "+cpu"),
        (f"{home}/cpu.weight", "10000"),
    ]
    assert (f"{home}/17/cpu.max", "2500 10000") in written


def test_signals_are_the_way_where_there_are_no_groups(tmp_path: Path) -> None:
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

    def __init__(self) -> None:
        self.asked: list[tuple[int, float | None]] = []

    def limit(self, pid: int, share: float | None) -> None:
        self.asked.append((pid, share))

    def close(self) -> None:
        return None


@pytest.mark.parametrize(
    ("pids", "known"), [(None, os.getpid()), ({3: 99}, 99)], ids=["own", "told"]
)
def test_ranks_get_the_share_that_they_ask_for(pids: Mapping[int, int] | None, known: int) -> None:
    throttle = Noted()
    with shares_on_demand(throttle, None if pids is None else lambda: pids) as folder:
        ask_for_share(folder, 3, 0.5)
        ask_for_share(folder, 3, None)
    assert throttle.asked == [(known, 0.5), (known, None)]
    assert not folder.exists()


def test_a_rank_that_nobody_answers_says_so(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="nobody has limited this rank"):
        ask_for_share(tmp_path, 0, 0.5, timeout_s=0.05)
