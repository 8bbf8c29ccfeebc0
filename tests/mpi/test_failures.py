# SPDX-License-Identifier: Apache-2.0
"""A rank that is lost is named by all others, and the job ends."""

import pytest

pytestmark = pytest.mark.spins


def nightly(*case):
    return pytest.param(*case, marks=pytest.mark.nightly)


@pytest.mark.world_size(3)
@pytest.mark.parametrize(
    ("kind", "how", "victim"),
    [
        ("mpi", "stop", 2),
        ("torch", "kill", 0),
        ("mpi", "late", 2),
        nightly("torch", "late", 2),
        nightly("mpi", "stop", 0),
        *[nightly("torch", how, victim) for how in ("stop", "raise") for victim in (0, 2)],
        nightly("torch", "kill", 2),
    ],
)
def test_a_lost_rank_is_named_by_all_others(start, kind, how, victim):
    job = start("failures.py", kind, how, victim, ranks=3)
    assert job.code not in {0, -14}, job.output
    found = job.results()
    assert sorted(found) == [rank for rank in range(3) if rank != victim], job.output
    assert all(result["value"] == str(victim) for result in found.values()), (found, job.output)
    if (kind, how) == ("mpi", "stop"):
        assert all(result["kept"] > 2 for result in found.values()), found
    assert how != "raise" or "this rank's own fault" in job.output


@pytest.mark.nightly
@pytest.mark.world_size(3)
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_rank_that_ends_ends_the_job_over_mpi(start, how):
    job = start("failures.py", "mpi", how, 1, ranks=3)
    assert job.code not in {0, -14}, job.output
    # It is mpirun that ends the others, at once: they print nothing.
    assert ("this rank's own fault" if how == "raise" else "signal 9") in job.output
