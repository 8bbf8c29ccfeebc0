# SPDX-License-Identifier: Apache-2.0
"""Whatever a plan, a cluster or a hostfile holds: `PlanError` or findings, and no endless work."""

import json
import re

from fuzz_strategies import FUZZ, changed, refusal
from hypothesis import given
from hypothesis import strategies as st

from wavemare.cli.job import parse_hostfile
from wavemare.errors import LaunchError, PlanError
from wavemare.parallel.layout.layout import Layout, Prediction
from wavemare.parallel.planner.cluster import parse_cluster, read_cluster
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.plan import Plan
from wavemare.pipeline.plan.schedules import build_plan

NUMBERS = st.sampled_from(["0", "1", "2", "3", "-1", "9" * 18, "9" * 19, "1.5", "x", "²", ""])
PIECES = [*"0F0 1B0 0S1 @ @0 @9 /1 /9 : = plan XO".split(), "\n", "# x\n", " "]
NAMES = ["1f1b", "pipemare", "inference", "accumulation", "tick-tock", "zbv", "interleaved"]
PLANS = [str(build_plan(name, 3, 3, 0 if name == "inference" else 1)) for name in NAMES]


@st.composite
def schedules(draw):
    """The text of a plan with numbers, words and lines changed."""
    text = draw(st.sampled_from(PLANS))
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["number", "action", "piece", "cut", "line", "swap"]))
        found = list(re.finditer(r"\d+" if kind == "number" else r"\S+", text)) or [None]
        match = draw(st.sampled_from(found))
        if match is None:
            break
        before, after = text[: match.start()], text[match.end() :]
        if kind == "number":
            text = before + draw(NUMBERS) + after
        elif kind == "action":
            text = before + after
        elif kind == "piece":
            text = before + draw(st.sampled_from(PIECES) | st.text(max_size=4)) + after
        elif kind == "cut":
            text = before
        elif kind == "line":
            lines = text.splitlines()
            text = "\n".join(draw(st.permutations(lines))[: draw(st.integers(0, len(lines)))])
        else:
            text = before + " ".join(reversed(after.split(" ")))
    return text


def read_schedule(text):
    plan = Plan.parse(text)
    assert Plan.parse(str(plan)) == plan
    check(plan)


LAYOUT = json.loads(
    Layout(
        global_batch=16,
        shares=(3, 5),
        stages=2,
        data_parallel=2,
        cuts=(0, 3, 6),
        num_layers=6,
        micro_steps=2,
        order=(3, 1, 0, 2),
        predicted=Prediction(
            step_s=1.0, tokens_per_s=9.0, stage_s=(1.0, 2.0), rank_s=(3.0, 4.0), memory_bytes=(5.0,)
        ),
    ).to_json()
)


def read_layout(text):
    plan = Layout.from_json(text)
    assert Layout.from_json(plan.to_json()) == plan
    assert str(plan)
    plan.configure({})


DEVICE = {"type": "X", "tflops": 9.0, "memory_gib": 8.0, "memory_gb_s": 99.0, "node": "a"}
CLUSTER = {
    "version": 1,
    "devices": [{**DEVICE, "count": 2}, {"type": "V100", "node": "b", "efficiency": 0.5}],
    "links": {"within": {"alpha_s": 1e-5}, "between": {"bytes_s": 1e9}},
}


def read_devices(values):
    assert parse_cluster(values).devices


WORDS = ["node0", "node1", "slots", "=", "slots=2", "slots=0", "slots=x", "#", "\n", " "]
HOSTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=12)
CARDS = st.sampled_from(["8", "x", "V100", "A100-80", ",", "0", "9" * 12, "-", " "])


@FUZZ
@given(schedules())
def test_texts_of_schedules(text):
    refusal(read_schedule, PlanError, text)


@FUZZ
@given(changed(LAYOUT))
def test_layouts(values):
    refusal(read_layout, PlanError, json.dumps(values))


@FUZZ
@given(st.text(max_size=40))
def test_layouts_of_any_text(text):
    refusal(read_layout, PlanError, text)


@FUZZ
@given(changed(CLUSTER))
def test_clusters(values):
    refusal(read_devices, PlanError, values)


@FUZZ
@given(st.lists(CARDS | st.text(max_size=3), max_size=6))
def test_clusters_in_short(words):
    error = refusal(lambda text: read_cluster(text).devices, PlanError, "".join(words))
    assert error is None or error.key == "--cluster"


@FUZZ
@given(HOSTS.map("".join) | HOSTS.map(" ".join))
def test_hostfiles(text):
    error = refusal(parse_hostfile, LaunchError, text)
    assert error is None or error.remedy
