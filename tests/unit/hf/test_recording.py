# SPDX-License-Identifier: Apache-2.0
"""What a Trainer's callbacks leave in a run folder."""

import warnings
from types import SimpleNamespace

from transformers import TrainerControl, TrainerState

from wavemare.hf import RecordingCallback
from wavemare.report import read_run

ARGUMENTS = SimpleNamespace(to_sanitized_dict=lambda: {"logging_steps": 2}, output_dir="trained")


def follow(callback, *, steps, stop, done=0):
    """Call a callback as the Trainer does, for 4 steps at the most; logs every second one."""
    state, control = TrainerState(max_steps=steps), TrainerControl()
    state.global_step = done
    callback.on_train_begin(ARGUMENTS, state, control)
    for _ in range(done, stop):
        callback.on_step_begin(ARGUMENTS, state, control)
        state.global_step += 1
        state.num_input_tokens_seen += 64
        callback.on_step_end(ARGUMENTS, state, control)
        if state.global_step % 2 == 0:
            logs = {"loss": 8.0 / state.global_step, "learning_rate": 0.5, "grad_norm": None}
            callback.on_log(ARGUMENTS, state, control, logs=logs)
    return state, control


def test_logs_are_lines_and_evaluations_are_validation(tmp_path):
    callback = RecordingCallback(SimpleNamespace(deepspeed=None), tmp_path)
    state, control = follow(callback, steps=4, stop=4)
    callback.on_log(ARGUMENTS, state, control, logs={"train_loss": 3.0, "train_runtime": 1.5})
    callback.on_train_end(ARGUMENTS, state, control)
    metrics = {"eval_loss": 1.5, "eval_accuracy": 0.5, "epoch": 1.0}
    callback.on_evaluate(ARGUMENTS, state, control, metrics=metrics)
    facts = read_run(tmp_path)
    assert facts.series("loss") == [(2, 4.0), (4, 2.0)]
    assert facts.series("eval_loss") == [(4, 1.5)]
    assert facts.series("accuracy") == [(4, 0.5)]
    assert len(facts.series("tokens_per_second")) == 2
    assert facts.configuration["arguments"] == {"logging_steps": 2}
    assert facts.summary is not None
    assert facts.summary["results"]["train_loss"] == 3.0


def test_a_training_that_failed_has_no_summary_and_lets_go(tmp_path):
    shown = warnings.showwarning
    callback = RecordingCallback(SimpleNamespace(deepspeed=None), tmp_path / "run")
    follow(callback, steps=4, stop=2)  # an exception, of which no callback hears
    state, control = follow(callback, steps=4, stop=4)
    callback.on_train_end(ARGUMENTS, state, control)
    assert read_run(tmp_path / "run.1").summary is None
    assert read_run(tmp_path / "run").summary is not None
    assert warnings.showwarning == shown


def test_nothing_is_begun_where_no_step_is_left(tmp_path):
    callback = RecordingCallback(SimpleNamespace(deepspeed=None), tmp_path / "run")
    state, control = follow(callback, steps=4, stop=4, done=4)
    callback.on_evaluate(ARGUMENTS, state, control, metrics={"eval_loss": 1.5})
    callback.on_train_end(ARGUMENTS, state, control)
    assert not (tmp_path / "run").exists()
