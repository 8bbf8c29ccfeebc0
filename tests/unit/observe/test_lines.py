# SPDX-License-Identifier: Apache-2.0
"""A disk that is full ends what is noted, not the training: whole lines, one warning."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from io import FileIO
from pathlib import Path

import pytest

from wavemare.observe import lines as module
from wavemare.observe.events import Events, read_events
from wavemare.observe.lines import Lines
from wavemare.observe.run import Run, read_metrics

PROGRAM = """
import sys
from pathlib import Path
from wavemare.observe import Events, Run
run, events = Run(Path(sys.argv[1]), rank=0), Events(Path(sys.argv[1]), rank=0)
events.listen()
events.open()
for step in range(1, 400):
    run.log(step, loss=1 / step)
    events.note("memory", step, bytes=step)
run.close()
events.close()
print("trained")
"""


class FullDisk(FileIO):
    """Takes so many bytes more in all, and then a part of a line."""

    room = 0

    def write(self, data) -> int:
        taken = min(len(data), FullDisk.room)
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        FullDisk.room -= taken
        return super().write(bytes(data)[:taken])


@pytest.fixture
def full_after(monkeypatch: pytest.MonkeyPatch):
    def fill(room: int) -> None:
        FullDisk.room = room
        monkeypatch.setattr(module, "FileIO", FullDisk)

    return fill


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "wavemare"]


def test_lines_are_added_to_what_is_there(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "deep" / "file", tmp_path)
    lines.add("")
    assert not (tmp_path / "deep").exists()
    lines.add("one\ntwo\n")
    assert (tmp_path / "deep" / "file").read_text() == "one\ntwo\n"  # at once
    lines.close()
    lines.close()
    lines.add("ö\n")
    lines.close()
    assert (tmp_path / "deep" / "file").read_text(encoding="utf-8") == "one\ntwo\nö\n"


def test_a_file_on_a_full_disk_ends_with_a_whole_line(
    tmp_path: Path, full_after, caplog: pytest.LogCaptureFixture
) -> None:
    full_after(10)
    lines = Lines(tmp_path / "file", tmp_path)
    for _ in range(4):
        lines.add("1234567\n")
    full_after(100)  # there is room again, but the file would have a gap
    lines.add("1234567\n")
    lines.close()
    lines.add("1234567\n")
    assert (tmp_path / "file").read_text() == "1234567\n"
    (warning,) = warnings_of(caplog)
    assert f"{tmp_path / 'file'} cannot be written (No space left on device)" in warning
    assert "the training goes on" in warning


def test_metrics_and_events_end_with_one_warning(
    tmp_path: Path, full_after, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning is an event itself, for which there is no room either."""
    run, events = Run(tmp_path, rank=0), Events(tmp_path, rank=0)
    events.listen()
    events.open()
    full_after(200)
    for step in range(1, 30):
        run.log(step, loss=1.0)
        events.note("memory", step, bytes=1)
    run.close()
    events.close()
    assert len(warnings_of(caplog)) == 1
    assert 0 < len(read_metrics(run.metrics_file)) < 29
    noted = read_events(tmp_path)
    assert 0 < len(noted) < 29
    # A run that is resumed adds lines that can be read.
    full_after(10**6)
    again = Events(tmp_path, rank=0)
    again.open()
    again.note("memory", 30, bytes=1)
    again.close()
    assert len(read_events(tmp_path)) == len(noted) + 1


def test_a_file_system_that_tells_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Late(FileIO):
        def close(self) -> None:
            was_open = not self.closed
            super().close()
            if was_open:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(module, "FileIO", Late)
    lines = Lines(tmp_path / "file", tmp_path)
    lines.add("one\n")
    lines.close()
    assert len(warnings_of(caplog)) == 1


def limit_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def test_a_process_at_its_limit_goes_on_and_says_so_once(tmp_path: Path) -> None:
    """A limit of file sizes stands in for a full disk, without mounting one."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=limit_files,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr
    assert ended.stderr.count("cannot be written (File too large)") == 1
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert metrics.stat().st_size <= 4096
    assert all(json.loads(line) for line in metrics.read_text().splitlines())
    assert 10 < len(read_metrics(metrics)) < 399
