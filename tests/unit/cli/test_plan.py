# SPDX-License-Identifier: Apache-2.0
"""``wavemare plan show`` and ``layout search``: what they print, write and refuse."""

import io
import json
import re
from xml.etree import ElementTree

import pytest
from PIL import Image
from pydantic import ValidationError
from typer.testing import CliRunner

from support.refusals import refuses
from wavemare.cli import app
from wavemare.errors import ConfigError, PlanError
from wavemare.parallel.layout.layout import Layout
from wavemare.pipeline.clock.simulate import Costs, simulate
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.draw import grid
from wavemare.pipeline.plan.automatic import automatic
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.orders import inference, interleaved, one_f_one_b, pipemare, zb_h1, zbv
from wavemare.pipeline.plan.plan import Plan
from wavemare.pipeline.wave.schedule import accumulation, in_phase, tick_tock

FILES = ["plan.png", "plan.svg", "plan.txt", "trace.json"]


def show(*options):
    result = CliRunner().invoke(
        app, ["plan", "show", *options], catch_exceptions=False, env={"COLUMNS": "80"}
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_defaults_are_those_of_the_help():
    plan = pipemare(4, 8, 4)
    text = show()
    assert text.startswith(str(check(plan)))
    assert text.endswith(f"\n{grid(plan)}\n")
    assert max(map(len, grid(plan).splitlines())) <= 80


CHAIN = {"sums_output": (False, True, False), "sums_gradient": (False, True, True)}


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        (["--schedule", "1f1b"], one_f_one_b(3, 4, 2)),
        (["--schedule", "pipemare"], pipemare(3, 4, 2)),
        (["--warmup-steps", "1"], pipemare(3, 4, 2, warmup_steps=1)),
        (["--drain-interval", "1"], pipemare(3, 4, 2, drain_interval=1)),
        (["--schedule", "inference"], inference(3, 4)),
        # Waves have all segments on one rank.
        (["--schedule", "accumulation"], accumulation(3, 4, 2)),
        (["--schedule", "tick-tock"], tick_tock(3, 4, 2)),
        (["--schedule", "in-phase"], in_phase(3, 4, 2)),
        (["--schedule", "tick-tock", "--collective-ms", "0,1,.5"], tick_tock(3, 4, 2, **CHAIN)),
        (["--schedule", "in-phase", "--collective-ms", "0,2,1"], in_phase(3, 4, 2, **CHAIN)),
    ],
    ids=str,
)
def test_options_choose_the_plan(options, plan):
    numbers = ["--stages", "3", "--micro-batches", "4", "--steps", "2"]
    assert Plan.parse(show(*numbers, "--text", *options)) == plan
    text = show(*numbers, *options)
    assert text.startswith(str(check(plan)))
    assert text.endswith(f"\n{grid(plan)}\n")


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "plan"),
    [
        (["--schedule", "zbv"], zbv(4, 8, 2)),
        (["--schedule", "zb-h1"], zb_h1(4, 8, 2)),
        (["--schedule", "interleaved"], interleaved(4, 8, 2)),
        (["--schedule", "interleaved", "--chunks", "3"], interleaved(4, 8, 2, chunks=3)),
        (["--schedule", "auto"], automatic(4, 8, 2)),
        (["--schedule", "auto", "--memory-limit", "0.75"], automatic(4, 8, 2, memory_limit=0.75)),
    ],
)
def test_synchronous_schedules_are_shown(options, plan, tmp_path):
    numbers = ["--stages", "4", "--micro-batches", "8", "--steps", "2"]
    assert Plan.parse(show(*numbers, "--text", *options)) == plan
    text = show(*numbers, *options, "--output", str(tmp_path))
    assert text.startswith(str(check(plan)))
    assert f"\n{grid(plan)}\n" in text
    drawn = (tmp_path / "plan.svg").read_text()
    assert (">gradient of weights</text>" in drawn) == plan.is_split
    assert show("--schedule", f"file:{tmp_path}/plan.txt") == show(*numbers, *options)
    # torch's form is of one step.
    one = show(*numbers[:-1], "1", *options, "--csv")
    (tmp_path / "torch.csv").write_text(one)
    assert show("--schedule", f"file:{tmp_path}/torch.csv", "--csv") == one


