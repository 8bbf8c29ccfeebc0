# SPDX-License-Identifier: Apache-2.0
"""What a recipe resumes from, what it logs and saves at which step, and how it is stopped."""

import os
import signal
import time
from itertools import pairwise
from statistics import mean
from types import SimpleNamespace

import pytest
from torch import distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401, registers the backend

from support.refusals import refuses
from wavemare.errors import ConfigError
from wavemare.observe import read_metrics
from wavemare.training.arguments import TrainArguments
from wavemare.training.checkpoints import resumes_after_restart
from wavemare.training.evaluation import BEST, read_best
from wavemare.training.run import TrainingRun
from wavemare.training.setup import adapt_accumulation


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


def alone_run(arguments, *, resume):
    known = {"config": {}, "layout": None, "section": None, "batch": {}, "source": None}
    return TrainingRun(arguments, **known, resume=resume, rank=0, world_size=1)


def test_a_run_that_is_past_the_last_step_is_not_continued(tmp_path):
    known = {"global_steps": 20, "layout": None}
    engine = SimpleNamespace(**known, load_checkpoint=lambda folder: (folder, {}))
    run = alone_run(TrainArguments(max_steps=19, output=str(tmp_path)), resume=True)
    with refuses(ConfigError, "--max_steps", 19):
        run.resume_or_start(engine, None)


def test_a_host_without_the_file_knows_the_best_evaluation_of_rank_0(tmp_path, monkeypatch):
    """Else its ranks would export, which takes all ranks, where the others do not."""
    best = {"eval_loss": 1.5, "step": 10}

    def gather(found, own, group=None):
        found[:] = [best, own]

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    run = alone_run(TrainArguments(output=str(tmp_path)), resume=True)
    assert read_best(run) == best
    (tmp_path / BEST).write_text('{"eval_loss": 1.25, "step": 5}')  # of another run there
    assert read_best(run) == best


class Counted:
    """An engine and its loader, of which only the steps are real."""

    num_stages = 1
    step_lead = 0
    optimizer = layout = None

    def __init__(self):
        self.global_steps, self.saved = 0, {}

    @property
    def global_samples(self):
        return 8 * self.global_steps

    def train_batch_size(self):
        return 8

    def train_micro_batch_size_per_gpu(self):
        return 8

    def gradient_accumulation_steps(self):
        return 1

    def zero_optimization_stage(self):
        return 0

    def get_global_grad_norm(self):
        return None

    def train_batch(self):
        self.global_steps += 1
        return float(self.global_steps)  # the loss

    def load_checkpoint(self, folder):
        self.global_steps = 4
        return folder, {"loader": {"epoch": 1}, "seconds": 100.0}

    def save_checkpoint(self, folder, tag, client_state):
        self.saved[tag] = client_state

    def finish_saving(self):
        self.saved["finished"] = True

    def state_dict(self):
        return {"consumed_samples": self.global_samples}

    def load_state_dict(self, state):
        self.loaded = state


@pytest.fixture
def alone():
    dist.init_process_group("fake", rank=0, world_size=1, store=dist.HashStore())
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)
    dist.destroy_process_group()


@pytest.mark.parametrize("records", ["first", "last"])
@pytest.mark.parametrize(
    ("resume", "signalled", "ends"),
    [(False, None, {9}), (True, None, {9}), (False, 2, {3, 4, 5})],
)
def test_a_run_logs_saves_and_ends_at_the_right_steps(
    tmp_path, alone, resume, signalled, ends, records
):
    """In whatever order the loop does what it does after a step."""
    options = {"max_steps": 9, "log_interval": 2, "save_interval": 3, "output": str(tmp_path)}
    run = alone_run(TrainArguments(**options), resume=resume)
    engine, trained = Counted(), []
    first = run.resume_or_start(engine, engine)
    assert first == (5 if resume else 1)
    with run.recording(engine):
        for step in run.steps(first):
            if step == signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            loss = engine.train_batch()
            if records == "first":
                run.record(step, loss)
            if step % 3 == 0 or run.is_last:
                run.save_checkpoint(engine, engine)
            trained.append((step, run.is_last))
            if records == "last":
                run.record(step, loss)
    assert run.step in ends
    assert run.stopped == (signalled is not None)
    assert trained == [(step, step == run.step) for step in range(first, run.step + 1)]
    # A line has the mean loss since the line before.
    logged = [step for step, is_last in trained if is_last or step % 2 == 0]
    since = [range(a + 1, b + 1) for a, b in pairwise([first - 1, *logged])]
    lines = {line["step"]: line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")}
    assert lines == {steps[-1]: mean(steps) for steps in since}
    saved = [f"step-{step:06d}" for step, is_last in trained if is_last or step % 3 == 0]
    assert [*engine.saved] == [*saved, "finished"]
    assert engine.saved[saved[-1]]["loader"] == {"consumed_samples": 8 * run.step}
    if resume:
        assert engine.loaded == {"epoch": 1, "consumed_samples": 32}
        assert engine.saved[saved[-1]]["seconds"] > 100


def test_steps_end_by_themselves(tmp_path, alone):
    """Also in a loop that neither records them nor asks which one is the last."""
    run = alone_run(TrainArguments(max_steps=9, output=str(tmp_path)), resume=False)
    engine, trained = Counted(), []
    with run.recording(engine):
        for step in run.steps(run.resume_or_start(engine, engine)):
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            engine.train_batch()
            trained.append(step)
    assert trained == [*range(1, run.step + 1)]
    assert run.step in {3, 4, 5}
    assert run.stopped
