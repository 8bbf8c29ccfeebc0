# SPDX-License-Identifier: Apache-2.0
"""The numbers in a page are those of the files, and what is not known is said to be missing."""

import json
import shutil

import pytest
from PIL import Image, ImageColor
from typer.testing import CliRunner

from wavemare.cli import app
from wavemare.errors import DataError
from wavemare.pipeline.draw.gantt import COLOURS
from wavemare.report import read_run, run_page


def points(figure, name):
    (trace,) = [each for each in figure["data"] if each["name"] == name]
    return list(zip(trace["x"], trace["y"], strict=True))


def test_curves_are_the_lines_of_the_metrics(run_folder, figures_of):
    figures = figures_of(run_page([read_run(run_folder)]))
    assert points(figures["Loss"], "training") == [(2, 5.5), (4, 4.25)]
    assert points(figures["Loss"], "validation") == [(4, 4.125)]
    assert figures["Loss"]["layout"]["yaxis"]["title"]["text"] == "loss (nats)"
    assert points(figures["Learning rate"], "learning rate") == [(2, 0.001), (4, 0.002)]
    assert points(figures["Gradient norm"], "gradient norm") == [(2, 2.0), (4, 1.5)]
    assert points(figures["Speed"], "tokens/s") == [(2, 900.0), (4, 1100.0)]
    # At the end of each span, in ms; spans of rank 0 end in the order in which they begin.
    used = points(figures["Memory over these steps: one"], "rank 0")
    ends = (1000, 1500, 2000, 3000, 5500, 7000, 8000, 9500, 10500)
    assert used == list(zip(ends, range(10, 19), strict=True))
    assert points(figures["Memory over these steps: one"], "rank 1")[0] == (3000, 11)
    assert points(figures["Bubble: one"], "measured") == [(2, 40.0), (4, 20.0)]
    assert points(figures["Bubble: one"], "by unevenness") == [(2, 10.0), (4, 5.0)]
    assert points(figures["Staleness: one"], "stage 0") == [(2, 0.75), (4, 0.75)]


def test_the_timeline_has_each_span(run_folder, figures_of):
    figure = figures_of(run_page([read_run(run_folder)]))["Steps 3 to 3: one"]
    bars = {
        text: (base, x)
        for trace in figure["data"]
        if trace["type"] == "bar"
        for text, base, x in zip(trace["customdata"], trace["base"], trace["x"], strict=True)
    }
    assert len(bars) == 9 + 5
    assert bars["1B0"] == pytest.approx((3000, 2500))
    assert bars["the data loader"] == pytest.approx((1500, 500))
    names = {trace["name"] for trace in figure["data"]}
    assert {"forward", "backward", "optimizer step", "other", "step begins"} <= names


def test_the_collective_is_shown_by_step(tmp_path, figures_of, sample):
    folder = sample.write(tmp_path / "run", [{**sample.metrics[0], **sample.sparse}])
    figures = figures_of(run_page([read_run(folder)]))
    assert points(figures["Density: run"], "mean of the ranks") == [(2, 4.0)]
    assert points(figures["Density: run"], "union") == [(2, pytest.approx(7.0))]
    for name, mib in (("gradients", 4.0), ("sent", 1.0), ("received", 2.0)):
        assert points(figures["Bytes per step: run"], name) == [(2, mib)]
    choices = figures["The selector's choices: run"]
    assert points(choices, "dense") == [(2, 1)]
    assert points(choices, "pushpull") == [(2, 3)]
    assert points(figures["Time in the collective: run"], "predicted") == [(2, 10.0)]


def test_tables_have_checkpoints_warnings_and_what_was_predicted(run_folder):
    html = run_page([read_run(run_folder)])
    for cell in ("step-4 (latest)", "2026-01-02 03:04:09", "complete", "2.5 s", "22.5%"):
        assert f"<td>{cell}</td>" in html, cell
    assert "<td>&lt;b&gt;mind&lt;/b&gt;</td>" in html
    assert "<td>python -m &#x27;a b&#x27;</td>" in html
    assert "at most 1, 0 (stage 0 first)" in html


def test_text_of_a_run_cannot_become_markup(run_folder):
    html = run_page([read_run(run_folder, name="</script><img>")])
    body = html.partition("<body>")[2].partition("<script>")[0]
    data = html.partition('id="figures">')[2].partition("</script>")[0]
    assert "<img>" not in html
    assert "window.broken" not in body.replace("&lt;script&gt;window.broken", "")
    assert json.loads(data)


def test_missing_facts_are_said_to_be_missing(tmp_path, figures_of):
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    html = run_page([read_run(folder)])
    assert figures_of(html).keys() == {"Loss"}
    for text in (
        "learning rate is not recorded",
        "gradient norm is not recorded",
        "the run has no pipeline",
        "the run did not use the sparse one",
        "no steps were recorded",
        "the folder has no checkpoint",
        "warnings are not recorded",
        "there is no config.json",
        "not yet (no summary.json)",
    ):
        assert text in html, text


def test_runs_are_compared(run_folder, tmp_path, figures_of, sample):
    other = sample.write(tmp_path / "two", [{"step": 2, "loss": 6.0}])
    config = json.loads((other / "config.json").read_text())
    config["configuration"]["arguments"]["max_steps"] = 9
    config["configuration"]["deepspeed"]["zero_optimization"] = {"stage": None}
    (other / "config.json").write_text(json.dumps(config))
    html = run_page([read_run(run_folder), read_run(other)])
    loss = figures_of(html)["Loss"]
    assert points(loss, "one: training") == [(2, 5.5), (4, 4.25)]
    assert points(loss, "two: training") == [(2, 6.0)]
    assert "<tr><td>arguments.max_steps</td><td>4</td><td>9</td></tr>" in html
    row = '<td>deepspeed.zero_optimization.stage</td><td><span class="none">not known</span></td>'
    assert f"{row}<td>null</td>" in html
    assert "<td>arguments.prompt</td>" not in html


def test_the_command_writes_a_page_that_stands_alone(run_folder, tmp_path):
    file = tmp_path / "new" / "report.html"
    result = CliRunner().invoke(app, ["report", str(run_folder), "--output", str(file)])
    assert result.exit_code == 0, result.output
    html = file.read_text()
    assert html.startswith("<!DOCTYPE html>")
    head = html.partition("<script>")[0]
    assert "src=" not in head
    assert "http" not in head.replace("http-equiv", "")
    assert len(html.encode()) < 6e6
    assert f"{file}: {len(html.encode()) / 1e6:.1f} MB" in result.output


def test_the_picture_shows_as_much_of_each_kind_as_was_measured(run_folder, tmp_path):
    files = ["--output", str(tmp_path / "page.html"), "--picture", str(tmp_path / "ranks.png")]
    result = CliRunner().invoke(app, ["report", str(run_folder), *files])
    assert result.exit_code == 0, result.output
    picture = Image.open(tmp_path / "ranks.png").convert("RGB")
    lanes = picture.crop((0, 0, picture.width, int(0.7 * picture.height)))  # without the legend
    found = {colour: count for count, colour in lanes.getcolors(1 << 24)}
    seen = [found[ImageColor.getrgb(COLOURS[kind])] for kind in ("forward", "backward")]
    assert seen[1] / seen[0] == pytest.approx(8 / 4, rel=0.1)  # seconds of the two kinds
    shutil.rmtree(run_folder / "timeline")
    result = CliRunner().invoke(app, ["report", str(run_folder), *files])
    assert isinstance(result.exception, DataError)
    assert result.exception.key == "--picture"
