# SPDX-License-Identifier: Apache-2.0
"""Ranks die; the job goes on from its last checkpoint by itself, as if nothing had happened."""

import re
import shutil

import psutil
import pytest

from wavemare.report import read_run

STEPS, INTERVAL = 40, 10
OPTIONS = {"max_steps": STEPS, "eval_interval": STEPS, "save_interval": INTERVAL}
nightly = pytest.mark.nightly

pytestmark = [pytest.mark.world_size(2), pytest.mark.timeout(1800)]


def steps_done(run):
    file = run / "metrics.jsonl"
    return file.read_text().count('"loss"') if file.exists() else 0


def figures(run):
    """Return what was learnt: not times, nor what the engine tells of its steps.

    The latter has gaps in the first step after a restart, which has no step before it.
    """
    lines = read_run(run).metrics
    told = ("tokens_per_second", "waiting_", "bubble", "staleness_")
    return [{k: v for k, v in line.items() if not k.startswith(told)} for line in lines]


def column(lines, name):
    return [line[name] for line in lines if name in line]


def ranks_of(process):
    """Return the ranks of a job, in no order."""
    return [p for p in psutil.Process(process.pid).children(recursive=True) if is_rank(p)]


def is_rank(process):
    try:
        return "RANK" in process.environ() and "--output" in process.cmdline()
    except psutil.Error:
        return False


@pytest.fixture
def killed(start):
    """Run a command, kill one of its ranks at each of some steps; return code and output."""

    def run(words, folder, *, at):
        started = start(*words)
        for step in at:
            started.wait_until(lambda step=step: steps_done(folder) >= step)
            ranks = ranks_of(started.process)
            max(ranks, key=lambda rank: rank.environ()["RANK"]).kill()
            # The next attempt begins when all ranks of this one have ended.
            started.wait_until(lambda ranks=ranks: not psutil.wait_procs(ranks, timeout=0)[1])
        ended = started.end()
        return ended.code, ended.output

    return run


@pytest.mark.parametrize(
    ("engine", "interval", "kills"),
    [
        ("zero", 3, 1),
        pytest.param("zero", INTERVAL, 2, marks=nightly),
        pytest.param("pipemare", INTERVAL, 2, marks=nightly),
    ],
)
def test_a_job_survives_the_death_of_ranks(
    recipe, small_options, recipe_config, killed, tmp_path, engine, interval, kills
):
    config = recipe_config("gpt/pretrain", engine)
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    changes = {**OPTIONS, "max_steps": (kills + 6) * interval, "save_interval": interval}
    options = small_options("gpt", parted, **changes)
    at = [interval * (kill + 1) + 2 for kill in range(kills)]
    words = ["wavemare", "train", "gpt", "--config", config, "--max-restarts", kills]
    code, output = killed([*words, *options], parted, at=at)
    assert code == 0, output[-4000:]
    for kill in range(1, kills + 1):
        assert f"restart {kill} of {kills}" in output
    resumed = [int(step) for step in re.findall(r"resumed after step (\d+)", output)]
    for step, seen in zip(resumed, at, strict=True):  # the kill comes after what was seen
        assert step in range(seen - 2, changes["max_steps"], interval)
    whole_options = small_options("gpt", whole, **changes)
    recipe("gpt/pretrain", "--deepspeed_config", config, *whole_options).check()
    assert figures(parted) == figures(whole)
    shutil.rmtree(parted / "model")  # as if a rank had died in the export
    recipe("gpt/pretrain", "--deepspeed_config", config, *options, "--resume").check()
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (parted, whole)]
    assert weights[0] == weights[1]


@nightly
def test_torchrun_starts_ranks_again_by_itself(
    command, small_options, recipe_config, killed, tmp_path
):
    config = recipe_config("gpt/pretrain", "zero")
    recipe = ["wavemare.recipes.gpt.pretrain", "--deepspeed_config", config]
    words = ["torchrun", "--standalone", "--nproc-per-node", 2, "--max-restarts", 2, "-m", *recipe]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    code, output = killed([*words, *small_options("gpt", parted, **OPTIONS)], parted, at=(13,))
    assert code == 0, output[-4000:]
    assert "resumed after step 10" in output
    train = ["wavemare", "train", "gpt", "--config", config]
    command(*train, *small_options("gpt", whole, **OPTIONS)).check()
    assert figures(parted) == figures(whole)


@nightly
def test_fewer_ranks_go_on_with_the_same_batch(command, small_options, recipe_config, tmp_path):
    words = ["wavemare", "train", "gpt", "--config", recipe_config("gpt/pretrain", "zero")]
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    command(*words, *small_options("gpt", whole, **OPTIONS)).check()
    shutil.copytree(whole, parted)
    for later in (parted / "checkpoints").glob("step-0000[234]*"):
        shutil.rmtree(later)
    (parted / "checkpoints" / "latest").write_text("step-000010")
    options = small_options("gpt", parted, resume=True, **OPTIONS)
    ended = command(*words, "--nproc", 1, *options).check()
    assert "resumed after step 10" in ended.output
    before, after = figures(whole), figures(parted)
    assert column(after, "samples") == column(before, "samples")
    assert column(after, "loss") == pytest.approx(column(before, "loss"), rel=2e-3)
    assert len(column(after, "loss")) == STEPS
    assert after[-1]["eval_loss"] == pytest.approx(before[-1]["eval_loss"], rel=2e-3)
