# SPDX-License-Identifier: Apache-2.0
"""CSV of plans and timelines: what it says."""

import csv
import io
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from wavemare.pipeline.clock.timeline import Event, Timeline
from wavemare.pipeline.draw import to_csv
from wavemare.pipeline.plan.action import Action, Kind
from wavemare.pipeline.plan.plan import Plan
from wavemare.pipeline.plan.schedules import pipemare

NUMBERS = st.integers(0, 10**6)
ACTIONS = st.builds(
    Action, st.sampled_from(Kind), NUMBERS, NUMBERS, st.integers(-1, 99), st.integers(0, 1)
)
PLANS = st.builds(
    Plan,
    st.sampled_from(["1f1b", "x-y"]),
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.lists(st.lists(ACTIONS, max_size=6).map(tuple), max_size=4).map(tuple),
    st.integers(0, 3),
)
HEADER = "# plan schedule=pipemare stages=2 micro_batches=1 steps=1 send_slots=2 ranks=2"
COLUMNS = "rank,index,kind,stage,micro_batch,version,wave"


def test_a_plan_in_full():
    assert to_csv(pipemare(2, 1, 1)).splitlines() == [
        HEADER,
        COLUMNS,
        "0,0,load,0,0,0,0",
        "0,1,forward,0,0,0,0",
        "0,2,send_activation,0,0,0,0",
        "0,3,recv_grad,0,0,0,0",
        "0,4,backward,0,0,0,0",
        "0,5,reduce,0,0,0,0",
        "0,6,step,0,0,0,0",
        "1,0,recv_activation,1,0,0,0",
        "1,1,load,1,0,0,0",
        "1,2,forward,1,0,0,0",
        "1,3,backward,1,0,0,0",
        "1,4,send_grad,1,0,0,0",
        "1,5,reduce,1,0,0,0",
        "1,6,step,1,0,0,0",
    ]


@given(PLANS)
def test_the_lines_are_the_actions(plan):
    comment, _, table = to_csv(plan).partition("\n")
    header, _, count = comment.removeprefix("# ").partition(" ranks=")
    found: list[list[Action]] = [[] for _ in range(int(count))]
    for row in csv.DictReader(io.StringIO(table)):
        actions = found[int(row["rank"])]
        assert int(row["index"]) == len(actions)
        numbers = (int(row[key]) for key in ("stage", "micro_batch", "version", "wave"))
        actions.append(Action(Kind[row["kind"].upper()], *numbers))
    assert replace(Plan.parse(header), ranks=tuple(map(tuple, found))) == plan


def test_a_timeline_has_exact_times():
    events = (
        Event(Action(Kind.FORWARD, 0, 5, 1), 0.1 + 0.2, 1 / 3),
        Event(Action(Kind.CORRECT, 0, 5, -1, 1), 1e-9, 2e5),
    )
    rows = list(csv.DictReader(io.StringIO(to_csv(Timeline("t", (events, events[:1]))))))
    assert [(row["rank"], row["index"], row["kind"]) for row in rows] == [
        ("0", "0", "forward"),
        ("0", "1", "correct"),
        ("1", "0", "forward"),
    ]
    assert (float(rows[0]["start_s"]), float(rows[0]["end_s"])) == (0.1 + 0.2, 1 / 3)
    assert (rows[1]["version"], rows[1]["wave"], float(rows[1]["end_s"])) == ("-1", "1", 2e5)
