# SPDX-License-Identifier: Apache-2.0
"""A disk that is full ends what is noted, not the training: whole lines, one warning."""

import errno
import os
import resource
import signal
import subprocess
import sys
from io import FileIO

from wavemare.observe import lines as module
from wavemare.observe.lines import Events, Lines, read_events, read_metrics

PROGRAM = """
import resource, sys
from pathlib import Path
from wavemare.observe import Events, Run
run, events = Run(Path(sys.argv[1]), rank=0), Events(Path(sys.argv[1]), rank=0)
events.listen()
events.open()
for step in range(1, 400):
    if step == 300:  # there is room again, but the files would have a gap
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.log(step, loss=1 / step)
    events.note("memory", step, bytes=step)
run.close()
events.close()
print("trained")
"""


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "wavemare"]


def test_a_file_system_that_tells_at_the_end(tmp_path, monkeypatch, caplog):
    class Late(FileIO):
        def close(self):
            was_open = not self.closed
            super().close()
            if was_open:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(module, "FileIO", Late)
    lines = Lines(tmp_path / "file", tmp_path)
    lines.add("one\n")
    lines.close()
    assert len(warnings_of(caplog)) == 1


def limit_files():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def test_a_process_at_its_limit_goes_on_and_says_so_once(tmp_path):
    """A limit of file sizes stands in for a full disk, without mounting one."""
    run = tmp_path / "run"
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(run)],
        capture_output=True,
        text=True,
        preexec_fn=limit_files,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr
    assert ended.stderr.count("cannot be written (File too large)") == 1
    assert (run / "metrics.jsonl").stat().st_size <= 4096
    logged = [line["step"] for line in read_metrics(run / "metrics.jsonl")]
    assert logged == list(range(1, len(logged) + 1))
    assert 10 < len(logged) < 300
    # A run that is resumed adds lines that can be read.
    noted = len(read_events(run))
    assert 0 < noted < 399
    again = Events(run, rank=0)
    again.open()
    again.note("memory", 400, bytes=1)
    again.close()
    assert len(read_events(run)) == noted + 1
