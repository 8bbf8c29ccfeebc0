# SPDX-License-Identifier: Apache-2.0
"""Timelines of all ranks on one clock, and their files."""

from benchmarks.traces import build_timeline, save_traces
from wavemare.pipeline.clock.simulate import Event, Timeline
from wavemare.pipeline.plan.plan import Action, Kind

RANKS = [
    [
        Event(Action(Kind.FORWARD, 0, 13), 100.5, 101.0),
        Event(Action(Kind.FORWARD, 0, 12), 100.0, 100.5),
    ],
    [Event(Action(Kind.BACKWARD, 1, 12), 100.25, 102.0)],
]


def test_the_clock_begins_with_the_first_event_of_all_ranks():
    timeline = build_timeline("title", RANKS)
    assert timeline == Timeline(
        "title",
        (
            (
                Event(Action(Kind.FORWARD, 0, 0), 0.0, 0.5),
                Event(Action(Kind.FORWARD, 0, 1), 0.5, 1.0),
            ),
            (Event(Action(Kind.BACKWARD, 1, 0), 0.25, 2.0),),
        ),
    )
    assert build_timeline("nothing", [[], []]) is None


def test_there_are_pictures_of_what_was_noted(tmp_path):
    events = {("m2", "zbv"): [[], []], ("m2", "1F1B, M=2"): RANKS, ("m4", "zbv"): [[], []]}
    save_traces(tmp_path, events)
    found = {file.name for file in tmp_path.iterdir()}
    assert found == {"timeline-m2.png", "timeline-m2.svg", "trace-m2.json"}
    assert "1F1B, M=2" in (tmp_path / "trace-m2.json").read_text()
