# SPDX-License-Identifier: Apache-2.0
"""Ranks and supervisors die under ``mpirun``; the others agree, and start again what is left."""

import json
import time

import psutil
import pytest

from wavemare.cli.supervisor import verdict
from wavemare.cli.warded import Ending
from wavemare.comm.mpi_library import describe_mpi

pytestmark = pytest.mark.world_size(3)


@pytest.fixture(scope="module")
def open_mpi():
    return describe_mpi().flavour == "Open MPI"


@pytest.fixture
def supervised(start):
    """Run three supervised ranks in each case: (restarts, fault, victim).

    Returns the job, and of each case what the ranks of each attempt told.
    """

    def run(*cases, options=()):
        job = start("supervised.py", "mpirun", json.dumps(cases), ranks=3, options=options)
        return job, [attempts_of(job.folder / f"case_{number}") for number in range(len(cases))]

    return run


def attempts_of(folder):
    """Return what the ranks of each attempt told, after what all attempts have in common."""
    attempts = {}
    for file in sorted(folder.glob("attempt_*.json")):
        _, attempt, _, rank = file.stem.split("_")
        attempts.setdefault(int(attempt), {})[int(rank)] = json.loads(file.read_text())
    ranks = [rank for attempt in attempts.values() for rank in attempt.values()]
    check_nothing_lives([pid for rank in ranks for pid in (*rank["pids"], rank["supervisor"])])
    assert not any(rank["in_mpi"] for rank in ranks)
    for attempt in attempts.values():
        assert [rank["size"] for rank in attempt.values()] == [len(attempt)] * len(attempt)
        assert len({rank["MASTER_PORT"] for rank in attempt.values()}) == 1
        assert [attempt[n]["LOCAL_RANK"] for n in sorted(attempt)] == [
            str(n) for n in range(len(attempt))
        ]
    return [attempts[number] for number in sorted(attempts)]


def check_nothing_lives(pids):
    deadline = time.monotonic() + 60  # the kernel is on its way
    while left := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ranks_are_started_again_as_often_as_allowed_and_leave_with_one_code(supervised):
    cases = [
        (2, "kill", 1),
        (1, "exit 3", 1),  # each time
        (2, "exit 2", 1),  # a mistake
        (2, "term", 1),  # one supervisor is asked to end: its rank saves, and so do the others
    ]
    job, found = supervised(*cases)
    job.check()
    assert job.results() == {rank: [0, 3, 2, 0] for rank in range(3)}
    assert [len(attempts) for attempts in found] == [2, 2, 1, 1]
    assert all(len(attempt) == 3 for attempts in found for attempt in attempts)
    outputs = job.output.split("next case\n")[1:]
    assert [output.count("; restart") for output in outputs] == [1, 1, 0, 0]
    # The same supervisors, in the same places, and another meeting point.
    killed = found[0]
    supervisors = [{n: a[n]["supervisor"] for n in a} for a in killed]
    assert supervisors[0] == supervisors[1]
    assert killed[0][0]["MASTER_PORT"] != killed[1][0]["MASTER_PORT"]
    assert "ended with 137" in outputs[0]
    assert outputs[0].count("rank 1 (") == 1
    assert "restart 1 of 2 as 3 ranks" in outputs[0]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_supervisor_leaves_fewer_ranks(supervised, open_mpi, victim):
    if not open_mpi:
        pytest.skip("needs the ULFM of Open MPI (make test-openmpi)")
    job, [attempts] = supervised((1, "supervisor", victim), options=["--with-ft", "ulfm"])
    job.check()
    assert [len(attempt) for attempt in attempts] == [3, 2]
    before, after = ({a[n]["supervisor"] for n in a} for a in attempts)
    assert before - after == {attempts[0][victim]["supervisor"]}
    assert f"lost with its supervisor: rank {victim}\n" in job.output
    assert "restart 1 of 1 as 2 ranks" in job.output


def test_without_restarts_a_lost_supervisor_ends_all(supervised, open_mpi):
    if not open_mpi:
        pytest.skip("needs the ULFM of Open MPI (make test-openmpi)")
    job, [attempts] = supervised((0, "supervisor", 1), options=["--with-ft", "ulfm"])
    assert job.code == 137
    assert len(attempts) == 1


def test_without_ulfm_a_lost_supervisor_ends_the_job(supervised):
    job, [attempts] = supervised((2, "supervisor", 1))
    assert job.code != 0
    assert len(attempts) == 1
    assert "the loss of a host ends the job" in job.output


@pytest.mark.parametrize(
    ("endings", "code"),
    [
        ([Ending(0), Ending(0)], 0),
        ([Ending(1), Ending(137)], 137),  # 1 has lost 137
        ([Ending(137, given_up=True), Ending(3)], 3),
        ([Ending(1), Ending(2)], 2),
        ([Ending(2), Ending(137)], 137),
        ([Ending(124), Ending(1)], 124),
        ([Ending(0), Ending(1)], 1),
    ],
)
def test_the_verdict_is_that_of_the_cause(endings, code):
    assert verdict(endings) == code
