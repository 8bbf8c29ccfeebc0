# SPDX-License-Identifier: Apache-2.0
"""What starts the ranks tells how they ended, and what is left behind is found."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PARTS = """
import os, sys, time
rank = int(os.environ["RANK"])
if rank == 1:
    time.sleep(1000)
if rank == 2:
    os.kill(os.getpid(), 9)
"""


@pytest.mark.world_size(3)
def test_the_ranks_that_the_harness_ends_are_told_apart(launch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PARTS)
    finished = launch(program, ranks=3, timeout=15)
    assert finished.codes == [0, -signal.SIGKILL, -signal.SIGKILL]
    assert finished.ended_by_harness == {1}
    with pytest.raises(AssertionError, match="ended by the harness"):
        finished.check()


LEAKS = """
import socket, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
kept = []
ORPHAN = "import subprocess, sys; subprocess.Popen(['sleep', '9'])"

def test_socket():
    kept.append(socket.socket())

def test_file(tmp_path):
    kept.append((tmp_path / "file").open("w"))

def test_executor():
    kept.append(ThreadPoolExecutor(1))
    kept[-1].submit(int).result()

def test_orphan():
    subprocess.run([sys.executable, "-c", ORPHAN], check=True)

def test_nothing():
    socket.socket()
    ring = [socket.socket()]
    ring.append(ring)
    ThreadPoolExecutor(1).submit(int).result()
    subprocess.run([sys.executable, "-c", ORPHAN.replace("9", "0.1")], check=True)
"""


def test_what_a_test_leaves_is_found(tmp_path):
    """The fixtures of this suite run around tests that leave something."""
    source = (Path(__file__).parents[1] / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(source.replace("GRACE_S = 5.0", "GRACE_S = 2.0"))
    (tmp_path / "test_leaks.py").write_text(LEAKS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rE", tmp_path]
    ended = subprocess.run(
        command,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "500"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
    )
    found = [line for line in ended.stdout.splitlines() if line.startswith("ERROR ")]
    assert "5 passed, 4 errors" in ended.stdout, ended.stdout
    told = {"socket": "socket:[", "file": "/file", "executor": "ThreadPool", "orphan": "sleep 9"}
    for name, words in told.items():
        (line,) = [line for line in found if f"::test_{name} " in line]
        assert words in line, line
