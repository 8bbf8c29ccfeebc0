"""The documentation holds: its configurations pass, its keys and tests exist, its links lead on."""

import json
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from wavemare.comm.config import CompressorConfig, SparseCollectiveConfig
from wavemare.engine.checkpoint_config import CheckpointConfig
from wavemare.engine.config import TensorParallelConfig, check_batch_sizes, check_config
from wavemare.engine.parallel_config import ParallelConfig
from wavemare.engine.watchdog.config import WatchdogConfig
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.staleness import max_staleness, mean_delay
from wavemare.pipeline.wave_config import WaveletConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


def defaults(section, prefix=""):
    """Return the default of each key below a section, by its dotted name."""
    found = {}
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            found |= defaults(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = field.default
    return found


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("pipeline", PipelineConfig()),
        ("wavelet", WaveletConfig()),
        ("tensor_parallel", TensorParallelConfig()),
        ("parallel", ParallelConfig()),
        ("sparse_collective", SparseCollectiveConfig(compressor=CompressorConfig())),
        ("watchdog", WatchdogConfig()),
        ("checkpoint", CheckpointConfig()),
    ],
)
def test_every_key_is_documented_with_its_default(name, section):
    text = (ROOT / "docs" / "configuration.md").read_text()
    table = text.partition(f"| key in `wavemare.{name}` |")[2].partition("\n\n")[0]
    documented = {row[0].strip("`"): row[1].strip("`") for row in rows(table)}
    expected = defaults(section)
    assert documented.keys() == expected.keys()
    for key, default in expected.items():
        if default is not None:  # else it is told in words
            assert json.loads(documented[key]) == default, key


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
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert fragment in map(anchor, headings), link


def test_the_named_tests_exist():
    sources = "\n".join(file.read_text() for file in sorted((ROOT / "tests").rglob("test_*.py")))
    existing = set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", PIPEMARE))
    assert named
    assert named <= existing


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
            assert float(mean) == pytest.approx(mean_delay(0, stages, size), abs=0.0051)
            assert float(gain) == pytest.approx((size + stages - 1) / size, abs=0.0051)
