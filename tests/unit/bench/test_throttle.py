# SPDX-License-Identifier: Apache-2.0
"""Processes get their share of a core: by quotas of the kernel, or by signals; nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import wavemare.bench.throttle as throttle_module
from wavemare.bench.share_requests import ask_for_share, shares_on_demand
from wavemare.bench.throttle import (
    GroupThrottle,
    PacingThrottle,
    Throttle,
    open_throttle,
    quota_files,
)
from wavemare.errors import LaunchError


@contextmanager
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """A process with two threads that compute."""
    loop = "import threading\ndef f():\n    while True: pass\n"
    code = loop + "threading.Thread(target=f, daemon=True).start()\nprint(flush=True)\nf()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def used_share(pid: int, seconds: float) -> float:
    """Return which share of a core's time a process has now: by its own processor time."""
    times, started = psutil.Process(pid).cpu_times(), time.perf_counter()
    time.sleep(seconds)
    after = psutil.Process(pid).cpu_times()
    used = after.user + after.system - times.user - times.system
    return used / (time.perf_counter() - started)


@contextmanager
def pacing() -> Iterator[Throttle]:
    throttle = PacingThrottle()
    try:
        yield throttle
    finally:
        throttle.close()


@pytest.mark.parametrize("opened", [open_throttle, pacing])
def test_a_busy_process_gets_its_share_and_later_all(opened: type) -> None:
    # Other programs share the cores: what a process gets is compared with what it could have.
    with busy() as process:
        with opened() as throttle:
            throttle.limit(process.pid, 0.1)
            limited = used_share(process.pid, 2.0)
            throttle.limit(process.pid, None)
            free = used_share(process.pid, 0.5)
            throttle.limit(process.pid, 0.1)
        assert process.poll() is None
        assert 0.01 < limited < 0.6 * free
        assert used_share(process.pid, 0.5) > 1.5 * limited


@pytest.mark.parametrize("late_s", [0.0, 0.03], ids=["on time", "late"])
def test_a_late_pacer_keeps_the_share(late_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    now, ran, since = [0.0], [0.0], [0.0]

    class Late(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            now[0] += timeout + late_s * (1 + len(signals) % 3)
            return now[0] > 60.0

    signals: list[int] = []

    def send(_: int, number: int) -> None:
        signals.append(number)
        if number == signal.SIGSTOP:
            ran[0] += now[0] - since[0]
        since[0] = now[0]

    monkeypatch.setattr(throttle_module.os, "kill", send)
    monkeypatch.setattr(throttle_module.time, "perf_counter", lambda: now[0])
    throttle_module._pace(1, 0.25, Late())
    assert signals[:4] == [signal.SIGSTOP, signal.SIGCONT] * 2
    assert ran[0] / now[0] == pytest.approx(0.25, rel=0.02)


def test_nothing_stays_after_an_error_and_after_a_process_that_has_ended() -> None:
    kept: list[Path] = []

    def fail(how: Callable[[], object]) -> None:
        with open_throttle() as throttle:
            with busy() as process:
                throttle.limit(process.pid, 0.5)
            if isinstance(throttle, GroupThrottle):
                kept.append(throttle._home)
                assert (kept[-1] / str(process.pid)).exists()
            how()

    with pytest.raises(ZeroDivisionError):
        fail(lambda: 1 / 0)
    with pytest.raises(SystemExit):
        fail(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not any(folder.exists() for folder in kept)


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


class Kernel:
    """A folder that behaves as control groups do: new folders have files, which do not keep them.

    Args:
        mount: The folder.
        files: Of a new group.
    """

    def __init__(
        self, mount: Path, files: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mount.mkdir(parents=True)
        (mount / "cgroup.procs").write_text("")
        self.written: list[tuple[str, str]] = []
        mkdir, rmdir, write = Path.mkdir, Path.rmdir, Path.write_text

        def make(path: Path, *arguments: object, **options: object) -> None:
            mkdir(path, *arguments, **options)  # type: ignore[arg-type]
            if path.is_relative_to(mount):
                for name in files:
                    write(path / name, "")

        def remove(path: Path) -> None:
            if path.is_relative_to(mount):
                for name in files:
                    (path / name).unlink()
            rmdir(path)

        def note(path: Path, text: str, **options: object) -> int:
            if path.is_relative_to(mount):
                self.written.append((str(path.relative_to(mount)), text))
            return write(path, text)

        monkeypatch.setattr(Path, "mkdir", make)
        monkeypatch.setattr(Path, "rmdir", remove)
        monkeypatch.setattr(Path, "write_text", note)


def test_groups_of_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("cgroup.procs", "cpu.shares", "cpu.cfs_period_us", "cpu.cfs_quota_us")
    kernel = Kernel(tmp_path / "cpu", names, monkeypatch)
    with open_throttle(tmp_path) as throttle:
        assert throttle.way == "cgroup v1"
        assert ("cpu.shares", "262144") in [(Path(n).name, t) for n, t in kernel.written]
        kernel.written.clear()
        throttle.limit(17, 0.25)
        throttle.limit(17, 0.5)
    home = kernel.written[0][0].split("/")[0]
    assert kernel.written == [
        (f"{home}/17/cpu.cfs_period_us", "10000"),
        (f"{home}/17/cpu.cfs_quota_us", "2500"),
        (f"{home}/17/cgroup.procs", "17"),
        (f"{home}/17/cpu.cfs_period_us", "10000"),
        (f"{home}/17/cpu.cfs_quota_us", "5000"),
        ("cgroup.procs", "17"),
    ]
    assert [file.name for file in (tmp_path / "cpu").iterdir()] == ["cgroup.procs"]


def test_groups_of_version_2_get_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = tmp_path / "groups"
    names = ("cgroup.procs", "cgroup.subtree_control", "cpu.weight", "cpu.max")
    kernel = Kernel(mount, names, monkeypatch)
    (mount / "cgroup.controllers").touch()
    with open_throttle(mount) as throttle:
        assert throttle.way == "cgroup v2"
        throttle.limit(17, 0.25)
    (top, plus), (home, again), (heavy, weight), *rest = kernel.written
    assert (heavy, weight) == (f"{home.split('/')[0]}/cpu.weight", "10000")
    assert (top, plus, again) == ("cgroup.subtree_control", "+cpu", "+cpu")
    assert home.endswith("/cgroup.subtree_control")
    assert (f"{home.split('/')[0]}/17/cpu.max", "2500 10000") in rest


def test_signals_are_the_way_where_there_are_no_groups(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()  # an ordinary folder, in which groups have no quota
    with open_throttle(tmp_path) as throttle:
        assert throttle.way == "pacing"
        threads = threading.active_count()
        with busy() as process:
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
