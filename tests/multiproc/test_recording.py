# SPDX-License-Identifier: Apache-2.0
"""Run folders of a Trainer and of a plain loop, read and shown as a recipe's."""

from pathlib import Path

import pytest

from wavemare.report import read_run

OURS = ["replicas", "loop", "pipeline"]


@pytest.fixture
def results(launch_once):
    return launch_once("recording.py")


@pytest.fixture
def runs(results):
    return {path.name: read_run(path) for path in Path(results[0]["folder"]).iterdir()}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["stock", *OURS])
def test_lines_are_what_was_trained(results, runs, name):
    run, trained = runs[name], results[0][name]
    if name == "loop":
        assert run.series("loss") == list(enumerate(trained["losses"], start=1))
    else:
        assert run.series("loss") == list(zip(range(2, 14, 2), trained["losses"], strict=True))
        assert run.series("eval_loss") == [(13, trained["eval"])]
    # DeepSpeed computes no norm of gradients that it neither clips nor shares out.
    metrics = ("learning_rate", "tokens_per_second", "grad_norm")
    for metric in metrics[: 2 if name in ("stock", "replicas") else 3]:
        values = [value for _, value in run.series(metric)]
        assert len(values) == len(run.series("loss")), metric
        assert all(value >= 0 for value in values), metric
        assert values[-1] > 0, metric  # the loop's rate begins at 0
    assert run.summary["results"]["steps"] == 13
    assert {event["rank"] for event in run.events if event["kind"] == "memory"} == {0, 1}


def test_layouts_are_those_of_the_engines(runs):
    for name, stages in (("stock", 1), ("replicas", 1), ("loop", 2), ("pipeline", 2)):
        layout = runs[name].layout
        assert (layout["stages"], layout["processes"]) == (stages, 2)
        assert layout["schedule"] == ("data parallel" if stages == 1 else "pipemare")
        assert layout["train_batch_size"] == 4 * (3 - stages)
        assert layout["gradient_accumulation_steps"] == 2


@pytest.mark.parametrize("name", OURS)
def test_steps_are_noted_on_all_ranks(runs, name):
    trace = runs[name].trace
    # The last ones of a run so short.
    assert [(r.rank, r.first_step, len(r.steps)) for r in trace.ranks] == [(0, 10, 4), (1, 10, 4)]
    passes = [span for rank in trace.ranks for span in rank.spans if "B" in span.text]
    assert len(passes) >= 2 * 4 * 2  # ranks, steps, micro-batches
    assert 0 < trace.bubble < 1


def test_pipelines_tell_their_bubble_and_a_loop_its_checkpoint(runs):
    for name in ("loop", "pipeline"):
        assert runs[name].series("bubble")
    (checkpoint,) = runs["loop"].checkpoints
    assert checkpoint.complete
    waits = [event for event in runs["loop"].events if event["kind"] == "checkpoint"]
    assert {event["tag"] for event in waits} == {"last"}


@pytest.mark.parametrize("name", ["stock", "replicas", "pipeline"])
def test_checkpoints_of_a_trainer_are_listed(runs, name):
    found = [(each.tag, each.complete, each.latest) for each in runs[name].checkpoints]
    assert found == [("checkpoint-12", True, False), ("checkpoint-13", True, True)]
    assert all(each.saved and each.bytes > 100_000 for each in runs[name].checkpoints)
    waits = [e for e in runs[name].events if e["kind"] == "checkpoint" and e["rank"] == 0]
    assert [event["tag"] for event in waits] == ["checkpoint-12", "checkpoint-13"]
    assert all(event["seconds"] > 0 for event in waits)
