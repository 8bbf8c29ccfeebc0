# SPDX-License-Identifier: Apache-2.0
"""How long timelines are and how busy their ranks, worked out by hand."""

import pytest

from wavemare.pipeline.clock.simulate import (
    Event,
    Timeline,
    bubble,
    utilisation,
)
from wavemare.pipeline.plan.plan import Action


def timeline(*ranks):
    events = [[Event(Action.parse(a), start, end) for a, start, end in rank] for rank in ranks]
    return Timeline("by hand", tuple(map(tuple, events)))


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


def test_collectives_are_not_busy_time():
    shown = timeline(
        [
            ("0F0", 0.0, 2.0),
            ("0XO0", 2.0, 6.0),
            ("1F0", 5.0, 8.0),
            ("1XG0", 9.0, 10.0),
        ],
        [("0F0", 0.0, 9.0)],
    )
    assert shown.collectives_s == 4.0 + 1.0
    assert shown.makespan_s == 10.0
    assert shown.busy_s(0) == 2.0 + 3.0


FIRST = [
    ("0F0", 0.0, 2.0),
    ("0F1", 2.0, 4.0),
    ("0RG0", 4.0, 7.0),
    ("0B0", 7.0, 10.0),
    ("0S0", 10.0, 11.0),
    ("0F2", 11.0, 13.0),
    ("0RG1", 13.0, 14.0),
    ("0B1", 14.0, 17.0),
    ("0F3", 17.0, 19.0),
    ("0B2", 20.0, 23.0),
]
SECOND = [
    ("1RA0", 0.0, 2.0),
    ("1F0", 2.0, 4.0),
    ("1B0", 4.0, 7.0),
    ("1F1", 8.0, 10.0),
    ("1B1", 10.0, 14.0),
    ("1F2", 17.0, 21.0),
]


def test_utilisation_is_of_the_whole_time():
    shown = timeline(FIRST, SECOND)
    assert utilisation(shown) == (18 / 23, 15 / 23)
    assert bubble(shown) == pytest.approx(1 - 33 / 46)


def test_no_time_is_no_use():
    assert utilisation(timeline([], [])) == (0.0, 0.0)
    assert bubble(timeline([], [])) == 1.0
    assert bubble(timeline()) == 0.0
