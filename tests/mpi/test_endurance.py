# SPDX-License-Identifier: Apache-2.0
"""Long runs and large messages."""

import psutil
import pytest

pytestmark = pytest.mark.slow
KINDS = ["mpi", "torch"]


@pytest.mark.world_size(3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_soak_leaks_nothing(start, kind):
    job = start("soak.py", kind, 1000, ranks=3, timeout=280).check()
    _check(job, 3, "soak", 1000)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_more_than_two_gibibytes(start, kind):
    if psutil.virtual_memory().available < 12 << 30:
        pytest.skip("needs 12 GiB of free memory")
    _check(start("large_messages.py", kind, ranks=2, timeout=280).check(), 2, "large", 1)


def _check(job, ranks, name, least):
    found = job.results()
    assert sorted(found) == list(range(ranks)), job.output
    for result in found.values():
        assert result[name]["failures"] == [], (result, job.output)
        assert result[name]["count"] >= least
