# SPDX-License-Identifier: Apache-2.0
"""Numbers for people."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.observe.screen import format_bytes, format_count, format_duration

COUNTS = [(0, "0"), (7, "7"), (0.5, "0.50"), (999, "999"), (999.6, "1.00k"), (12_345, "12.3k")]
COUNTS += [(999_999, "1.00M"), (1_240_000, "1.24M"), (-2_500, "-2.50k")]
COUNTS += [(math.inf, "?"), (math.nan, "?")]


BYTES = [(0, "0 B"), (512, "512 B"), (1000, "0.98 KiB"), (2**30, "1.00 GiB")]
BYTES += [(3 * 2**29, "1.50 GiB")]
DURATIONS = [(0.44, "0.4s"), (9.96, "10s"), (59.4, "59s"), (59.7, "1m 00s"), (65, "1m 05s")]
DURATIONS += [(3599.6, "1h 00m"), (7384, "2h 03m"), (90_000, "1d 01h"), (math.inf, "?")]


@pytest.mark.parametrize(
    ("shown", "cases"),
    [(format_count, COUNTS), (format_bytes, BYTES), (format_duration, DURATIONS)],
)
def test_numbers_have_a_unit_that_keeps_them_short(shown, cases):
    assert [shown(number) for number, _ in cases] == [text for _, text in cases]


@given(st.floats(min_value=1, max_value=1e16))
def test_count_is_right_to_three_digits(number):
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGTP]?)", format_count(number))
    factor = 1000 ** ("", "k", "M", "G", "T", "P").index(match[2])
    assert float(match[1]) * factor == pytest.approx(number, rel=5.1e-3)
