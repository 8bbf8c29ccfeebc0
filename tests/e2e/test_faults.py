# SPDX-License-Identifier: Apache-2.0
"""What can befall a rank, under every launcher: seen in time, told once, with an exit code."""

import os
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "multiproc" / "programs" / "faults.py"
TIMEOUT_S = 4.0
LATEST_S = TIMEOUT_S + 5
ENGINES = {"deepspeed": "data", "torchrun": "pipemare", "mpi4py": "1f1b"}

pytestmark = [pytest.mark.slow, pytest.mark.world_size(2)]


@pytest.fixture
def run(command, words_of, tmp_path):
    """Start the program under a launcher; return how it ended and when, after the fault."""

    def run_fault(launcher, fault, environment=None):
        options = [PROGRAM, tmp_path, fault, ENGINES[launcher], "--timeout", TIMEOUT_S]
        environment = {"DS_ACCELERATOR": "cpu", **(environment or {})}
        ended = command(*words_of(launcher), *options, environment=environment)
        when = tmp_path / "when"
        lasted = time.time() - float(when.read_text()) if when.exists() else None
        return ended, lasted

    return run_fault


def reported(folder):
    """Return when the last report was written, after the fault."""
    times = [report.stat().st_mtime for report in (folder / "watchdog").glob("rank_*.txt")]
    return max(times) - float((folder / "when").read_text())


@pytest.mark.parametrize("launcher", ENGINES)
@pytest.mark.parametrize("fault", ["stop", "loader"])
def test_a_rank_that_stands_still(run, tmp_path, launcher, fault):
    ended, _ = run(launcher, fault)
    assert ended.code != 0
    assert ended.output.count("suspect: rank 1 (") == 1, ended.output[-5000:]
    assert reported(tmp_path) <= LATEST_S


@pytest.mark.parametrize("launcher", ENGINES)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill", None),
        ("raise", "ValueError: this rank's own fault"),
        ("memory", "can't allocate memory"),
        ("exit", None),
    ],
)
def test_a_rank_that_ends(run, tmp_path, launcher, fault, words):
    """A launcher may end the other before it can say a word, where it sees the end by itself.

    MPICH's ``mpirun`` ends all ranks where one has left with 0, and passes that on as its own code.
    """
    ended, lasted = run(launcher, fault)
    assert not list(tmp_path.glob("trained_*"))
    assert ended.code != 0 or (launcher, fault) == ("mpi4py", "exit"), ended.output[-5000:]
    assert lasted <= LATEST_S
    assert ended.output.count("suspect: ") <= 1
    if words is not None:
        assert ended.output.count(words) >= 1
        assert "suspect: " not in ended.output


@pytest.mark.parametrize("launcher", ENGINES)
def test_unequal_numbers_of_batches(run, launcher):
    ended, _ = run(launcher, "batches")
    if ENGINES[launcher] == "pipemare":
        # The last stage reads labels only; its data ends, and so does that of the first.
        assert ended.code != 0
        return
    assert ended.code != 0, ended.output[-5000:]
    assert ended.output.count("suspect: ") == 1, ended.output[-5000:]


@pytest.mark.parametrize("launcher", ENGINES)
def test_a_slow_rank(run, launcher):
    ended, _ = run(launcher, "slow")
    ended.check()
    assert "watchdog" not in ended.output


@pytest.mark.parametrize("launcher", ENGINES)
def test_a_stale_lock_of_an_extension_build(run, tmp_path, launcher):
    """DeepSpeed would wait for it without end."""
    for extension in ("deepspeed_shm_comm", "cpu_adam"):
        (tmp_path / "extensions" / extension).mkdir(parents=True)
        (tmp_path / "extensions" / extension / "lock").touch()
    environment = {
        "WAVEMARE_COMPILED_OPS": "1",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
    }
    started = time.time()
    ended, _ = run(launcher, "lock", environment)
    assert ended.code != 0
    assert "extensions/deepspeed_shm_comm/lock" in ended.output
    assert "remove that file" in ended.output
    assert time.time() - started < 120


@pytest.mark.parametrize("launcher", ENGINES)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")
def test_a_filled_disk(run, tmp_path, launcher):
    disk = tmp_path / "full"
    disk.mkdir()
    mounted = os.system(f"mount -t tmpfs -o size=64k tmpfs {disk}")
    if mounted != 0:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        ended, lasted = run(launcher, "disk")
    finally:
        assert os.system(f"umount {disk}") == 0
    assert ended.code != 0
    assert "are free there" in ended.output, ended.output[-5000:]
    assert lasted <= LATEST_S
