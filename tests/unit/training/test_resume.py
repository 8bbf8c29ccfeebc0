# SPDX-License-Identifier: Apache-2.0
"""What restarted ranks of a recipe resume from, and with which batches."""

import time

import psutil
import pytest

from wavemare.engine.launch.restart import agent_started
from wavemare.training.setup import adapt_accumulation, resumes_after_restart


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
