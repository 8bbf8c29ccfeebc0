# SPDX-License-Identifier: Apache-2.0
"""Each example runs as two ranks, as it would in a user's hands, and learns where it trains."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "examples"
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
    assert losses[-1] < losses[0] - 0.1
