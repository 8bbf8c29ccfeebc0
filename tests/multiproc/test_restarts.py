# SPDX-License-Identifier: Apache-2.0
"""When the elastic agent starts ranks again, and what the job then ends with."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wavemare.cli import agent
from wavemare.engine.launch.environment import free_port

PROGRAM = Path(__file__).parent / "programs" / "restarted.py"
WORDS = ["$HOME", "$$", "${local_rank}"]


@pytest.fixture
def environment():
    """Return what DeepSpeed's launcher tells the first of two processes on a single host."""
    return {
        **os.environ,
        **{"CROSS_SIZE": "1", "CROSS_RANK": "0", "LOCAL_SIZE": "2", "LOCAL_RANK": "0"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
    }


def attempts_of(folder):
    """Return what the ranks of each attempt recorded."""
    found = {}
    for file in sorted(folder.glob("attempt_*.json")):
        found.setdefault(file.name.split("_")[1], []).append(json.loads(file.read_text()))
    return list(found.values())


@pytest.mark.parametrize(
    ("end", "code", "attempts"),
    [("kill", 0, 2), ("3", 3, 3), ("2", 2, 1)],  # 2: a mistake of the user is not repeated
)
def test_ranks_restart_as_often_as_allowed(fork, environment, tmp_path, end, code, attempts):
    command = [agent.__file__, 2, PROGRAM, tmp_path, end, *WORDS]
    ended = fork(*command, folder=tmp_path, timeout=300, environment=environment)
    assert ended.codes == [code], ended.outputs[0][-4000:]
    found = attempts_of(tmp_path)
    assert [len(ranks) for ranks in found] == [2] * attempts
    assert ended.outputs[0].count("; restart") == attempts - 1
    if end == "kill":
        assert "the ranks ended with 137; restart 1 of 2" in ended.outputs[0]
    for ranks in found:
        assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1"]
        assert {rank["WORLD_SIZE"] for rank in ranks} == {"2"}
        # Ranks of one attempt meet at a port that no other attempt has used.
        assert len({rank["MASTER_PORT"] for rank in ranks}) == 1
        assert {rank["TORCHELASTIC_USE_AGENT_STORE"] for rank in ranks} == {"False"}
        assert all(rank["words"] == WORDS for rank in ranks)
    assert len({ranks[0]["MASTER_PORT"] for ranks in found}) == attempts


def test_stopped_ranks_leave_and_are_not_restarted(environment, tmp_path):
    command = [sys.executable, agent.__file__, "2", str(PROGRAM), str(tmp_path), "wait"]
    process = subprocess.Popen(command, env=environment)
    deadline = time.monotonic() + 300
    while len([rank for ranks in attempts_of(tmp_path) for rank in ranks]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0
    assert len(attempts_of(tmp_path)) == 1


def test_other_processes_of_a_host_leave_the_ranks_to_the_agent(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    agent.main(["2", str(PROGRAM)])


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], 0),
        ([-15, 1], 1),  # the agent itself sends SIGTERM to the other ranks
        ([1, 2], 2),
        ([2, -9, 1], 137),
        ([-15], 143),
    ],
)
def test_the_cause_decides_the_exit_code(codes, expected):
    assert agent.exit_code(codes) == expected
