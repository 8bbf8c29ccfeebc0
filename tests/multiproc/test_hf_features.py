# SPDX-License-Identifier: Apache-2.0
"""What users of the Trainer rely on, with our engines, BERT and GPT-2."""

import pytest

# By day each engine with one kind of model.
CHOSEN = [("gpt2", "zero1"), ("bert", "1f1b"), ("gpt2", "pipemare")]
OTHERS = [("bert", "zero1"), ("gpt2", "1f1b"), ("bert", "pipemare")]
ENGINES = [*CHOSEN, *(pytest.param(*other, marks=pytest.mark.nightly) for other in OTHERS)]


@pytest.fixture
def results(launch_once):
    def of(case, kind, engine):
        together = CHOSEN if (kind, engine) in CHOSEN else OTHERS
        names = [f"{c}_{k}_{e}" for k, e in together for c in ("resumed", "best", "first")]
        return [found[f"{case}_{kind}_{engine}"] for found in launch_once("hf_features.py", *names)]

    return of


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("kind", "engine"), ENGINES)
def test_a_resumed_run_is_the_run_that_was_not_stopped(results, kind, engine):
    for result in results("resumed", kind, engine):
        whole, again = result["losses"]
        assert len(whole) == 8
        assert again == whole  # the first four come from the checkpoint's state
        assert result["digests"][0] == result["digests"][1]
        assert result["step"] == 8


@pytest.mark.parametrize(("kind", "engine"), ENGINES)
def test_the_best_model_comes_back_and_early_stopping_stops(results, kind, engine):
    for result in results("best", kind, engine):
        assert result["step"] == 4
        assert result["best"] == "checkpoint-2"
        best, last, loaded = result["digests"]
        assert loaded == best != last
        assert result["counts"]["on_step_end"] == 4
        assert result["counts"]["on_substep_end"] == 4
        assert result["counts"]["on_evaluate"] == 2
        assert result["counts"]["on_save"] == 2
        assert result["counts"]["on_train_end"] == 1
        assert result["rates"] == pytest.approx([0.0, 0.005, 0.01, 0.01 * 5 / 6])
        assert {"loss", "learning_rate", "eval_loss", "eval_right", "epoch"} <= set(result["keys"])


@pytest.mark.parametrize(("kind", "engine"), ENGINES)
def test_metrics_see_each_sample_once_on_every_rank(results, kind, engine):
    for result in results("best", kind, engine):
        shape = [7] if kind == "bert" else [7, 16]
        assert result["seen"] == [[shape, shape]] * 2


@pytest.mark.parametrize(("kind", "engine"), ENGINES)
def test_it_evaluates_and_predicts_before_it_trains(results, kind, engine):
    for result in results("first", kind, engine):
        assert result["same"]
        assert result["labels"]
        assert result["after"] != result["before"]
