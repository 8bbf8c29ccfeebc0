# SPDX-License-Identifier: Apache-2.0
"""The pool of ranks: how a rank ended is reported, a hang shows its stacks, nothing is left."""

import os
import re
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


HANGS = """
import os, threading
def waits_for_ever():
    threading.Event().wait()
if os.environ["RANK"] == "1":
    waits_for_ever()
"""
PIDS = """
import json, os, sys
from pathlib import Path
Path(sys.argv[1], f"rank_{os.environ['RANK']}.json").write_text(json.dumps(os.getpid()))
"""


@pytest.mark.world_size(2)
def test_a_rank_that_hangs_shows_its_stacks_and_is_replaced(launch, tmp_path):
    (tmp_path / "pids.py").write_text(PIDS)
    (tmp_path / "hangs.py").write_text(HANGS)

    def pids():
        finished = launch(tmp_path / "pids.py", folder=tmp_path).check()
        return {finished.result(rank) for rank in (0, 1)}

    first = pids()
    assert pids() == first
    hung = launch(tmp_path / "hangs.py", timeout=10, folder=tmp_path)
    assert hung.codes == [0, -signal.SIGKILL]
    assert hung.ended_by_harness == {1}
    assert "in waits_for_ever" in hung.outputs[1]
    assert len(pids() & first) == 1


CHANGES = """
import json, os, sys
from pathlib import Path
import deepspeed, torch, wavemare
from deepspeed.runtime.engine import DeepSpeedEngine
found = [
    os.environ.get("LEFT"),
    getattr(deepspeed, "left", None),
    DeepSpeedEngine.train_batch_size.__name__,
    torch.get_default_dtype() is torch.float64,
    torch.rand(1).item(),
    sys.argv[2:],
    torch.distributed.is_initialized(),
]
Path(sys.argv[1], f"rank_{os.environ['RANK']}.json").write_text(json.dumps(found))
os.environ["LEFT"] = "left"
deepspeed.left = 1
DeepSpeedEngine.train_batch_size = lambda self: 0
torch.set_default_dtype(torch.float64)
wavemare.init_distributed()
"""


@pytest.mark.world_size(2)
def test_a_program_finds_nothing_of_the_one_before(launch, tmp_path):
    (tmp_path / "changes.py").write_text(CHANGES)
    results = []
    for words in (["a"], []):
        finished = launch(tmp_path / "changes.py", *words, folder=tmp_path).check()
        results.append([finished.result(rank) for rank in (0, 1)])
    for rank in (0, 1):
        *found, words, _ = results[0][rank]
        assert results[1][rank] == [*found, [], False]
        assert found[:4] == [None, None, "train_batch_size", False]


LEAKS = """
import socket, subprocess, sys
kept = []

def test_socket():
    kept.append(socket.socket())

def test_orphan():
    program = "import subprocess; subprocess.Popen(['sleep', '9'])"
    subprocess.run([sys.executable, "-c", program], check=True)

def test_nothing():
    socket.socket()
"""
SUITE_LEAKS = """
import pathlib, subprocess, sys

def test_leaks(tmp_path):
    pathlib.Path("/dev/shm/NAME").touch()
    program = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); time.sleep(60)"
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {program!r}])"
    subprocess.run([sys.executable, "-c", program], check=True)
"""


def run_suite(folder, text, area="unit"):
    """Run pytest with the fixtures of this suite on a file of one of its areas."""
    source = (Path(__file__).parents[1] / "conftest.py").read_text()
    (folder / "conftest.py").write_text(source.replace("GRACE_S = 60.0", "GRACE_S = 2.0"))
    (folder / area).mkdir()
    (folder / area / "test_leaks.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rE", folder]
    environment = {**os.environ, "COLUMNS": "500"}
    return subprocess.run(
        command, check=False, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )


def test_what_a_test_leaves_is_found(tmp_path):
    output = run_suite(tmp_path, LEAKS).stdout
    found = [line for line in output.splitlines() if line.startswith("ERROR ")]
    assert "3 passed, 2 errors" in output, output
    for name, words in {"socket": "socket:[", "orphan": "sleep 9"}.items():
        (line,) = [line for line in found if f"::test_{name} " in line]
        assert words in line, line


def test_what_the_suite_leaves_is_found(tmp_path):
    name = f"test-of-leaks-{os.getpid()}"
    ended = run_suite(tmp_path, SUITE_LEAKS.replace("NAME", name), "multiproc")
    left = [line for line in ended.stdout.splitlines() if line.startswith("left behind")]
    try:
        assert ended.returncode == 1
        assert "1 passed" in ended.stdout
        assert any(f"/dev/shm/{name}" in line for line in left), ended.stdout
        (process,) = [line for line in left if "process" in line]
        assert re.search(r"ports \[\d+\]", process), process
    finally:
        Path("/dev/shm", name).unlink()
        for line in left:
            if number := re.search(r"process (\d+) ", line):
                os.kill(int(number[1]), signal.SIGKILL)
