# SPDX-License-Identifier: Apache-2.0
"""What a training loop of one's own leaves in its run folder, and what is told of memory."""

import logging
import time
import warnings
from types import SimpleNamespace

import pytest

from support.refusals import refuses
from wavemare.engine.observe.progress import PROGRESS
from wavemare.errors import ConfigError
from wavemare.observe import Recording, read_events, read_metrics
from wavemare.report import read_run


def pipeline_engine(schedule="1f1b", warmup_steps=0):
    """Return what is asked of 1F1B's engine, at its first step's end."""
    values = {"pipeline": {"stages": 1, "schedule": schedule}}
    own = SimpleNamespace(warmup_steps=warmup_steps)
    pipeline = SimpleNamespace(schedule=schedule, pipemare=own)
    engine = SimpleNamespace(
        num_stages=2,
        stage_id=1,
        global_steps=0,
        global_samples=8,
        config={"train_batch_size": 8},
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.5}]),
        get_global_grad_norm=lambda: 3.0,
        step_metrics=lambda: {"bubble": 0.25},
        train_batch_size=lambda: 8,
        train_micro_batch_size_per_gpu=lambda: 2,
        gradient_accumulation_steps=lambda: 4,
        zero_optimization_stage=lambda: 1,
    )
    if schedule is not None:  # DeepSpeed's own engine has no section of ours
        engine.settings = SimpleNamespace(pipeline=pipeline, model_dump=lambda mode: values)
    return engine


def train(folder, engine, *, steps, tells="train_batch", **options):
    with Recording(folder, engine, steps=steps, **options) as recording:
        for step in range(getattr(engine, "global_steps", 0) + 1, steps + 1):
            with recording.step(step):
                with PROGRESS.doing(tells):
                    pass
                for group in engine.optimizer.param_groups if engine is not None else []:
                    group["lr"] /= 2
            recording.log(step, loss=1 / step)
    return recording


def test_a_line_has_what_is_given_and_what_the_engine_tells(tmp_path):
    recording = train(tmp_path, pipeline_engine(), steps=2, tokens=64, arguments={"lr": 0.5})
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
    assert facts.summary["results"]["steps"] == 2
    assert [event["step"] for event in facts.events if event["kind"] == "memory"] == [1, 2]


def test_a_recording_that_is_older_than_its_engine_gets_it_later(tmp_path, capsys):
    recording = Recording(tmp_path, steps=2, show=True)
    logging.getLogger("wavemare").warning("the model is large")
    recording.earlier_seconds = 100.0
    with recording.training(pipeline_engine(), tokens=64):
        for step in (1, 2):
            with recording.step(step), PROGRESS.doing("train_batch"):
                pass
        recording.log(2, loss=0.5)
        recording.log_eval(2, eval_loss=0.25, accuracy=None)
    trained, evaluated = read_metrics(recording.run.metrics_file)
    assert evaluated == {"step": 2, "eval_loss": 0.25, "accuracy": None}
    assert (trained["learning_rate"], trained["grad_norm"], trained["bubble"]) == (0.5, 3.0, 0.25)
    assert trained["tokens_per_second"] > 0
    assert "0.2500" in capsys.readouterr().out
    facts = read_run(tmp_path)
    assert facts.configuration["deepspeed"] == {"train_batch_size": 8}
    assert facts.summary["results"]["training seconds"] > 100
    assert len(facts.trace.ranks[0].steps) == 2
    assert "the model is large" in [e["text"] for e in facts.events if e["kind"] == "warning"]


def test_the_time_of_evaluations_is_not_in_the_speed(tmp_path, monkeypatch):
    now = [0.0]
    recording = Recording(tmp_path, pipeline_engine(), steps=3, tokens=60)
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: now[0])
        recording.begin()
        for step in (1, 2, 3):
            with recording.step(step):
                now[0] += 2.0
            recording.log(step, loss=1.0)
            if step < 3:
                now[0] += 50.0  # an evaluation
                recording.log_eval(step, eval_loss=1.0)
            with recording.saving(step, "a checkpoint"):
                now[0] += 1.0  # counts
        recording.end(finished=True)
    assert recording.tokens_per_second == 3 * 60 / (3 * 2.0 + 3 * 1.0)


@pytest.mark.parametrize("tells", ["train_batch", "forward"])
def test_a_step_is_noted_once_whoever_tells_of_it(tmp_path, tells):
    train(tmp_path, pipeline_engine(), steps=6, tells=tells)
    (rank,) = read_run(tmp_path).trace.ranks
    assert (rank.stage, rank.first_step, len(rank.steps)) == (1, 3, 4)
    assert len(rank.spans) == (0 if tells == "train_batch" else 4)
    assert PROGRESS.follower is None


