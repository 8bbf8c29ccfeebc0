# SPDX-License-Identifier: Apache-2.0
"""Totals against sums made by hand."""

from wavemare.comm.statistics import Statistics, Totals


def test_totals_of_some_calls():
    totals = Totals()
    totals.add(
        Statistics(
            "pushpull", 100, 0.5, 1.0, bytes_up=7, bytes_down=11, predicted_s=2.0, actual_s=3
        )
    )
    totals.add(Statistics("ordered", 900, None, None, bytes_up=13, bytes_down=17, actual_s=5))
    totals.add(
        Statistics(
            "pushpull", 300, 0.1, 0.2, bytes_up=19, bytes_down=23, predicted_s=4.0, actual_s=6
        )
    )
    assert totals.take() == {
        "sparse_payload_bytes": 1300,
        "sparse_bytes_up": 39,
        "sparse_bytes_down": 51,
        "sparse_seconds": 14,
        "sparse_predicted_seconds": 6.0,
        "sparse_density": (0.5 * 100 + 0.1 * 300) / 400,
        "sparse_union": (1.0 * 100 + 0.2 * 300) / 400,
        "sparse_calls_pushpull": 2,
        "sparse_calls_ordered": 1,
    }
    assert totals.take() == {}
