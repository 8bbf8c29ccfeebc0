# SPDX-License-Identifier: Apache-2.0
"""One script under every launcher: it trains alike, and its failures are seen."""

import contextlib
import json
import re
import signal
import socket
from pathlib import Path

import psutil
import pytest
import torch

SCRIPT = Path(__file__).parent / "programs" / "script.py"
FAULT = "ValueError: this rank's own fault"
nightly = pytest.mark.nightly
OTHERS = ("deepspeed", "torchrun", "mpi4py", "launch")


def without_notices(output):
    """Leave out what Open MPI's mpirun says of a job's end, between two rules."""
    rule = "^-{60,}$"
    return re.sub(f"{rule}.*?{rule}", "", output, flags=re.MULTILINE | re.DOTALL)


def twin():
    """What the script computes, on one process: ranks' gradients are averaged."""
    torch.manual_seed(7)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        parts = [
            model(torch.arange(12.0).view(4, 3) / (rank + 1)).square().mean() for rank in (0, 1)
        ]
        (sum(parts) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([part.item() for part in parts])
    return [list(of_rank) for of_rank in zip(*losses, strict=True)]


def check_results(folder):
    expected = twin()
    for rank in (0, 1):
        found = json.loads((folder / f"rank_{rank}.json").read_text())
        assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == (
            str(rank),
            str(rank),
            "2",
        )
        assert found["losses"] == pytest.approx(expected[rank], rel=1e-5)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "launcher", ["mpirun", *(pytest.param(name, marks=nightly) for name in OTHERS)]
)
def test_a_script_runs_unchanged(words_of, command, tmp_path, launcher):
    command(*words_of(launcher), SCRIPT, tmp_path).check()
    check_results(tmp_path)


@pytest.mark.world_size(2)
def test_a_script_runs_by_the_variables_of_srun(launch, tmp_path):
    with socket.socket() as probe:
        probe.bind(("", 0))
        step = probe.getsockname()[1]
    launch(SCRIPT.with_name("by_srun.py"), SCRIPT, environment={"SLURM_STEP_ID": str(step)}).check()
    check_results(tmp_path)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("launcher", "end", "code"),
    [
        ("mpirun", "raise", 1),
        ("mpi4py", "exit", 3),
        ("launch", "raise", 1),
        ("launch", "exit", 3),
        ("launch", "kill", 137),  # in CI: test_faults.py
        ("torchrun", "raise", 1),
        ("torchrun", "kill", 1),
    ],
)
@nightly
def test_a_failure_is_the_result_and_the_last_word(
    words_of, command, tmp_path, launcher, end, code
):
    ended = command(*words_of(launcher), SCRIPT, tmp_path, end)
    assert ended.code == code, ended.output[-4000:]
    lines = [line for line in without_notices(ended.output).splitlines() if line.strip()]
    if end == "raise" and launcher == "torchrun":
        # Its own report comes last, with the error in it.
        report = ended.output.rpartition("Root Cause")[2]
        assert FAULT in report
        assert "rank      : 1" in report
    elif end == "raise":
        assert lines[-1] == FAULT
        assert ended.output.count(FAULT) == 1
    if end == "kill" and launcher == "launch":
        assert "a rank was killed (signal 9)" in lines[-1]
        assert "memory ran out" in lines[-1]


@pytest.mark.world_size(2)
@nightly
def test_ctrl_c_ends_all_ranks(words_of, start, tmp_path):
    started = start(*words_of("launch"), SCRIPT, tmp_path, "wait")
    files = [tmp_path / f"rank_{rank}.pid" for rank in (0, 1)]
    started.wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    started.process.send_signal(signal.SIGINT)
    ended = started.end()
    assert ended.code == 130
    assert "Traceback" not in ended.output
    for file in files:  # Open MPI's daemon ends them a moment later
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(file.read_text())).wait(timeout=600)