def test_one_time_is_that_of_all_stages_of_a_rank():
    # Idle (P - 1) T / v if interleaved, (P - 1) (F + B - W) for ZB-H1, (P - 1) max(F, B) / 2 for V.
    numbers = ("--stages", "4", "--micro-batches", "8", "--steps", "1")
    times = ("--forward-ms", "1", "--backward-ms", "2", "--weight-ms", "0.7")
    for schedule, time, bound, gap in [
        ("interleaved", 24 + 4.5, 24 + 1.5, "11.8"),
        ("zb-h1", 24 + 3 * 1.6, 24 + 3, "6.7"),
        ("zbv", 24 + 3 * 1.3 / 2, 24 + 1.5, "1.8"),
    ]:
        split = times if schedule != "interleaved" else times[:4]
        text = show("--schedule", schedule, *numbers, *split)
        assert f"time: {time:g} ms, {time:.4g} ms per step\n" in text
        line = f"passes: {bound:.4g} ms per step, which the plan exceeds by {gap}%\n"
        assert f"lower bound of the {line}" in text
        # An optimizer step is of a rank, and no pass.
        text = show("--schedule", schedule, *numbers, *split, "--step-ms", "3,1,1,2")
        assert f"time: {time + 3:g} ms" in text
        assert line in text
    # A number for each stage is that stage's own; W is half of the backward pass if it is omitted.
    text = show("--schedule", "zbv", *numbers, "--forward-ms", ",".join(["0.5"] * 8))
    assert "time: 25.5 ms, 25.5 ms per step" in text


def test_steps_that_overlap_have_no_lower_bound(tmp_path):
    file = tmp_path / "plan.txt"
    file.write_text(re.sub(r" \dN\d@\d", "", str(zb_h1(3, 3, 2))))
    assert "lower bound" not in show("--schedule", f"file:{file}", "--weight-ms", "1")


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--schedule", "zbv", "--chunks", "2"], ("--chunks", 2)),
        (
            ["--schedule", "interleaved", "--slack", "1"],
            ("--slack", 1),
        ),
        (["--schedule", "1f1b", "--memory-limit", "0.5"], ("action", "0F2@0")),
        (["--schedule", "auto", "--memory-limit", "0"], ("memory_limit", 0.0)),
        (["--schedule", "zbv", "--memory-limit", "nan"], ("memory_limit",)),
        (["--schedule", "zbv", "--weight-ms", "3"], ("--weight-ms", "3")),
        (
            ["--schedule", "auto", "--collective-ms", "1"],
            ("--collective-ms", "1"),
        ),
        (["--schedule", "zbv", "--step-ms", "1,2"], ("--step-ms", "1,2")),
        (["--schedule", "zbv", "--csv"], ("steps", 4)),
        (["--schedule", "zbv", "--csv", "--text"], ("--csv", True)),
        (["--schedule", "interleaved", "--chunks", "99999"], ("--stages", 4)),
        (
            ["--schedule", "auto", "--micro-batches", "2501"],
            ("micro_batches", 2501),
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options, refusal):
    with refuses((ConfigError, PlanError), *refusal):
        show(*options)


@pytest.mark.parametrize("name", ["gpipe", "inference", "tick-tock", "file:"])
def test_engines_do_not_train_with_what_only_plans_know(name):
    with pytest.raises(ValidationError, match="'auto' or 'pipemare'"):
        PipelineConfig(schedule=name)


