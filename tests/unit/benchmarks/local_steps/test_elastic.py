# SPDX-License-Identifier: Apache-2.0
"""What ``benchmarks elastic`` makes of the lines that replicas write."""

import pytest

from benchmarks.local_steps.elastic_measure import Kill, Line, figures_of, read
from benchmarks.local_steps.elastic_request import ElasticRequest

REQUEST = ElasticRequest(replicas=2, every=4, steps=16, systems=("fixed",))


def lines(pid, steps, *, late=0.0, missed=()):
    return [Line(n, n + late, 2, float(n in missed), pid) for n in steps]


def test_steps_of_a_killed_process_count_up_to_its_last_exchange():
    killed = lines(11, range(1, 11))
    own = [lines(10, range(1, 17)), [*killed, *lines(12, range(13, 17))]]
    found = figures_of(REQUEST, own, [Kill(1, 10.5, 11)], calm_s=1.0)
    assert found["progress"] == 1.0
    assert found["goodput"] == pytest.approx((15 + 7 + 4) / 30)
    assert (found["kills"], found["back_s"]) == (1, 2.5)


def test_a_step_that_is_repeated_counts_once():
    """Ranks of one job begin again together, from the checkpoint of step 8."""
    again = range(9, 17)
    pairs = ((10, 12), (11, 13))
    own = [lines(a, range(1, 11)) + lines(b, again, late=20.0) for a, b in pairs]
    found = figures_of(REQUEST, own, [Kill(0, 10.5, 10)], calm_s=1.0)
    assert found["progress"] == pytest.approx(15 / 35)
    assert found["goodput"] == pytest.approx(15 / 35)
    assert found["back_s"] == 29.0 - 10.5


def test_missed_exchanges_are_those_of_the_replica_that_has_missed_most():
    own = [lines(10, range(1, 17), missed=(8,)), lines(11, range(1, 17), missed=(4, 5, 8))]
    assert figures_of(REQUEST, own, [], calm_s=1.0)["missed"] == 2


def test_half_a_line_is_none(tmp_path):
    file = tmp_path / "0.jsonl"
    file.write_text("[1, 1.5, 2, 0, 10]\n[2, 1.")
    assert read(file) == [Line(1, 1.5, 2, 0, 10)]
