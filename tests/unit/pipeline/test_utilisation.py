# SPDX-License-Identifier: Apache-2.0
"""How busy ranks are, by timelines that are worked out by hand."""

import pytest

from wavemare.pipeline.action import Action
from wavemare.pipeline.timeline import Event, Timeline
from wavemare.pipeline.utilisation import bubble, steady_utilisation, steady_window, utilisation


def timeline(*ranks):
    events = [[Event(Action.parse(a), start, end) for a, start, end in rank] for rank in ranks]
    return Timeline("by hand", tuple(map(tuple, events)))


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


def test_the_steady_state_leaves_fill_and_drain_out():
    shown = timeline(FIRST, SECOND)
    # The last rank begins its first backward pass at 7, the first ends its last forward at 19.
    assert steady_window(shown) == (7.0, 19.0)
    assert steady_utilisation(shown) == (11 / 12, 8 / 12)


def test_without_backward_passes_it_begins_with_the_last_first_forward_pass():
    shown = timeline(
        [("0F0", 0.0, 1.0), ("0F1", 1.0, 2.0), ("0F2", 2.0, 3.0)],
        [("1F0", 1.0, 2.0), ("1F1", 2.0, 3.0), ("1F2", 3.0, 4.0)],
    )
    assert steady_window(shown) == (1.0, 3.0)
    assert steady_utilisation(shown) == (1.0, 1.0)


@pytest.mark.parametrize(
    "ranks",
    [
        [],
        [[]],
        [[("0F0", 0.0, 1.0)], []],
        [[("0B0", 0.0, 1.0)]],
        [[("0F0", 0.0, 1.0), ("0B0", 1.0, 2.0)]],
    ],
)
def test_a_short_timeline_has_no_steady_state(ranks):
    assert steady_window(timeline(*ranks)) is None
    assert steady_utilisation(timeline(*ranks)) is None


def test_no_time_is_no_use():
    assert utilisation(timeline([], [])) == (0.0, 0.0)
    assert bubble(timeline([], [])) == 1.0
    assert bubble(timeline()) == 0.0
