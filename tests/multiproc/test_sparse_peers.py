# SPDX-License-Identifier: Apache-2.0
"""Streaming, AGsparse and SparCML between processes, against the sum in the order of the ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "sparse_peers.py"
MPIRUN = Path(sys.executable).parent / "mpirun"


def check(result):
    assert result["failures"] == []
    # 8 cases; 5 types and 3 executors, and 4 more ways of streaming float32.
    assert result["checks"] == 8 * (5 * 3 + 4)
    assert result["modes"] == {"streaming": True, "agsparse": True, "sparcml": True}


@pytest.mark.parametrize(
    "ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 4))]
)
def test_sums_are_those_of_the_ranks_in_order_over_gloo(launch_once, ranks):
    for result in launch_once(PROGRAM, "torch", ranks=ranks):
        check(result)


@pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun in this environment")
@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [3, 5])
def test_sums_are_those_of_the_ranks_in_order_over_mpi(tmp_path, ranks):
    program = [sys.executable, "-m", "mpi4py", str(PROGRAM), str(tmp_path), "mpi"]
    command = [str(MPIRUN), "-n", str(ranks), "-genv", "OMP_NUM_THREADS", "1", *program]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for rank in range(ranks):
        check(json.loads((tmp_path / f"rank_{rank}.json").read_text()))


MODES = ["ordered", "pushpull", "streaming", "allgather", "packed", "dense"]


@pytest.mark.world_size(3)
@pytest.mark.parametrize("modes", [MODES[:3], pytest.param(MODES[3:], marks=pytest.mark.nightly)])
def test_staged_messages_change_nothing(launch_once, modes):
    for results in launch_once("sparse_staging.py", *modes, ranks=3):
        assert len(results) == 2 * len(modes)
        for name, result in results.items():
            assert result["staged"]["same"], name
            assert result["staged"] == result["plain"], name
            assert any(result["plain"]["bytes"]), name
