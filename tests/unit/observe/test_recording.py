# SPDX-License-Identifier: Apache-2.0
"""What a training loop of one's own leaves in its run folder, and what is told of memory."""

import json
import warnings
from types import SimpleNamespace

import pytest

from wavemare.engine.config.resolve import WavemareConfig
from wavemare.engine.observe.progress import PROGRESS
from wavemare.errors import ConfigError
from wavemare.observe import Recording, read_events, read_metrics
from wavemare.observe.engine_facts import EngineFacts
from wavemare.observe.memory import estimate_activations, estimate_memory
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
        engine._sections = SimpleNamespace(pipeline=pipeline, model_dump=lambda mode: values)
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
    assert [event["kind"] for event in facts.events] == ["memory", "memory"]


@pytest.mark.parametrize("tells", ["train_batch", "forward"])
def test_a_step_is_noted_once_whoever_tells_of_it(tmp_path, tells):
    train(tmp_path, pipeline_engine(), steps=6, tells=tells)
    (rank,) = read_run(tmp_path).trace.ranks
    assert (rank.stage, rank.first_step, len(rank.steps)) == (1, 3, 4)
    assert len(rank.spans) == (0 if tells == "train_batch" else 4)
    assert PROGRESS.follower is None


def test_the_warm_up_is_not_noted(tmp_path):
    train(tmp_path, pipeline_engine("pipemare", warmup_steps=20), steps=40)
    assert read_run(tmp_path).trace.ranks[0].first_step == 20 + 2 + 1


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
    with pytest.raises(ConfigError, match="2 are done already"):
        Recording(folder, engine, steps=2)


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


def test_a_loop_without_an_engine(tmp_path):
    train(tmp_path, None, steps=2)
    facts = read_run(tmp_path)
    assert [line["loss"] for line in facts.metrics] == [1.0, 0.5]
    assert facts.trace is None
    assert facts.layout["stages"] == 1


@pytest.mark.parametrize(
    ("stages", "configured", "schedule"),
    [(4, None, "1f1b"), (1, None, "data parallel"), (2, "pipemare", "pipemare")],
)
def test_the_summary_says_how_the_model_is_laid_out(tmp_path, stages, configured, schedule):
    engine = pipeline_engine(configured)
    engine.num_stages = stages
    train(tmp_path, engine, steps=2)
    layout = read_run(tmp_path).summary["layout"]
    assert (layout["stages"], layout["schedule"], layout["zero_stage"]) == (stages, schedule, 1)


def test_ranks_that_share_layers_are_those_of_the_engine():
    section = WavemareConfig.model_validate({"tensor_parallel": {"size": 2}})
    assert EngineFacts(SimpleNamespace(_sections=section)).tensor_parallel == 2
    assert EngineFacts(None).tensor_parallel == 1


def test_only_rank_0_writes_the_runs_files(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    train(tmp_path, pipeline_engine(), steps=2)
    assert not (tmp_path / "metrics.jsonl").exists()
    assert {event["rank"] for event in read_events(tmp_path)} == {1}
    assert json.loads((tmp_path / "timeline" / "rank_00001.json").read_text())["rank"] == 1


BILLION = 10**9


def test_fp32_adam_is_16_bytes_per_parameter():
    estimate = estimate_memory(1000)
    assert (estimate.weights, estimate.gradients, estimate.optimizer) == (4000, 4000, 8000)
    assert estimate.total == 16_000


@pytest.mark.parametrize(
    ("stage", "gigabytes"),
    # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 ranks, mixed-precision Adam.
    [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)],
)
def test_zero_paper_figure_1(stage, gigabytes):
    estimate = estimate_memory(
        7_500_000_000, bytes_per_parameter=2, zero_stage=stage, data_world_size=64
    )
    assert estimate.total / BILLION == pytest.approx(gigabytes, abs=0.05)


def test_shares_round_up_and_plain_sgd_has_no_state():
    assert estimate_memory(10, zero_stage=3, data_world_size=4).weights == 3 * 4
    assert estimate_memory(10, optimizer_states=0).optimizer == 0


SHAPE = {"batch": 4, "sequence": 2048, "hidden": 6144, "heads": 64, "layers": 1}


@pytest.mark.parametrize("t", [1, 8])
def test_activations_of_the_22b_models_layer(t):
    # Korthikanti et al. 2022, equation 2 (with t = 1 it is 1): s b h (10 + 24 / t + 5 a s / (h t)).
    expected = 2048 * 4 * 6144 * (10 + 24 / t + 5 * 64 * 2048 / (6144 * t))
    found = estimate_activations(**SHAPE, bytes_per_value=2, tensor_world_size=t)
    assert found == pytest.approx(expected)


def test_activations_by_hand_in_fp32():
    # s b h (16 * 4 + 2) + a s s b (2 * 4 + 1), two layers, three micro-batches, logits on top.
    layer = 8 * 2 * 16 * 66 + 4 * 8 * 8 * 2 * 9
    output = 8 * 2 * (4 * 16 + 4 * 100)
    shape = {"batch": 2, "sequence": 8, "hidden": 16, "heads": 4, "layers": 2}
    assert estimate_activations(**shape) == 2 * layer
    found = estimate_activations(**shape, vocabulary=100, micro_batches=3)
    assert found == 3 * (2 * layer + output)


def test_text_names_the_parts():
    text = str(estimate_memory(2**28, activations=2**29))
    assert text == "4.5 GiB (weights 1.0, gradients 1.0, optimizer 2.0, activations 0.5)"
