# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench wave`` as a person types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wavemare.bench.network import Laboratory
from wavemare.bench.wave.request import SYSTEMS

OBSTACLE = Laboratory.obstacle()
TINY = [
    *("--layers", 2, "--hidden", 32, "--heads", 2, "--vocabulary", 100, "--sequence", 16),
    *("--micro-batches", 2, "--rounds", 2, "--json", "result.json"),
]


def rows(result: dict[str, Any], exposed: float) -> dict[str, dict[str, Any]]:
    return {row["system"]: row for row in result["rows"] if row["exposed"] == exposed}


def test_every_system_is_measured_beside_accumulation(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    files = ["--plot", "a.png", "--trace", "t.json", "--timeline", "t.png", "--memory", "m.png"]
    ended = command("wavemare", "bench", "wave", "--exposed", 0, *TINY, *files).check()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["command"].startswith("wavemare bench wave --exposed 0 ")
    assert result["machine"]["threads_per_rank"] == 1
    found = rows(result, 0.0)
    assert tuple(found) == SYSTEMS
    before = found["accumulation"]
    for name, row in found.items():
        assert row["ratio"] == pytest.approx(before["median_s"] / row["median_s"])
        assert 0 < row["compute_s"] < row["median_s"]
        assert (row["mbit"], len(row["rounds_s"])) == (None, 2)
        assert name in ended.output
    assert before["model"] == 1
    memory = {row["system"]: row for row in result["memory"]}
    assert memory["tick-tock"]["bitwise"]
    assert memory["tick-tock"]["of_accumulation"] <= 1.02
    assert memory["tick-tock"]["of_in_phase"] < 0.6
    assert "auto at 0%" in ended.output
    trace = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    # Two micro-batches: 10 segments below the head, forward and backward, and 2 x 5 sums of each.
    done = [(event["pid"], event["cat"]) for event in trace if event["ph"] == "X"]
    for wave in (0, 1):
        assert done.count((wave, "compute")) == 2 * 11
        assert done.count((wave, "communication")) == 2 * 5
    for name in ("a.png", "t.png", "m.png"):
        assert (tmp_path / name).stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
def test_links_are_made_for_the_share(command: Callable[..., Any], tmp_path: Path) -> None:
    command("wavemare", "bench", "wave", "--exposed", "0,60", *TINY).check()
    result = json.loads((tmp_path / "result.json").read_text())
    assert rows(result, 0.0)["accumulation"]["mbit"] is None
    slow = rows(result, 0.6)["accumulation"]
    assert slow["mbit"] > 0
    # Messages this small take what latency makes of them: that links are slow is all that shows.
    assert slow["measured_exposed"] > 0.3


def test_a_refused_request_starts_nothing(command: Callable[..., Any]) -> None:
    ended = command("wavemare", "bench", "wave", "--batch", 3)
    assert ended.code == 2
    assert "--batch" in ended.output
    assert "Traceback" not in ended.output
