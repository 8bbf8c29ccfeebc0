# SPDX-License-Identifier: Apache-2.0
"""Timelines: how long, and how busy."""

import pytest

from wavemare.pipeline.action import Action
from wavemare.pipeline.timeline import Event, Timeline


def timeline(*ranks):
    events = [[Event(Action.parse(a), start, end) for a, start, end in rank] for rank in ranks]
    return Timeline("a title", tuple(map(tuple, events)))


def test_the_makespan_is_from_the_first_start_to_the_last_end():
    shown = timeline(
        [("0L0", 2.0, 2.5), ("0F0", 2.5, 4.0), ("0RG0", 4.0, 11.0), ("0SA0", 4.5, 5.0)],
        [("1F0", 3.0, 10.0)],
        [],
    )
    assert shown.makespan_s == 9.0


@pytest.mark.parametrize("ranks", [[], [[], []]])
def test_nothing_takes_no_time(ranks):
    assert timeline(*ranks).makespan_s == 0.0


def test_passes_and_steps_are_busy_and_waiting_is_not():
    shown = timeline(
        [
            ("0L0", 0.0, 1.0),
            ("0F0", 1.0, 3.0),
            ("0SA0", 3.0, 7.0),
            ("0RG0", 7.0, 15.0),
            ("0C0", 15.0, 31.0),
            ("0B0", 31.0, 63.0),
            ("0R0", 63.0, 127.0),
            ("0S0", 127.0, 255.0),
        ],
        [],
    )
    assert shown.busy_s(0) == 2.0 + 32.0 + 128.0
    assert shown.busy_s(1) == 0.0


def test_collectives_are_hidden_where_something_else_runs():
    shown = timeline(
        [
            ("0F0", 0.0, 2.0),
            ("0XO0", 2.0, 6.0),
            ("0F1/1", 2.0, 3.0),
            ("1F1/1", 3.0, 3.0),
            ("1F0", 5.0, 8.0),
            ("1XG0", 9.0, 10.0),
        ],
        [("0F0", 0.0, 9.0)],
    )
    assert shown.collectives_s == 4.0 + 1.0
    assert shown.exposed_s == 2.0 + 1.0
    assert shown.makespan_s == 10.0
    assert shown.busy_s(0) == 2.0 + 1.0 + 3.0
