# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench pipeline`` as a person types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wavemare.bench.sparse.request import DEFAULT_SYSTEMS as SPARSE_SYSTEMS
from wavemare.bench.systems import DEFAULT_SYSTEMS
from wavemare.bench.trace import load_timeline

TINY = [
    *("--layers", 4, "--hidden", 32, "--heads", 2, "--sequence", 16, "--batch", 1),
    *("--rounds", 2, "--steps-per-round", 2),
]


def test_the_result_has_every_system_with_its_ratios(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    options = ["--micro-batches", "1,4", *TINY, "--json", "result.json", "--trace", "trace"]
    ended = command("wavemare", "bench", "pipeline", *options).check()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["command"].startswith("wavemare bench pipeline --micro-batches 1,4 ")
    assert result["baseline"] == "deepspeed-1f1b"
    assert {"processor", "cores", "torch", "deepspeed"} <= result["machine"].keys()
    assert result["machine"]["threads_per_rank"] == 1
    assert len(result["stage_s"]) == 2
    rows = {(row["system"], row["micro_batches"]): row for row in result["rows"]}
    left_out = {(row["system"], row["micro_batches"]) for row in result["skipped"]}
    assert left_out == {("deepspeed-dualpipev", 1), ("torch-1f1b", 1)}
    assert rows.keys() | left_out == {(name, count) for name in DEFAULT_SYSTEMS for count in (1, 4)}
    for (name, count), row in rows.items():
        stock = rows["deepspeed-1f1b", count]["median_s"]
        assert len(row["rounds_s"]) == 2
        assert row["ratio"] == pytest.approx(stock / row["median_s"])
        assert row["stages"] == 2
        timeline = tmp_path / "trace" / f"{name}-m{count}.json"
        assert timeline.exists() == (not name.startswith("torch"))
        if timeline.exists():
            loaded = load_timeline(timeline)
            assert len(loaded.ranks) == 2
            # Two timed steps of all ranks, and each rank's busy time as in the row.
            ranks = row["ranks"]
            assert 0 < loaded.busy_s(0) < 2.5 * max(row["rounds_s"])
            assert all(rank["compute_s"] > 0 and rank["step_s"] > 0 for rank in ranks)
    assert rows["wavemare-pipemare", 4]["ideal"] == 1.25
    assert "torch-1f1b at M=1 is left out" in ended.output
    assert "no-communication-bound" in ended.output


@pytest.mark.slow
def test_waits_show_the_bubble_of_the_stock_schedule(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    systems = "deepspeed-1f1b,wavemare-pipemare,no-communication-bound"
    options = ["--synthetic", "--stages", 4, "--micro-batches", "1,4", "--rounds", 3]
    options += ["--systems", systems, "--json", "result.json"]
    command("wavemare", "bench", "pipeline", *options).check()
    result = json.loads((tmp_path / "result.json").read_text())
    rows = {(row["system"], row["micro_batches"]): row for row in result["rows"]}

    def utilisation(system: str, count: int) -> float:
        """Of the shortest round: the machine may be busy with something else."""
        row = rows[system, count]
        return row["utilisation"] * row["median_s"] / min(row["rounds_s"])

    for count in (1, 4):
        ideal = rows["deepspeed-1f1b", count]["ideal_utilisation"]
        assert ideal == pytest.approx(count / (count + 3))
        stock = utilisation("deepspeed-1f1b", count)
        assert 0.75 <= stock / ideal <= 1.0
        assert 0.8 <= utilisation("no-communication-bound", count) <= 1.0
        # Stock leaves more idle than the schedule that never flushes, whatever the machine does.
        assert utilisation("wavemare-pipemare", count) > stock


def test_a_refused_request_starts_nothing(command: Callable[..., Any]) -> None:
    ended = command("wavemare", "bench", "pipeline", "--systems", "torch-1f1b,torch-zb")
    assert ended.code == 2
    assert "torch-zbv" in ended.output
    assert "Traceback" not in ended.output


def test_collectives_are_measured_and_checked_against_each_other(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    options = ["--ranks", 2, "--mib", 1, "--densities", "1,0.1", "--patterns", "random,zipf"]
    options += ["--rounds", 2, "--warmups", 1, "--json", "result.json", "--plot", "plot.png"]
    ended = command("wavemare", "bench", "sparse", *options).check()
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["command"].startswith("wavemare bench sparse --ranks 2 --mib 1 ")
    rows = {(row["system"], row["pattern"], row["density"]): row for row in result["rows"]}
    cases = [("random", 1.0), ("random", 0.1), ("zipf", 0.1)]
    left_out = {(row["system"], row["pattern"], row["density"]) for row in result["skipped"]}
    expected = {(name, *case) for name in SPARSE_SYSTEMS for case in cases}
    assert rows.keys() | left_out == expected
    assert not rows.keys() & left_out
    for (name, *_), row in rows.items():
        assert row["ratio"] > 0
        assert len(row["rounds_s"]) == 2
        assert (row.get("executor") is not None) == name.startswith("wavemare")
    pushed = rows["wavemare-pushpull", "random", 0.1]
    assert 0 < pushed["bytes_up"] < 0.5 * 2**20
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert "wavemare-auto" in ended.output


def test_kernels_are_measured_beside_memcpy(command: Callable[..., Any], tmp_path: Path) -> None:
    options = ["--mib", 1, "--rounds", 2, "--json", "kernels.json"]
    ended = command("wavemare", "bench", "kernels", *options).check()
    result = json.loads((tmp_path / "kernels.json").read_text())
    rows = {(row["kernel"], row["density"]): row for row in result["rows"]}
    assert rows["memcpy", 1.0]["of_memcpy"] == 1
    assert {"mask", "gather", "scatter", "reduce float32"} <= {kernel for kernel, _ in rows}
    assert all(row["gb_s"] > 0 for row in rows.values())
    assert "of memcpy" in ended.output
