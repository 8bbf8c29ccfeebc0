# SPDX-License-Identifier: Apache-2.0
"""Plans in files: our text form, torch's CSV, and passes alone in either."""

import csv
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action

from support.refusals import refuses
from wavemare.errors import ConfigError, PlanError
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.files import parse_csv, read_plan, to_csv
from wavemare.pipeline.plan.lowering import lower
from wavemare.pipeline.plan.orders import inference, interleaved, one_f_one_b, zb_h1, zbv
from wavemare.pipeline.plan.plan import Plan

plans = st.one_of(
    st.builds(zbv, st.integers(1, 4), st.integers(1, 6)),
    st.builds(zb_h1, st.integers(1, 4), st.integers(1, 6)),
    st.builds(interleaved, st.just(2), st.sampled_from([2, 4, 6]), chunks=st.integers(1, 3)),
)


@given(plan=plans)
def test_torch_reads_what_we_write(plan):
    text = to_csv(plan)
    for actions, row in zip(plan.ranks, csv.reader(text.splitlines()), strict=True):
        passes = [a for a in actions if str(a.kind) in "FBIW"]
        assert [tuple(_Action.from_str(cell))[::2] for cell in row] == [
            (a.stage, a.micro_batch) for a in passes
        ]
        assert [str(_Action.from_str(cell)) for cell in row] == row
    assert lower(parse_csv(text, plan.schedule)) == plan


def test_both_forms_may_hold_passes_alone(tmp_path):
    plan = zbv(2, 3)
    torchs, ours, whole = (tmp_path / name for name in ("zbv.csv", "passes.txt", "zbv.txt"))
    torchs.write_text(to_csv(plan).replace(",3F0", ",,3F0"))
    ours.write_text(str(replace(parse_csv(to_csv(plan), "zbv"), send_slots=7)))
    whole.write_text(str(plan))
    assert [read_plan(file, "--schedule") for file in (torchs, ours, whole)] == [plan] * 3
    # A schedule of torch with one stage per rank, and backward passes whole.
    torchs.write_text(to_csv(one_f_one_b(3, 4)))
    read = read_plan(torchs, "--schedule")
    assert read.homes == ()
    assert check(read).messages == check(one_f_one_b(3, 4)).messages


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0F0,0B0\n1F0,1XY0\n", "1XY0"),
        ("0F0,(0F1;0B0)OVERLAP_F_B\n", "(0F1;0B0)OVERLAP_F_B"),
    ],
)
def test_what_is_no_schedule_of_torch_is_refused(text, value):
    with refuses(PlanError, "action", value):
        parse_csv(text, "x")


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("0F0,0F1,0B1,0B0\n1F0,1B0,1F1,1B1\n", ("action", "0B1@0")),
        ("0B0,0F0\n1F0,1B0\n", ("action", "0B0@0")),
        ("0F0,0B0\n1F0,1F0,1B0\n", ("action", "1F0")),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1B1\n", ("action", "1B1@0")),
        ("0F0,0I0\n1F0,1I0,1W0\n", ("action", "0W0")),
        ("0F0,0F1\n1F0,1F1\n", ("action", "0B0")),
        ("0F0,0F1,0I0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n", ("action", "0W1@0")),
        ("0F0,0B0,1F0\n1B0\n", ("action", "1F0")),
        ("0F0,2F0,2B0,0B0\n3F0,3B0,1F0,1B0\n", ("plan", "x")),
        ("0F0,0B0\n2F0,2B0\n", ("action", "2F0")),
        (",\n", ("stages", 0)),
        ("\n \n", ("--schedule",)),
    ],
)
def test_an_impossible_order_is_refused(text, refusal, tmp_path):
    file = tmp_path / "x.csv"
    file.write_text(text)
    with refuses((ConfigError, PlanError), *refusal):
        read_plan(file, "--schedule")


def test_the_file_gives_its_name(tmp_path):
    file = tmp_path / "my first zbv.CSV"
    file.write_text(to_csv(zbv(2, 3)) + "\n")
    plan = read_plan(file, "--schedule")
    assert plan.schedule == "my_first_zbv"
    assert Plan.parse(str(plan)) == plan
    with refuses(ConfigError, "--schedule", str(tmp_path / "y.csv")):
        read_plan(tmp_path / "y.csv", "--schedule")


def test_what_torch_has_no_form_for_is_not_written():
    for plan, steps in ((zbv(2, 3, 2), 2), (inference(2, 3), 0)):
        with refuses(PlanError, "steps", steps):
            to_csv(plan)


def test_the_header_names_the_homes():
    text = str(zbv(2, 1))
    assert text.splitlines()[0].endswith(" send_slots=2 homes=0,1,1,0")
    assert Plan.parse(text).homes == (0, 1, 1, 0)
    with refuses(PlanError, "homes", "x"):
        Plan.parse(text.replace("0,1,1,0", "0,x,1,0"))
    # It need not where each rank has the stage of its number.
    text = str(zb_h1(2, 1))
    assert Plan.parse(text.replace("slots=2", "slots=2 homes=0,1")) == Plan.parse(text)
    passes = "plan schedule=x stages=2 micro_batches=1 steps=1 send_slots=0\n0: 0F0 1F0 1B0 0B0"
    with refuses(PlanError, "homes", ""):
        lower(Plan.parse(passes))
    assert check(lower(Plan.parse(passes.replace("=0\n", "=0 homes=0,0\n")))).messages == {}
