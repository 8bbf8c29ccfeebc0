# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench training`` as a person types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wavemare.bench.training.request import SYSTEMS

TINY = [
    *("--vocabulary", 4000, "--hidden", 32, "--layers", 1, "--heads", 2, "--block", 32),
    *("--batch", 2, "--sequence", 16),
]


def test_every_system_is_measured_beside_dense_deepspeed(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    options = ["--rounds", 2, "--steps-per-round", 2, "--json", "result.json", "--plot", "a.png"]
    options += ["--systems", ",".join(SYSTEMS)]
    ended = command("wavemare", "bench", "training", *TINY, *options).check()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["command"].startswith("wavemare bench training --vocabulary 4000 ")
    assert {"processor", "cores", "torch", "deepspeed"} <= result["machine"].keys()
    rows = {row["system"]: row for row in result["rows"]}
    assert tuple(rows) == SYSTEMS
    dense = rows["deepspeed-dense"]
    for name, row in rows.items():
        assert len(row["rounds_s"]) == 2
        assert row["ratio"] == pytest.approx(dense["median_s"] / row["median_s"])
        assert (row["executor"] is not None) == name.startswith("wavemare")
        assert name in ended.output
        if name not in ("wavemare-topk", "no-communication-bound"):
            # All of them train the same model on the same texts.
            assert row["loss"] == pytest.approx(dense["loss"], rel=1e-5)
    # A rank's batch has 32 words, and what is sent of the other 3968 rows is a bit each.
    pushed = rows["wavemare-pushpull"]
    assert 0 < pushed["density"] <= pushed["union"] < 0.5
    assert 0 < pushed["bytes_up"] < 4000 * 32 * 4 / 2
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.slow
def test_held_out_losses_are_compared_with_those_of_dense_deepspeed(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    systems = "deepspeed-dense,wavemare-auto,wavemare-ddp,wavemare-topk"
    # At this rate gradients are so large that a system which clips them shows.
    options = ["--quality-steps", 6, "--learning-rate", 0.1, "--systems", systems]
    options += ["--json", "result.json"]
    ended = command("wavemare", "bench", "training", *TINY, *options).check()
    result = json.loads((tmp_path / "result.json").read_text())
    found = {row["system"]: row for row in result["quality"]}
    assert {name for name, row in found.items() if row["same_losses"]} == {
        "deepspeed-dense",
        "wavemare-auto",
        "wavemare-ddp",
    }
    assert found["wavemare-topk"]["gap_percent"] != 0
    for row in found.values():
        assert [step for step, _ in row["curve"]] == list(range(7))
        assert len(row["losses"]) == 6
    assert "held-out loss" in ended.output


def test_a_refused_request_starts_nothing(command: Callable[..., Any]) -> None:
    ended = command("wavemare", "bench", "training", "--hidden", 30)
    assert ended.code == 2
    assert "--heads" in ended.output
    assert "Traceback" not in ended.output
