# SPDX-License-Identifier: Apache-2.0
"""The documentation holds: configurations pass, keys and paths exist, links lead somewhere."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from wavemare.engine.config.resolve import check_batch_sizes, check_config
from wavemare.parallel.planner.cluster import parse_cluster
from wavemare.pipeline.staleness.staleness import max_staleness, mean_staleness

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "reference.py")))
PIPEMARE = (ROOT / "docs" / "pipemare.md").read_text()


def name_of(value):
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else ""


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def all_blocks(language, word=""):
    return [(page, block) for page in PAGES for block in blocks(page, language) if word in block]


def rows(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(("page", "block"), all_blocks("json", "wavemare"), ids=name_of)
def test_configurations_pass_the_check(page, block):
    config = json.loads(block)
    pipeline = config["wavemare"].get("pipeline")
    stages = 1 if pipeline is None else pipeline.get("stages", 2)
    parts = config["wavemare"].get("tensor_parallel", {}).get("size", 1)
    check_config(config, world_size=stages * parts)
    if any("batch_size" in key for key in config):
        check_batch_sizes(config, data_world_size=1)


@pytest.mark.parametrize(("page", "block"), all_blocks("python"), ids=name_of)
def test_python_is_python(page, block):
    compile(block, str(page), "exec")


def test_generated_tables_are_those_of_the_models_and_results():
    for page in REFERENCE.PAGES:
        text = page.read_text()
        assert REFERENCE.page(text) == text, "run `make reference`"
    assert REFERENCE.LOSSES.read_text() == REFERENCE.measured_losses(), "run `make reference`"
    text = REFERENCE.PAGES[0].read_text()
    marked = re.findall(r"^<!-- generated: keys of (\w+) -->$", text, re.MULTILINE)
    assert sorted(marked) == sorted(["wavemare", *REFERENCE.SECTIONS])


def test_the_table_of_gpus_has_a_row_for_all_that_was_measured_or_left_out(tmp_path, monkeypatch):
    row = {"part": "kernels", "case": "float32", "system": "mask", "gb_s": 900.0}
    times = {"median_s": 0.002, "host_s": 0.001, "ratio": 0.5}
    skipped = {"part": "step", "case": "nccl", "system": "", "reason": "a | b"}
    result = {"device": "A", "rows": [{**row, **times}], "skipped": [skipped]}
    monkeypatch.setitem(REFERENCE.gpu.__globals__, "RESULTS", tmp_path)
    assert "|" not in REFERENCE.gpu("gpu-*.json")
    (tmp_path / "gpu-a.json").write_text(json.dumps(result))
    assert REFERENCE.gpu("gpu-*.json").splitlines()[2:] == [
        "| A | kernels | float32 | `mask` | 2.000 | 1.000 | 0.50 | 900 GB/s |",
        "| A | step | nccl |  |  |  |  | left out: a / b |",
    ]


@pytest.mark.long
def test_the_site_is_built_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    built = subprocess.run(
        [*command, ROOT / "docs", tmp_path], capture_output=True, text=True, check=False
    )
    assert (built.returncode, built.stderr) == (0, "")
    for page in PAGES[1:]:
        assert (tmp_path / page.relative_to(ROOT / "docs")).with_suffix(".html").is_file()
    for page in tmp_path.rglob("*.html"):  # it is read without a network
        loaded = re.findall(
            r"<(?:script|link|img)[^>]*(?:src|href)=\"(https?:[^\"]*)", page.read_text()
        )
        assert loaded == [], page


def test_the_cluster_of_the_planner_page_is_read():
    (block,) = blocks(ROOT / "docs" / "planner.md", "json")
    cluster = parse_cluster(json.loads(block))
    assert [device.type for device in cluster.devices] == ["new"] * 4 + ["T4"] * 4


def anchor(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_within_the_repository_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        name, _, fragment = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if fragment:
            text = target.read_text()
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            own = re.findall(r'<a id="([^"]+)"></a>', text)  # keys of the configuration
            assert fragment in [*map(anchor, headings), *own], link


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/CONTRIBUTING.md"])
def test_paths_in_the_pages_for_developers_exist(page):
    areas = "framework|engine|pipeline|comm|recipes|tests|docs"
    found = re.findall(rf"`((?:{areas})/[\w./]+)`", (ROOT / page).read_text())
    assert found
    assert [path for path in found if not (ROOT / path).exists()] == []


def test_every_package_stands_in_the_picture_of_the_rooms():
    pictures = blocks(ROOT / "docs" / "architecture.md", "text")
    (layout,) = (text for text in pictures if text.startswith("framework/wavemare/"))
    packages = (ROOT / "framework" / "wavemare").glob("*/__init__.py")
    assert {file.parent.name for file in packages} <= set(re.findall(r"\w+", layout))


def test_the_table_of_staleness_and_gain():
    table = PIPEMARE.partition("## When it pays")[2].partition("## ")[0]
    header, *lines = (row for row in rows(table))
    sizes = [int(cell.removeprefix("M=")) for cell in header[1:]]
    assert lines
    for first, *cells in lines:
        stages = int(first.removeprefix("P="))
        for size, cell in zip(sizes, cells, strict=True):
            largest, mean, gain = re.fullmatch(r"(\d+) \(([\d.]+)\), ([\d.]+)x", cell).groups()
            assert int(largest) == max_staleness(0, stages, size)
            assert float(mean) == pytest.approx(mean_staleness(0, stages, size), abs=0.0051)
            assert float(gain) == pytest.approx((size + stages - 1) / size, abs=0.0051)


def test_time_to_a_loss_is_of_steps_between_evaluations(tmp_path, monkeypatch):
    def run(system, seed, *losses):
        curve = [[10 * n, loss] for n, loss in enumerate(losses, 1)]
        sizes = {"stages": 2, "micro_batches": 2, "learning_rate": 0.5}
        return {**sizes, "system": system, "seed": seed, "curve": curve}

    runs = [run("flush", 0, 4.0, 3.0, 2.0), run("flush", 1, 4.0, 3.0, 2.5)]
    runs += [run("naive", 0, 4.0, 1.0, 1.0), run("naive", 1, 4.0, 3.0, 3.0)]
    runs += [{**run("naive", 0, 1.0, 1.0, 1.0), "micro_batches": 4}]  # another pipeline
    runs += [{**run("flush", 0, 4.0, 3.0, 3.0), "learning_rate": 0.25}]  # a worse rate
    (tmp_path / "async-time.json").write_text(json.dumps({"command": "--lr RATE", "runs": runs}))
    measured = [{"system": "stock", "median_s": 2.0}, {"system": "ours", "median_s": 0.5}]
    (tmp_path / "async-time-2x2.json").write_text(json.dumps({"rows": measured}))
    (tmp_path / "tables.toml").write_text("""
[in-time]
runs = ["async-time.json"]
[[in-time.methods]]
name = "one"
optimizer = "AdamW"
run = "flush"
step = "stock"
[[in-time.methods]]
name = "two"
optimizer = "AdamW"
run = "naive"
step = "ours"
first = 10
[[in-time.goals]]
head = "to it"
run = "flush"
above = 0.0
step = "stock"
""")
    monkeypatch.setitem(REFERENCE.in_time.__globals__, "RESULTS", tmp_path)
    _, _, one, two = rows(REFERENCE.in_time("2x2"))
    assert one[2:] == ["0.5", "2.250 ± 0.250", "2", "2000.0 (1.00)", "60.0 s (1.00)"]
    # Seed 0 comes from 4 to 2 in 10 + 20 / 3 steps, of which the first 10 take 2 s each; seed 1
    # never comes to 2.5.
    time = 10 * 2.0 + 20 / 3 * 0.5
    assert two[3:5] == ["2.000 ± 1.000", "2"]
    assert two[5:] == ["500.0 (4.00)", f"{time:.1f} s ({60 / time:.2f}, 1 of 2 seeds)"]
