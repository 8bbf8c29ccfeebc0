# SPDX-License-Identifier: Apache-2.0
"""What a training loop of one's own leaves in its run folder."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wavemare.engine.config import WavemareConfig
from wavemare.engine.watchdog.progress import PROGRESS
from wavemare.errors import ConfigError
from wavemare.observe import Recording, read_events, read_metrics
from wavemare.observe.engine_facts import EngineFacts
from wavemare.report import read_run


class Pipeline(SimpleNamespace):
    """What is asked of 1F1B's engine, at its first step's end."""

    num_stages, stage_id, global_steps, global_samples = 2, 1, 0, 8

    def __init__(self, schedule: str | None = "1f1b", warmup_steps: int = 0) -> None:
        values = {"pipeline": {"stages": 1, "schedule": schedule}}
        own = SimpleNamespace(warmup_steps=warmup_steps)
        pipeline = SimpleNamespace(schedule=schedule, pipemare=own)
        if schedule is not None:  # DeepSpeed's own engine has no section of ours
            self._sections = SimpleNamespace(pipeline=pipeline, model_dump=lambda mode: values)
        self.config = {"train_batch_size": 8}
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}])

    def get_global_grad_norm(self) -> float:
        return 3.0

    def step_metrics(self) -> dict[str, float]:
        return {"bubble": 0.25}

    def train_batch_size(self) -> int:
        return 8

    def train_micro_batch_size_per_gpu(self) -> int:
        return 2

    def gradient_accumulation_steps(self) -> int:
        return 4

    def zero_optimization_stage(self) -> int:
        return 1


def train(folder: Path, engine: Any, *, steps: int, tells: str = "train_batch", **options: Any):
    with Recording(folder, engine, steps=steps, **options) as recording:
        for step in range(getattr(engine, "global_steps", 0) + 1, steps + 1):
            with recording.step(step):
                with PROGRESS.doing(tells):
                    pass
                for group in engine.optimizer.param_groups if engine is not None else []:
                    group["lr"] /= 2
            recording.log(step, loss=1 / step)
    return recording


def test_a_line_has_what_is_given_and_what_the_engine_tells(tmp_path: Path) -> None:
    recording = train(tmp_path, Pipeline(), steps=2, tokens=64, arguments={"lr": 0.5})
    first, second = read_metrics(recording.run.metrics_file)
    assert second.pop("tokens_per_second") > 0
    assert second == {
        "step": 2, "loss": 0.5, "learning_rate": 0.25, "grad_norm": 3.0, "samples": 8,
        "bubble": 0.25,
    }  # fmt: skip
    assert first["learning_rate"] == 0.5  # that of the step, not the next one's
    facts = read_run(tmp_path)
    assert facts.configuration["arguments"] == {"lr": 0.5}
    # The engine's, whatever the section says, also in a run that goes on and has no summary.
    assert facts.configuration["wavemare"]["pipeline"]["stages"] == facts.layout["stages"] == 2
    assert (facts.layout["schedule"], facts.layout["gradient_accumulation_steps"]) == ("1f1b", 4)
    assert facts.summary is not None
    assert facts.summary["results"]["steps"] == 2
    assert [event["kind"] for event in facts.events] == ["memory", "memory"]


@pytest.mark.parametrize("tells", ["train_batch", "forward"])
def test_a_step_is_noted_once_whoever_tells_of_it(tmp_path: Path, tells: str) -> None:
    train(tmp_path, Pipeline(), steps=6, tells=tells)
    trace = read_run(tmp_path).trace
    assert trace is not None
    (rank,) = trace.ranks
    assert (rank.stage, rank.first_step, len(rank.steps)) == (1, 3, 4)
    assert len(rank.spans) == (0 if tells == "train_batch" else 4)
    assert PROGRESS.follower is None


def test_the_warm_up_is_not_noted(tmp_path: Path) -> None:
    train(tmp_path, Pipeline("pipemare", warmup_steps=20), steps=40)
    trace = read_run(tmp_path).trace
    assert trace is not None
    assert trace.ranks[0].first_step == 20 + 2 + 1


def test_an_older_run_moves_aside_and_one_that_goes_on_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, Pipeline(), steps=3)
    train(folder, Pipeline(), steps=4)
    older = read_metrics(tmp_path / "run.1" / "metrics.jsonl")
    assert [line["step"] for line in older] == [1, 2, 3]
    engine = Pipeline()
    engine.global_steps = 2
    train(folder, engine, steps=5)
    found = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5]
    assert not (tmp_path / "run.2").exists()
    with pytest.raises(ConfigError, match="2 are done already"):
        Recording(folder, engine, steps=2)


def fail(folder: Path, *, within: bool) -> None:
    with Recording(folder, Pipeline(), steps=2) as recording:
        with recording.step(1):
            assert PROGRESS.follower is not None
            if within:
                raise ZeroDivisionError
        raise ZeroDivisionError


@pytest.mark.parametrize("within", [True, False])
def test_a_loop_that_fails_leaves_no_summary(tmp_path: Path, within: bool) -> None:
    shown = warnings.showwarning
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path, within=within)
    assert read_run(tmp_path).summary is None
    assert not (tmp_path / "timeline").exists()
    assert PROGRESS.follower is None
    assert warnings.showwarning == shown


def test_a_loop_that_ends_early_leaves_the_steps_it_had(tmp_path: Path) -> None:
    with Recording(tmp_path, Pipeline(), steps=4) as recording, recording.step(1):
        with PROGRESS.doing("train_batch"):
            pass
        recording.results["stopped_after"] = 1
    facts = read_run(tmp_path)
    assert facts.trace is not None
    assert len(facts.trace.ranks[0].steps) == 1
    assert facts.summary is not None
    assert facts.summary["results"]["stopped_after"] == 1


def test_a_loop_without_an_engine(tmp_path: Path) -> None:
    train(tmp_path, None, steps=2)
    facts = read_run(tmp_path)
    assert [line["loss"] for line in facts.metrics] == [1.0, 0.5]
    assert facts.trace is None
    assert facts.layout["stages"] == 1


@pytest.mark.parametrize(
    ("stages", "configured", "schedule"),
    [(4, None, "1f1b"), (1, None, "data parallel"), (2, "pipemare", "pipemare")],
)
def test_the_summary_says_how_the_model_is_laid_out(
    tmp_path: Path, stages: int, configured: str | None, schedule: str
) -> None:
    engine = Pipeline(configured)
    engine.num_stages = stages
    train(tmp_path, engine, steps=2)
    summary = read_run(tmp_path).summary
    assert summary is not None
    layout = summary["layout"]
    assert (layout["stages"], layout["schedule"], layout["zero_stage"]) == (stages, schedule, 1)


def test_ranks_that_share_layers_are_those_of_the_engine() -> None:
    section = WavemareConfig.model_validate({"tensor_parallel": {"size": 2}})
    assert EngineFacts(SimpleNamespace(_sections=section)).tensor_parallel == 2
    assert EngineFacts(None).tensor_parallel == 1


def test_only_rank_0_writes_the_runs_files(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    train(tmp_path, Pipeline(), steps=2)
    assert not (tmp_path / "metrics.jsonl").exists()
    assert {event["rank"] for event in read_events(tmp_path)} == {1}
    assert json.loads((tmp_path / "timeline" / "rank_00001.json").read_text())["rank"] == 1
