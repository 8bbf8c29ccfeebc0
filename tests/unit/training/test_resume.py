# SPDX-License-Identifier: Apache-2.0
"""What restarted ranks of a recipe resume from, and with which batches."""

import time
from types import SimpleNamespace

import psutil
import pytest

from wavemare.engine.launch.group import agent_started
from wavemare.errors import ConfigError
from wavemare.training.setup import adapt_accumulation, load_run, resumes_after_restart


def test_the_agent_is_the_parent():
    assert agent_started() == psutil.Process().parent().create_time() - 1


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
    monkeypatch.setattr("wavemare.training.setup.agent_started", lambda: time.time() + age)
    assert resumes_after_restart(tmp_path) == resumes


def test_the_batch_is_accumulated_over_fewer_ranks():
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
    config = {**sizes, "gradient_accumulation_steps": 2}
    adapt_accumulation(config, 3)  # 16 cannot be shared by 3: refused elsewhere
    assert config == {**sizes, "gradient_accumulation_steps": 2}
    adapt_accumulation(config, 1)
    assert config == sizes


def test_a_run_that_is_complete_is_not_continued():
    engine = SimpleNamespace(global_steps=20, load_checkpoint=lambda folder: (folder, {}))
    with pytest.raises(
        ConfigError, match=r"--max_steps = 20: the checkpoint is at step 20 already"
    ):
        load_run(engine, "checkpoints", None, 20)
