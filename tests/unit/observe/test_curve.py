"""The moving average under the loss curve."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.observe.curve import _smoothed


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200))
def test_moving_average_equals_its_definition(losses: list[float]) -> None:
    width = max(1, len(losses) // 30)
    windows = [losses[max(0, i + 1 - width) : i + 1] for i in range(len(losses))]
    expected = [sum(window) / len(window) for window in windows]
    assert _smoothed(losses) == pytest.approx(expected, abs=1e-9)
