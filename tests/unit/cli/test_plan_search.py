# SPDX-License-Identifier: Apache-2.0
"""``wavemare plan search``: what it prints and writes, and its exit codes."""

import json

from typer.testing import CliRunner

from wavemare.cli import app
from wavemare.parallel.plan import ParallelPlan

BASE = ["plan", "search", "--model", "gpt2", "--global-batch", "64", "--sequence", "256"]


def test_plans_are_printed_and_written(tmp_path):
    files = ["--json", str(tmp_path / "all.json"), "--output", str(tmp_path / "plan.json")]
    result = CliRunner().invoke(app, [*BASE, "--cluster", "2xV100,2xP100", *files])
    assert result.exit_code == 0, result.output
    assert "gpt2, 124.4 M parameters, on 2xV100, 2xP100" in result.output
    assert "\nequal " in result.output
    best = ParallelPlan.from_json((tmp_path / "plan.json").read_text())
    values = json.loads((tmp_path / "all.json").read_text())
    assert ParallelPlan.from_json(json.dumps(values["plans"][0])) == best
    assert best.digest[:12] in result.output
