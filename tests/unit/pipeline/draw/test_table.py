# SPDX-License-Identifier: Apache-2.0
"""CSV of plans and timelines: what it says, and that it reads back as it was."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.errors import PlanError
from wavemare.pipeline.action import Action, Kind
from wavemare.pipeline.draw import plan_from_csv, to_csv
from wavemare.pipeline.plan import Plan
from wavemare.pipeline.schedules import pipemare
from wavemare.pipeline.timeline import Event, Timeline

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


def test_a_plan_in_full() -> None:
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
def test_plans_read_back_as_they_were(plan: Plan) -> None:
    assert plan_from_csv(to_csv(plan)) == plan


def test_windows_line_ends_read_back_too() -> None:
    plan = pipemare(3, 2, 2, warmup_steps=1, norms=True, correct=True)
    assert plan_from_csv(to_csv(plan).replace("\n", "\r\n")) == plan


def test_a_timeline_has_exact_times() -> None:
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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "does not say which plan"),
        (f"{COLUMNS}\n0,0,load,0,0,0,0", "does not say which plan"),
        (HEADER.replace("=2 ranks=2", "=2"), "does not say which plan"),
        (HEADER.replace("ranks=2", "ranks=²"), "does not say which plan"),
        (HEADER.replace("ranks=2", "ranks=99999999999"), "does not say which plan"),
        (f"{HEADER}\n{COLUMNS}\n0,0,{'l' * 200_000},0,0,0,0", "larger than field limit"),
        (HEADER.replace("stages=2", "stages=x"), "not a whole number"),
        (f"{HEADER}\n0,0,load,0,0,0,0", "second line does not name the columns"),
        (f"{HEADER}\n{COLUMNS}\n0,0,lode,0,0,0,0", "line 3 is no action"),
        (f"{HEADER}\n{COLUMNS}\n0,0,load,0,x,0,0", "line 3 is no action"),
        (f"{HEADER}\n{COLUMNS}\n0,0,load,0,0,0", "line 3 is no action"),
        (f"{HEADER}\n{COLUMNS}\n0,0,load,0,0,0,0\n0,2,load,0,0,0,0", "line 4 is not the next"),
        (f"{HEADER}\n{COLUMNS}\n2,0,load,0,0,0,0", "line 3 is not the next"),
        (f"{HEADER}\n{COLUMNS}\n-1,0,load,0,0,0,0", "line 3 is not the next"),
    ],
)
def test_malformed_tables_are_located(text: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        plan_from_csv(text)
