# SPDX-License-Identifier: Apache-2.0
"""Pages that list what there is list all of it."""

import re
from pathlib import Path

import pytest
import typer

from wavemare.cli import app

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(
    file.parent.name for file in (ROOT / "framework" / "wavemare").glob("*/__init__.py")
)
COMMANDS = typer.main.get_command(app).commands
AREAS = "framework|engine|pipeline|comm|recipes|tests|docs"


def pictures(page):
    return re.findall(r"^```text\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def layout(page):
    return next(text for text in pictures(page) if text.startswith("framework/wavemare/"))


def test_there_is_something_to_look_for():
    assert {"report", "observe", "engine", "comm"} <= set(PACKAGES)
    assert {"report", "train", "bench"} <= COMMANDS.keys()


def listed(text):
    """Return the folders that a layout's lines begin with, and what the package's line names."""
    package, *areas = text.splitlines()
    return {*re.findall(r"\w+", package), *(line.partition("/")[0] for line in areas)}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_stands_in_the_layouts(package):
    (layers,) = (text for text in pictures("docs/architecture.md") if "->" in text)
    assert package in re.findall(r"\w+", layers)
    for page in ("docs/architecture.md", "README.md"):
        assert package in listed(layout(page)), page


def test_every_command_stands_in_the_changelog():
    text = (ROOT / "CHANGELOG.md").read_text()
    item = re.search(r"^- \*\*Command line\*\*.*?(?=^- |\Z)", text, re.M | re.S)[0]
    names = [*COMMANDS, *COMMANDS["bench"].commands]
    assert [name for name in names if f"`{name}`" not in item] == []


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/CONTRIBUTING.md"])
def test_paths_in_the_pages_for_developers_exist(page):
    found = re.findall(rf"`((?:{AREAS})/[\w./]+)`", (ROOT / page).read_text())
    assert found
    assert [path for path in found if not (ROOT / path).exists()] == []