@pytest.mark.parametrize(
    ("first", "last", "trace_steps", "warmup_steps", "traced"),
    [
        (1, 100, 4, None, (11, 4)),  # after the first ones, which take longer
        (1, 100, 4, 38, (41, 4)),  # after a synchronous warm-up
        (51, 100, 4, 38, (61, 4)),  # resumed
        (1, 12, 4, None, (9, 4)),  # a short run: the last ones
        (1, 2, 4, None, (1, 2)),  # shorter than the trace
        (1, 30, 1, 28, (30, 1)),
        (1, 30, 0, None, None),
    ],
)
def test_the_traced_steps(tmp_path, first, last, trace_steps, warmup_steps, traced):
    schedule = "1f1b" if warmup_steps is None else "pipemare"
    engine = pipeline_engine(schedule, warmup_steps)
    engine.global_steps = first - 1
    train(tmp_path, engine, steps=last, trace_steps=trace_steps)
    assert PROGRESS.follower is None
    trace = read_run(tmp_path).trace
    assert (tmp_path / "timeline").exists() == (trace is not None) == (traced is not None)
    if trace is not None:
        (rank,) = trace.ranks
        assert (rank.first_step, len(rank.steps), rank.stage) == (*traced, 1)


def test_a_trace_that_cannot_be_written_is_left_out(tmp_path, caplog):
    (tmp_path / "timeline").write_text("somebody's own")
    train(tmp_path, pipeline_engine(), steps=3)
    (warning,) = [r.getMessage() for r in caplog.records if r.name == "wavemare"]
    assert f"{tmp_path / 'timeline'} cannot be written (File exists)" in warning


def test_memory_and_checkpoints_are_events(tmp_path):
    with Recording(tmp_path, steps=1) as recording:
        with recording.step(1):
            pass
        recording.log(1, loss=1.0)
        with recording.saving(1, "step-000001"):
            pass
    memory, checkpoint = read_events(tmp_path)
    assert memory["bytes"] > 2**20
    assert (checkpoint["tag"], checkpoint["step"]) == ("step-000001", 1)
    assert checkpoint["seconds"] >= 0


def test_an_older_run_moves_aside_and_one_that_goes_on_does_not(tmp_path):
    folder = tmp_path / "run"
    train(folder, pipeline_engine(), steps=3)
    train(folder, pipeline_engine(), steps=4)
    older = read_metrics(tmp_path / "run.1" / "metrics.jsonl")
    assert [line["step"] for line in older] == [1, 2, 3]
    engine = pipeline_engine()
    engine.global_steps = 2
    train(folder, engine, steps=5)
    found = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5]
    assert not (tmp_path / "run.2").exists()
    with refuses(ConfigError, "steps", 1):
        Recording(folder, engine, steps=1)


def fail(folder, *, within):
    with Recording(folder, pipeline_engine(), steps=2) as recording:
        with recording.step(1):
            assert PROGRESS.follower is not None
            if within:
                raise ZeroDivisionError
        raise ZeroDivisionError


@pytest.mark.parametrize("within", [True, False])
def test_a_loop_that_fails_leaves_no_summary(tmp_path, within):
    shown = warnings.showwarning
    with pytest.raises(ZeroDivisionError):
        fail(tmp_path, within=within)
    assert read_run(tmp_path).summary is None
    assert not (tmp_path / "timeline").exists()
    assert PROGRESS.follower is None
    assert warnings.showwarning == shown


def test_a_loop_that_ends_early_leaves_the_steps_it_had(tmp_path):
    with Recording(tmp_path, pipeline_engine(), steps=4) as recording, recording.step(1):
        with PROGRESS.doing("train_batch"):
            pass
        recording.results["stopped_after"] = 1
    facts = read_run(tmp_path)
    assert len(facts.trace.ranks[0].steps) == 1
    assert facts.summary["results"]["stopped_after"] == 1


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_results_are_written_before_the_baselines_are_counted(tmp_path, error):
    """Neither a failure of them nor Ctrl-C in them takes the results of the training away."""
    recording = train(tmp_path, pipeline_engine(), steps=2)

    def baselines():
        assert read_run(tmp_path).summary["results"]["eval_loss"] == 0.5
        raise error("no room")

    if error is MemoryError:
        recording.finish({"eval_loss": 0.5}, baselines)
        assert (tmp_path / "loss.png").exists()
    else:
        with pytest.raises(KeyboardInterrupt):
            recording.finish({"eval_loss": 0.5}, baselines)
    assert read_run(tmp_path).summary["results"]["eval_loss"] == 0.5


def test_one_rank_counts_the_baselines(tmp_path, monkeypatch):
    counted = []

    def baselines():
        counted.append(1)
        return {"bigram cross-entropy": 0.75}, {"bigram": 0.75}

    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        recording = train(tmp_path, pipeline_engine(), steps=2)
        recording.finish({"eval_loss": 0.5}, baselines)
        assert counted == [1] * (rank == "0")
    results = read_run(tmp_path).summary["results"]
    assert (results["bigram cross-entropy"], results["eval_loss"]) == (0.75, 0.5)
