# SPDX-License-Identifier: Apache-2.0
"""What a run says of itself, from the engine's figures, and the average under its loss curve."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.observe.curve import moving_average
from wavemare.observe.live import live_facts


def test_subjects_that_a_run_does_not_have_are_left_out():
    assert live_facts({}) == {}
    metrics = {"bubble": 0.312, "bubble_predicted": 0.05, "staleness_10": 0.0, "staleness_9": 0.75}
    assert live_facts(metrics) == {"pipeline": "idle 31% (5% by unevenness), staleness 0.75 0"}
    assert live_facts({}, memory_bytes=3 * 2**20, warnings=2, latest="x " * 99) == {
        "memory": "3.00 MiB on rank 0",
        "warnings": f"2, the latest: {'x ' * 37}[...]",
    }


def test_collective():
    metrics = {
        "sparse_density": 0.042,
        "sparse_bytes_up": 2**20,
        "sparse_bytes_down": 2**21,
        "sparse_calls_pushpull": 3,
        "sparse_calls_dense": 1,
    }
    text = "density 4.20%, up 1.00 MiB, down 2.00 MiB, dense x1, pushpull x3"
    assert live_facts(metrics) == {"collective": text}
    assert len(f"  {'collective':<12}{text}") <= 80


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200))
def test_moving_average_equals_its_definition(losses):
    reach = max(1, len(losses) // 60)
    expected = []
    for i in range(len(losses)):
        width = min(reach, i, len(losses) - 1 - i)
        window = losses[i - width : i + width + 1]
        expected.append(sum(window) / len(window))
    assert moving_average(losses) == pytest.approx(expected, abs=1e-9)


def test_straight_line_stays_where_it_is():
    line = [10.0 - 0.01 * step for step in range(600)]
    assert moving_average(line) == pytest.approx(line)
