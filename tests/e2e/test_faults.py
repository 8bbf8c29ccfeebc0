# SPDX-License-Identifier: Apache-2.0
"""What can befall a rank, under every launcher: told once, with an exit code."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "multiproc" / "programs" / "faults.py"
ENGINES = {"deepspeed": "data", "torchrun": "pipemare", "mpi4py": "1f1b"}

pytestmark = pytest.mark.world_size(2)
nightly = pytest.mark.nightly


def cells(*faults):
    """Return each fault under each launcher."""
    return pytest.mark.parametrize(
        ("launcher", "fault"), [(launcher, fault) for fault in faults for launcher in ENGINES]
    )


@pytest.fixture
def run(command, words_of, tmp_path):
    """Start the program under a launcher; return how it ended."""

    def run_fault(launcher, fault, *more, environment=None):
        engine = ENGINES.get(launcher, "data")
        options = [PROGRAM, tmp_path, fault, engine, "--timeout", 4.0, *more]
        return command(*words_of(launcher), *options, environment=environment)

    return run_fault


@nightly
@cells("stop")
def test_a_rank_that_stands_still(run, tmp_path, launcher, fault):
    ended = run(launcher, fault)
    assert ended.code != 0
    assert ended.output.count("suspect: rank 1 (") == 1, ended.output[-5000:]
    assert list((tmp_path / "watchdog").glob("rank_*.txt"))


@nightly
@cells("kill", "raise", "exit")
def test_a_rank_that_ends(run, tmp_path, launcher, fault):
    """A launcher may end the other before it can say a word, where it sees the end by itself.

    MPICH's ``mpirun`` ends all ranks where one has left with 0, and passes that on as its own code.
    """
    ended = run(launcher, fault)
    assert not list(tmp_path.glob("trained_*"))
    assert ended.code != 0 or (launcher, fault) == ("mpi4py", "exit"), ended.output[-5000:]
    assert ended.output.count("suspect: ") <= 1
    if fault == "raise":
        assert "ValueError: this rank's own fault" in ended.output
        assert "suspect: " not in ended.output


@pytest.mark.parametrize(
    ("fault", "rank", "code"),
    [
        ("kill", 1, 137),
        pytest.param("kill", 0, 137, marks=nightly),
        pytest.param("stop", 1, 124, marks=nightly),
        pytest.param("stop", 0, 124, marks=nightly),
    ],
)
def test_the_exit_code_is_that_of_the_cause(run, fault, rank, code):
    """Others end, too: the launcher is to see the killed rank first, but a stopped one last."""
    ended = run("launch", fault, "--rank", rank)
    assert ended.code == code, ended.output[-5000:]
    assert ended.output.count("suspect: ") <= 1
    if fault == "kill":
        assert "a rank was killed (signal 9)" in ended.output.rstrip().splitlines()[-1]


@nightly
def test_a_stale_lock_of_an_extension_build(run, tmp_path):
    """DeepSpeed would wait for it without end."""
    for extension in ("deepspeed_shm_comm", "cpu_adam"):
        (tmp_path / "extensions" / extension).mkdir(parents=True)
        (tmp_path / "extensions" / extension / "lock").touch()
    environment = {
        "WAVEMARE_COMPILED_OPS": "1",
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
    }
    ended = run("deepspeed", "lock", environment=environment)
    assert ended.code != 0
    assert "extensions/deepspeed_shm_comm/lock" in ended.output
    assert "remove that file" in ended.output


@nightly
def test_a_full_disk_ends_what_a_run_notes_and_the_next_checkpoint(
    disk, recipe, recipe_config, small_options
):
    small_disk = disk(64)
    (small_disk / "filler").write_bytes(bytes(48 << 10))  # a page or two are left
    options = small_options("gpt", small_disk / "run", max_steps=12, save_interval=12)
    ended = recipe(
        "gpt/pretrain", *options, "--deepspeed_config", recipe_config("gpt/pretrain", "zero")
    )
    assert ended.code == 2, ended.output[-5000:]
    assert "step 12/12" in ended.output
    assert 1 <= ended.output.count("cannot be written (No space left on device)") <= 2  # by rank
    assert "are free there" in ended.output, ended.output[-5000:]
