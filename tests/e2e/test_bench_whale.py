# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench whale`` as a person types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TINY = [
    *("--layers", 2, "--hidden", 32, "--heads", 2, "--sequence", 16, "--batch", 6),
    *("--ranks", 2, "--rounds", 2, "--json", "result.json"),
]


def test_shares_that_fit_the_devices_are_measured_beside_equal_ones(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    options = ["--parts", "shares", "--factor", 4, "--plot", "a.png"]
    ended = command("wavemare", "bench", "whale", *TINY, *options).check()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["command"].startswith("wavemare bench whale ")
    assert result["machine"]["threads_per_rank"] == 1
    assert result["throttle"] in {"cgroup v1", "cgroup v2", "pacing"}
    assert result["baseline"] == "equal"
    equal, planned = result["rows"]
    assert (equal["system"], planned["system"]) == ("equal", "planned")
    assert equal["shares"] == [6, 6]
    assert sum(planned["shares"]) == 12
    assert planned["ratio"] == pytest.approx(equal["median_s"] / planned["median_s"])
    assert planned["bound_fraction"] == pytest.approx(planned["ratio"] / planned["ideal"])
    assert len(planned["rounds_s"]) == 2
    assert len(planned["losses"]) == 3
    assert planned["loss_gap"] <= 1e-6
    assert "cgroup" in ended.output or "pacing" in ended.output
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "pipemare"])
def test_cuts_are_measured_with_either_end_slow(
    command: Callable[..., Any], tmp_path: Path, schedule: str
) -> None:
    command("wavemare", "bench", "whale", *TINY, "--parts", "cuts", "--schedules", schedule).check()
    result = json.loads((tmp_path / "result.json").read_text())
    rows = [(row["slow"], row["system"]) for row in result["rows"]]
    assert rows == [(0, "equal"), (0, "planned"), (1, "equal"), (1, "planned")]
    for row in result["rows"]:
        assert row["schedule"] == schedule
        assert row["cuts"][0] == row["best_cuts"][0] == 0
        assert row["cuts"][-1] == row["best_cuts"][-1]
        assert len(row["stage_s"]) == len(row["predicted_stage_s"]) == 2
        assert min(row["stage_s"]) > 0


def test_a_refused_request_starts_nothing(command: Callable[..., Any]) -> None:
    ended = command("wavemare", "bench", "whale", "--ranks", 3)
    assert ended.code == 2
    assert "--ranks" in ended.output
    assert "Traceback" not in ended.output
