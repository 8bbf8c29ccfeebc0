# SPDX-License-Identifier: Apache-2.0
"""Timelines of all ranks on one clock, and their files."""

import json

from wavemare.bench.trace import build_timeline, draw_timelines, load_timeline, save_timelines
from wavemare.pipeline.action import Action, Kind
from wavemare.pipeline.timeline import Event, Timeline

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


def test_rank_0_alone_writes_and_only_what_was_noted(tmp_path):
    save_timelines(tmp_path, "torch-zbv", 2, [[], []], rank=0)
    save_timelines(tmp_path, "deepspeed-1f1b", 2, RANKS, rank=1)
    assert list(tmp_path.iterdir()) == []
    save_timelines(tmp_path, "deepspeed-1f1b", 2, RANKS, rank=0)
    timeline = load_timeline(tmp_path / "deepspeed-1f1b-m2.json")
    assert timeline == build_timeline(timeline.title, RANKS)
    assert "deepspeed-1f1b" in timeline.title


def test_timelines_that_were_measured_are_drawn_on_one_axis(tmp_path):
    for system in ("deepspeed-1f1b", "wavemare-pipemare"):
        events = [[Event(Action.parse("0F0"), 0.0, 1.0)], [Event(Action.parse("1F0"), 1.0, 2.0)]]
        save_timelines(tmp_path, system, 4, events, rank=0)
    draw_timelines(tmp_path, ("deepspeed-1f1b", "torch-zbv", "wavemare-pipemare"), 4)
    assert (tmp_path / "timeline-m4.png").read_bytes().startswith(b"\x89PNG")
    picture = (tmp_path / "timeline-m4.svg").read_text()
    assert "deepspeed-1f1b, M=4" in picture
    assert "wavemare-pipemare, M=4" in picture
    assert json.loads((tmp_path / "trace-m4.json").read_text())
    draw_timelines(tmp_path, ("torch-zbv",), 8)
    assert not (tmp_path / "timeline-m8.png").exists()
