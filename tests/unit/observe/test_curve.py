# SPDX-License-Identifier: Apache-2.0
"""The moving average under the loss curve."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.observe.curve import moving_average


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
