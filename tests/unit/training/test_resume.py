# SPDX-License-Identifier: Apache-2.0
"""What restarted ranks of a recipe resume from, and with which batches."""

import time
from types import SimpleNamespace

import pytest
from torch import distributed as dist

from support.refusals import refuses
from wavemare.errors import ConfigError
from wavemare.training.arguments import TrainArguments
from wavemare.training.checkpoints import resumes_after_restart
from wavemare.training.evaluation import BEST, read_best
from wavemare.training.run import TrainingRun
from wavemare.training.setup import Setup, adapt_accumulation


@pytest.mark.parametrize(
    ("restarts", "age", "resumes"), [("1", -50, True), ("0", -50, False), ("1", 50, False)]
)
def test_only_checkpoints_of_the_same_job_are_resumed(
    tmp_path, monkeypatch, restarts, age, resumes
):
    latest = tmp_path / "checkpoints" / "latest"
    latest.parent.mkdir()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    assert not resumes_after_restart(tmp_path)  # before the first checkpoint
    latest.write_text("step-000010")
    monkeypatch.setattr("wavemare.training.checkpoints.job_started", lambda: time.time() + age)
    assert resumes_after_restart(tmp_path) == resumes


def test_the_batch_is_accumulated_over_fewer_ranks():
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
    config = {**sizes, "gradient_accumulation_steps": 2}
    adapt_accumulation(config, 3)  # 16 cannot be shared by 3: refused elsewhere
    assert config == {**sizes, "gradient_accumulation_steps": 2}
    adapt_accumulation(config, 1)
    assert config == sizes


def continued(arguments):
    known = {"config": {}, "layout": None, "section": None, "batch": {}}
    return Setup(arguments, **known, resume=True, rank=0, world_size=1)


def test_a_run_that_is_past_the_last_step_is_not_continued(tmp_path):
    engine = SimpleNamespace(global_steps=20, load_checkpoint=lambda folder: (folder, {}))
    arguments = TrainArguments(max_steps=19, output=str(tmp_path))
    run = TrainingRun(arguments)
    with (
        refuses(ConfigError, "--max_steps", 19),
        run.training(continued(arguments), engine, None),
    ):
        raise AssertionError("it trains")


def test_a_host_without_the_file_knows_the_best_evaluation_of_rank_0(tmp_path, monkeypatch):
    """Else its ranks would export, which takes all ranks, where the others do not."""
    best = {"eval_loss": 1.5, "step": 10}

    def gather(found, own, group=None):
        found[:] = [best, own]

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    setup = continued(TrainArguments(output=str(tmp_path)))
    assert read_best(setup) == best
    (tmp_path / BEST).write_text('{"eval_loss": 1.25, "step": 5}')  # of another run there
    assert read_best(setup) == best
