# SPDX-License-Identifier: Apache-2.0
"""Each example runs as two ranks, as it would in a user's hands, and learns where it trains.

So does the recipe on one page.
"""

import re
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
FOLDER = RECIPES / "examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
ONE_PROCESS = {"planner": "predicted"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(recipe, monkeypatch, tmp_path, name):
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    assert len(lines) <= 60
    ended = recipe(f"examples/{name}").check()
    if name in ONE_PROCESS:
        assert ONE_PROCESS[name] in ended.output
        return
    assert not re.findall("Warning|mismatch", ended.output), ended.output
    losses = [float(text) for text in re.findall(r"loss'?:? '?([0-9.]+)", ended.output)]
    assert len(losses) >= 2
    assert losses[-1] < losses[0] - min(0.1, losses[0] / 2)


def test_the_recipe_on_one_page(command, tmp_path):
    """It reads the text that it is given, and its whole model writes."""
    source = (RECIPES / "gpt/minimal.py").read_text()
    shorter = source.replace("STEPS, LENGTH, OUTPUT = 200, 128,", "STEPS, LENGTH, OUTPUT = 50, 32,")
    assert shorter != source
    (tmp_path / "text.txt").write_text("One line of text is enough to learn.\n" * 200)
    (tmp_path / "minimal.py").write_text(shorter)
    ended = command("wavemare", "launch", "--nproc", 2, "minimal.py", "text.txt").check()
    found = re.findall("loss ([0-9.]+)  held out ([0-9.]+)", ended.output)
    assert found
    assert max(map(float, found[-1])) < 1.0  # random bytes: 5.5
    assert (tmp_path / "build/gpt-minimal/model.safetensors").exists()
    assert "def read(" in ended.output
