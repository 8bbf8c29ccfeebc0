# SPDX-License-Identifier: Apache-2.0
"""A rank that is lost is named by all others, within the watchdog's time, and the job ends."""

import pytest

TIMEOUT_S = 4.0
NOTICED_S = TIMEOUT_S + 5.0
REST = (("mpi", 0), ("torch", 2), ("torch", 0))
slow = pytest.mark.slow


@pytest.mark.world_size(3)
@pytest.mark.parametrize(
    ("kind", "victim"),
    [("mpi", 2), *[pytest.param(*case, marks=slow) for case in REST]],
)
def test_a_stopped_rank_is_named(start, kind, victim):
    job = start("failures.py", kind, "stop", victim, ranks=3, timeout=60)
    _check_named(job, victim)


@pytest.mark.world_size(3)
@pytest.mark.parametrize("victim", [pytest.param(2, marks=slow), 0])
def test_a_killed_rank_is_named_over_torch(start, victim):
    _check_named(start("failures.py", "torch", "kill", victim, ranks=3, timeout=60), victim)


@pytest.mark.slow
@pytest.mark.world_size(3)
@pytest.mark.parametrize("victim", [2, 0])
def test_a_rank_that_raised_before_the_call_is_named_over_torch(start, victim):
    job = start("failures.py", "torch", "raise", victim, ranks=3, timeout=60)
    _check_named(job, victim)
    assert "this rank's own fault" in job.output


@pytest.mark.slow
@pytest.mark.world_size(3)
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_rank_that_ends_ends_the_job_over_mpi(start, how):
    job = start("failures.py", "mpi", how, 1, ranks=3, timeout=60)
    assert job.code not in {0, -14}, job.output
    assert job.seconds < 45
    # It is mpirun that ends the others, at once: none of them has its say.
    assert ("this rank's own fault" if how == "raise" else "signal 9") in job.output


def _check_named(job, victim):
    assert job.code not in {0, -14}, job.output
    found = job.results()
    assert sorted(found) == [rank for rank in range(3) if rank != victim], job.output
    for result in found.values():
        assert result["value"] == str(victim), (found, job.output)
        assert result["seconds"] < NOTICED_S, (found, job.output)
