# SPDX-License-Identifier: Apache-2.0
"""SIGTERM stops a run with a checkpoint and exit code 0; what is resumed equals a whole run."""

import json
import signal

import pytest

from wavemare.report import read_run

STEPS = 80
# Longer than the training: what is found after the stop was written by the stop.
RARE = {"max_steps": STEPS, "eval_interval": STEPS, "save_interval": STEPS}

pytestmark = pytest.mark.timeout(1800)


def steps_done(run):
    file = run / "metrics.jsonl"
    return file.read_text().count('"loss"') if file.exists() else 0


@pytest.fixture
def stopped(start):
    """Run a command, call a function in the middle of its training, return code and output."""

    def run(words, folder, interrupt):
        started = start(*words)
        started.wait_until(lambda: steps_done(folder) >= 5)
        interrupt(started.process)
        ended = started.end()
        return ended.code, ended.output

    return run


def check_stop(run, code, output):
    """Check what a stop leaves, and return the step that it came after."""
    assert code == 0, output[-4000:]
    summary = json.loads((run / "summary.json").read_text())["results"]
    step = summary["stopped_after"]
    assert 5 <= step < STEPS
    assert steps_done(run) == step
    assert output.count(f"stopped by SIGTERM after step {step}; resume with --resume") == 1
    assert "Traceback" not in output
    assert "results" not in output
    assert (run / "checkpoints" / "latest").read_text() == f"step-{step:06d}"
    assert [p.name for p in (run / "checkpoints").glob("*step*")] == [f"step-{step:06d}"]
    assert not (run / "model").exists()
    return step


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["pipeline", "zero"])
def test_a_stopped_and_resumed_run_equals_a_whole_one(
    command, small_options, recipe_config, stopped, tmp_path, engine
):
    config = recipe_config("gpt/pretrain", engine)
    words = ["wavemare", "train", "gpt", "--config", config]
    whole, parted = tmp_path / "whole", tmp_path / "parted"

    code, output = stopped(
        [*words, *small_options("gpt", parted, **RARE)],
        parted,
        lambda process: process.send_signal(signal.SIGTERM),
    )
    step = check_stop(parted, code, output)
    ended = command(*words, *small_options("gpt", parted, resume=True, **RARE)).check()
    assert f"resumed after step {step}" in ended.output
    command(*words, *small_options("gpt", whole, **RARE)).check()

    def figures(run):
        lines = read_run(run).metrics
        return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]

    assert figures(parted) == figures(whole)
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (parted, whole)]
    assert weights[0] == weights[1]
    assert "stopped_after" not in (parted / "summary.json").read_text()
