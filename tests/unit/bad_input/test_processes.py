# SPDX-License-Identifier: Apache-2.0
"""The exit codes of real processes, for one mistake at each door."""

import os
import subprocess
import sys

import pytest

PROCESSES = [
    pytest.param(
        ["wavemare", "train", "gpt", "--config", "nosuch.json"], "--config = ", id="configuration"
    ),
    pytest.param(["wavemare", "train", "gpt", "--hostfile", "nosuch"], "--hostfile", id="hostfile"),
    pytest.param(["wavemare", "plan", "show", "--file", "nosuch"], "--file = ", id="plan"),
    pytest.param(["wavemare", "launch", "nosuch.py"], "SCRIPT = ", id="script"),
]


@pytest.mark.parametrize(("words", "said"), PROCESSES)
def test_a_process_ends_with_code_2_and_one_line(words, said, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr.startswith(f"error: {said}")
    assert ended.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