def test_collectives_are_predicted(tmp_path):
    # Micro-batches of 4 x (1 + 2) ms; the sums of the first forward and the last backward pass
    # have nothing to run behind, 1 ms for each of the three segments below the head.
    numbers = ("--stages", "4", "--micro-batches", "2", "--steps", "1", "--collective-ms", "1")
    text = show("--schedule", "accumulation", *numbers)
    assert "collective 1 ms:\ntime: 36 ms, 36 ms per step\n" in text
    assert "collectives: 12 ms\n" in text
    text = show("--schedule", "tick-tock", *numbers, "--output", str(tmp_path))
    assert "time: 30 ms, 30 ms per step\n" in text
    gain = "collectives: 12 ms; speedup over accumulation: 1.200x\n"
    assert gain in text
    assert ">sums</text>" in (tmp_path / "plan.svg").read_text()
    file = str(tmp_path / "plan.txt")
    assert gain in show("--schedule", f"file:{file}", "--collective-ms", "1")


def test_costs_may_differ_by_stage():
    text = show(
        *("--stages", "2", "--micro-batches", "1", "--steps", "1", "--schedule", "inference"),
        *("--forward-ms", "1.5,0.5", "--send-ms", "0.25"),
    )
    assert "forward 1.5,0.5 ms, backward 2 ms, step 0 ms, send 0.25 ms" in text
    assert "time: 2.25 ms\n" in text
    assert f"(by rank {0.5 / 2.25:.1%} to {1.5 / 2.25:.1%})" in text


def test_output_holds_every_form(tmp_path):
    folder = tmp_path / "new" / "folder"
    plan = pipemare(3, 2, 2)
    numbers = ("--stages", "3", "--micro-batches", "2", "--steps", "2", "--step-ms", "0.5")
    text = show(*numbers, "--output", str(folder))
    *_, last = text.splitlines()
    assert last == f"{folder}: plan.txt, trace.json, plan.svg, plan.png"
    assert sorted(file.name for file in folder.iterdir()) == FILES
    assert Plan.parse((folder / "plan.txt").read_text()) == plan
    # The text is all there is on the screen.
    assert show(*numbers, "--text", "--output", str(folder)) == (folder / "plan.txt").read_text()
    timeline = simulate(plan, Costs(0.001, 0.002, 0.0005))
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    end = max(e["ts"] + e["dur"] for e in trace if e["ph"] == "X")
    assert end == pytest.approx(timeline.makespan_s * 1e6)
    ElementTree.fromstring((folder / "plan.svg").read_text())
    assert Image.open(io.BytesIO((folder / "plan.png").read_bytes())).width == 1200


@pytest.mark.parametrize(
    ("content", "kind", "refusal"),
    [
        (b"\xff\xfe\x00", ConfigError, ("--schedule",)),
        (b"0: 0F0", PlanError, ("plan", "0: 0F0")),
        (Layout(global_batch=8, shares=(8,)).to_json().encode(), PlanError, ("--schedule",)),
        # Without the receive of its gradient the first stage's backward pass has no input.
        (str(pipemare(2, 1, 1)).replace(" 0RG0@0", "").encode(), PlanError, ("action", "0B0@0")),
    ],
)
def test_bad_files_are_refused(tmp_path, content, kind, refusal):
    (tmp_path / "plan.txt").write_bytes(content)
    with refuses(kind, *refusal):
        show("--schedule", f"file:{tmp_path}/plan.txt")


BASE = ["layout", "search", "--model", "gpt2", "--global-batch", "64", "--sequence", "256"]


def test_layouts_are_printed_and_written(tmp_path):
    files = ["--json", str(tmp_path / "all.json"), "--output", str(tmp_path / "layout.json")]
    result = CliRunner().invoke(app, [*BASE, "--cluster", "2xV100,2xP100", *files])
    assert result.exit_code == 0, result.output
    assert "gpt2, 124.4 M parameters, on 2xV100, 2xP100" in result.output
    assert "\nequal " in result.output
    best = Layout.from_json((tmp_path / "layout.json").read_text())
    values = json.loads((tmp_path / "all.json").read_text())
    assert Layout.from_json(json.dumps(values["plans"][0])) == best
    assert best.digest[:12] in result.output
